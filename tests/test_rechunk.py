"""Operands and the C of `gemm` in other blocks than the plan's: cut, joined, added, counted."""

from __future__ import annotations

from dataclasses import replace

import dask.array as da
import numpy as np
import pytest
from clusters import counting_client, soon
from distributed import wait
from hypothesis import given
from hypothesis import strategies as st
from labels import tasks_of
from paper import gpus
from small import integers

import multimm
from multimm.cluster.plugins.transfer_counter import received_bytes, reset_received_bytes
from multimm.errors import ShapeError
from multimm.graph.array import build
from multimm.graph.block_task import BlockTask
from multimm.graph.label import Kind
from multimm.graph.lowering.rechunk import cut_out, join
from multimm.graph.lowering.sub_blocks import SubBlocks, multiply_bands
from multimm.graph.tasks.multiply import Step
from multimm.io import open_array
from multimm.planning import distribution
from multimm.planning.choice import plan_matmul
from multimm.planning.options import Options
from multimm.planning.problem import Problem
from multimm.planning.spec import MatrixSpec
from multimm.planning.tiling.rechunk import cuts_of

PLAIN = Step("float32", "float32")
ADDED = Step("float32", "float32", alpha=2, beta=3)
SIZE = 96

client = counting_client(4)


def spec_of(x, *owners):
    return MatrixSpec(x.shape, str(x.dtype), chunks=x.chunks, owners=owners)


def product(a, b, workers, c=None, step=PLAIN, *, symmetric=False, once=None, **fixed):
    """A plan, and the product by it; `once`: whether tasks of their own cut operands."""
    turned = (spec_of(x).T if t else spec_of(x)
              for x, t in ((a, step.trans_a), (b, step.trans_b)))  # fmt: skip
    added = None if c is None else spec_of(c)
    problem = Problem(*turned, c=added, symmetric=symmetric)
    plan = plan_matmul(problem, gpus(workers), options=Options(**fixed))
    if once is not None:
        plan = replace(plan, layout=replace(plan.layout, cut_once=once))
    return plan, build(plan, a, b, c, step, np.empty((0,) * max(a.ndim, b.ndim), "float32"))


# Operands that are cut by tasks, once ---------------------------------------------------


def cutting(c):
    """The tasks that cut or join operand blocks, by key."""
    tasks = dict(c.dask).items()
    return {key: t for key, t in tasks if getattr(t, "func", None) in (cut_out, join)}


def test_chunks_that_were_fetched_to_be_joined_are_let_go(client):
    a = client.persist(da.from_array(integers((SIZE, SIZE), 6), chunks=12, name="rechunked-small"))
    wait(a)
    reset_received_bytes(client)
    c = multimm.matmul(a, a, blocks=48, slabs=48).persist()
    wait(c)
    assert sum(received_bytes(client).values())
    soon(lambda: [len(those) for those in client.who_has(a).values()] == [1] * 64)


def test_what_a_worker_has_of_a_block_travels_in_one_coalesced():
    """However small the chunks: each fetch takes longer than its bytes do."""
    x = integers((64, 64), 10)
    a = da.from_array(x, chunks=4, name="rechunked-scattered")
    spec = spec_of(a, *np.random.default_rng(0).integers(0, 4, 16 * 16))
    plan = plan_matmul(Problem(spec, spec), gpus(), options=Options(blocks=16, slabs=16))
    c = build(plan, a, a, None, PLAIN, np.empty((0, 0), "float32"))
    made, rank = cutting(c), plan.grid.rank
    fetched = 0
    for task in made.values():
        if task.func is join:
            owner = task.place.owner
            elsewhere = [key for key, at in task.place.blocks if rank(at) != rank(owner)]
            fetched += len(elsewhere)
            assert len(elsewhere) <= 3
            assert all(made[key].func is cut_out for key in elsewhere if key in made)
    expected = plan.layout.operands.rechunk
    assert 0.9 * expected.fetched <= fetched <= expected.fetched
    assert 0.9 * expected.tasks <= len(made) <= expected.tasks
    moved = sum(4 * 16 for task in made.values() if task.func is cut_out for _ in task.place.blocks)
    alone = fetched - sum(task.func is cut_out for task in made.values())
    assert plan.bytes_recut == moved + 4 * 16 * alone
    np.testing.assert_array_equal(c.compute(scheduler="sync"), x @ x)


@pytest.mark.parametrize("workers", [1, 4])
def test_stacks_and_transposed_operands(workers):
    x, y = integers((3, 20, 30), 3), integers((20, 30), 4)
    a = da.from_array(x, chunks=(2, 7, 11))
    b = da.from_array(y, chunks=(20, 30))
    _, c = product(a, b, workers, step=replace(PLAIN, trans_b=True), blocks=8, slabs=9)
    np.testing.assert_array_equal(c.compute(scheduler="sync"), x @ y.T)


@pytest.mark.parametrize("workers", [1, 4])
@pytest.mark.parametrize("chunk", [10, 30])
def test_a_block_that_is_not_what_its_chunks_say_is_an_error(workers, chunk):
    """Larger ones, too, of which a part could be taken for the block."""
    a = da.ones((60, 60), chunks=chunk, dtype="float32")
    false = a.map_blocks(lambda x: np.pad(x, ((0, 3), (0, 0))), dtype="float32", chunks=a.chunks)
    _, c = product(false, a, workers, blocks=20, slabs=60)
    with pytest.raises(ShapeError, match="its array's chunks say"):
        c.compute(scheduler="sync")


def test_what_is_cut_out_has_memory_of_its_own():
    x = integers((6, 6), 5)
    cuts = ((slice(0, 2), slice(1, 4)), (slice(0, 2), slice(0, 3))), ((slice(5, 6),) * 2,) * 2
    parts = cut_out(SubBlocks([x, x], cuts, (x.shape, x.shape), (9, 9)))
    assert parts.base is None
    np.testing.assert_array_equal(parts, [*x[:2, 1:4].ravel(), x[5, 5]])


# Operands of which every product cuts its own -----------------------------------------


@pytest.mark.parametrize("step", [PLAIN, replace(PLAIN, trans_a=True, trans_b=True)])
@pytest.mark.parametrize(
    "fixed", [{"blocks": 10, "slabs": 10}, {"blocks": (30, 9), "slabs": 35}, {"blocks": 40}]
)
def test_products_of_sub_blocks_are_right_and_take_no_other_tasks(step, fixed):
    x, y = integers((31, 35), 0), integers((35, 33), 1)
    a, b = (z.T if step.trans_a else z for z in (x, y))
    a = da.from_array(a, chunks=(7, (30, a.shape[1] - 30)), name="pieces-a")
    b = da.from_array(b, chunks=(11, 8), name="pieces-b")
    plan, c = product(a, b, 1, step=step, once=False, **fixed)
    assert plan.layout.operands.cut_again == ("a", "b")
    tasks = dict(c.dask)
    ours = [task for task in tasks.values() if isinstance(task, BlockTask)]
    assert len(ours) == plan.tasks
    stored = {key for name in ("pieces-a", "pieces-b") for key in tasks if key[0] == name}
    assert len(stored) == a.npartitions + b.npartitions
    for task in ours:
        assert {key for key, _ in task.place.blocks} == task.dependencies & stored != set()
    np.testing.assert_array_equal(c.compute(scheduler="sync"), x @ y)


def test_the_bits_are_those_of_operands_that_are_cut_by_tasks():
    rng = np.random.default_rng(3)
    a, b = (
        da.from_array(rng.standard_normal((64, 64), np.float32), chunks=20, name=f"normal-{name}")
        for name in "ab"
    )
    results = [
        product(a, b, 1, once=once, blocks=32, slabs=16)[1].compute(scheduler="sync")
        for once in (True, False)
    ]
    np.testing.assert_array_equal(*results)


def test_symmetric_products_and_addends():
    x, d = integers((35, 30), 4), integers((30, 30), 5)
    a = da.from_array(x, chunks=(9, 7), name="pieces-gram")
    step, c0 = replace(ADDED, trans_a=True), da.from_array(d, chunks=10)
    plan, c = product(a, a, 1, c0, step, symmetric=True, once=False, blocks=10, slabs=20)
    assert plan.layout.mirrors
    np.testing.assert_array_equal(c.compute(scheduler="sync"), 2 * x.T @ x + 3 * d)


@pytest.mark.parametrize("stored", ["as multiplied", "turned", "A turned", "B turned"])
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize(
    ("k_tiles", "along_k"),
    [((24,), (24,)), ((10, 14), (10, 14)), ((24,), (10, 8, 6)), ((7, 17), (10, 14))],
)
@pytest.mark.parametrize(
    ("dtype", "added"), [("float32", False), ("float16", True), ("int32", False)]
)
def test_long_sub_blocks_are_multiplied_as_they_come(
    monkeypatch, stored, wide, k_tiles, along_k, dtype, added
):
    """Nothing of them is joined, also where blocks of C, or k-tiles, end within one."""
    monkeypatch.setattr(distribution, "LEAST_BAND", 1)
    monkeypatch.setattr(distribution, "PACKED_K_TILE", 1)
    monkeypatch.setattr(SubBlocks, "copied", None)
    x, y, d = integers((130, 24), 8), integers((24, 3), 9), integers((130, 3), 10)
    chunks = (((40, 7, 43, 40), along_k), (k_tiles, (3,)))
    x, y, d = (y.T, x.T, d.T) if wide else (x, y, d)
    chunks = (chunks[1][::-1], chunks[0][::-1]) if wide else chunks
    turns = stored in ("turned", "A turned"), stored in ("turned", "B turned")
    of_sums = "int64" if dtype == "int32" else "float32"
    step = Step(of_sums, of_sums, *turns)
    if added:
        step = replace(step, alpha=2, beta=3)
    a, b = (
        da.from_array((z.T if turn else z).astype(dtype), chunks=own[::-1] if turn else own)
        for z, turn, own in zip((x, y), turns, chunks, strict=True)
    )
    specs = (MatrixSpec(z.shape, dtype, chunks=own) for z, own in zip((x, y), chunks, strict=True))
    problem = Problem(*specs, dtype=of_sums, accumulate=of_sums)
    layout = plan_matmul(problem, gpus(1), options=Options(blocks=60)).layout
    layout = replace(layout, k_tiles=k_tiles, cut_once=False, in_bands=True)
    assert layout.operands.banded == ("b" if wide else "a")
    plan = replace(plan_matmul(problem, gpus(1)), layout=layout)
    meta = np.empty((0, 0), of_sums)
    c = build(plan, a, b, da.from_array(d.astype(of_sums)) if added else None, step, meta)
    assert c.dtype == of_sums
    expected = x.astype("int64") @ y.astype("int64")
    expected = 2 * expected + 3 * d if added else expected
    np.testing.assert_array_equal(c.compute(scheduler="sync"), expected)


def test_a_wrong_sub_block_is_named():
    x = integers((8, 8), 8)
    whole = SubBlocks([x], (((slice(0, 8),) * 2,) * 2,), ((9, 8),), (8, 8))
    with pytest.raises(ShapeError, match=r"\(8, 8\).*\(9, 8\)"):
        multiply_bands(whole, x, banded="a", step=PLAIN)


def test_a_block_within_another_is_no_copy():
    x = integers((8, 8), 8)
    cuts = (((slice(2, 4), slice(0, 8)), (slice(0, 2), slice(0, 8))),)
    whole = SubBlocks([x], cuts, ((8, 8),), (2, 8))
    assert whole.joined().base is x
    np.testing.assert_array_equal(whole.joined(), x[2:4])


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.data())
def test_every_element_is_cut_once_and_put_in_order(blocks, data):
    size = sum(blocks)
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, size))
    elements, first = np.arange(size), np.cumsum([0, *blocks])
    found = np.full(stop - start, -1)
    for (number,), (cut,), (to,) in cuts_of((tuple(blocks),), (slice(start, stop),)):
        block = elements[first[number] : first[number + 1]]
        assert cut.stop > cut.start or start == stop  # no block is asked for in vain
        assert (found[to] == -1).all()
        found[to] = block[cut]
    np.testing.assert_array_equal(found, elements[start:stop])


def test_one_operand_in_sub_blocks_and_the_other_from_a_file(tmp_path):
    x, y = integers((40, 40), 11), integers((40, 40), 12)
    np.save(tmp_path / "x.npy", x)
    a, b = open_array(tmp_path / "x.npy"), da.from_array(y, chunks=7)
    specs = MatrixSpec(a.shape, chunks=a.chunks), spec_of(b)
    problem = Problem(*specs, rereadable=(True, False))
    plan = plan_matmul(problem, gpus(1), options=Options(blocks=20, slabs=20))
    plan = replace(plan, layout=replace(plan.layout, cut_once=False))
    assert plan.layout.operands.cut_again == ("b",)
    c = build(plan, a, b, None, PLAIN, np.empty((0, 0), "float32"))
    assert all(key[0] != a.name for key in dict(c.dask))
    np.testing.assert_array_equal(c.compute(scheduler="sync"), x @ y)


# C in any chunks --------------------------------------------------------------------


def cuts(d):
    """The tasks that cut blocks of C, by key."""
    found = tasks_of(d, Kind.CUT, "C")
    assert all(task.func is cut_out for task in found.values())
    return found


def test_the_c_of_a_product_is_added_where_it_is_made(client):
    x = integers((SIZE, SIZE), 3)
    a = client.persist(da.from_array(x, chunks=24).map_blocks(np.copy))
    wait(a)
    fixed = {"blocks": 24, "slabs": 24, "p_k": 1}
    c = multimm.matmul(a, a, **fixed)
    plan = multimm.plan(a, a, beta=1, c=c, **fixed)
    assert plan.bytes_added == 0
    d = multimm.gemm(1, a, a, 1, c, **fixed)
    assert not cuts(d)
    np.testing.assert_array_equal(d.compute(), 2 * (x @ x))


@pytest.mark.parametrize("chunk", [8, 24])
def test_what_was_fetched_of_c_is_let_go(client, chunk):
    x = integers((SIZE, SIZE), 5)
    a, c = client.persist([da.from_array(x, chunks=n).map_blocks(np.copy) for n in (24, chunk)])
    wait([a, c])
    d = multimm.gemm(1, a, a, 1, c, blocks=24, slabs=24).persist()
    wait(d)
    soon(lambda: {len(those) for those in client.who_has(c).values()} == {1})


@pytest.mark.parametrize("workers", [1, 4, 6])
@pytest.mark.parametrize("p_k", [1, 3])
@pytest.mark.parametrize("chunks", [7, 60, (60, 10), ((1, 19, 40), (5, 0, 50, 5))])
@pytest.mark.parametrize("kind", ["plain", "turned", "symmetric"])
def test_products_with_c_in_any_chunks_are_right(workers, p_k, chunks, kind):
    x, y, z = (integers((60, 60), seed) for seed in range(6, 9))
    flags = {"trans_a": kind != "plain", "trans_b": kind == "turned"}
    a = da.from_array(x, chunks=20)
    b = a if kind == "symmetric" else da.from_array(y, chunks=(20, 30))
    c = da.from_array(z, chunks=chunks)
    step = replace(ADDED, **flags)
    symmetric, fixed = kind == "symmetric", {"blocks": 20, "slabs": 20, "p_k": p_k}
    plan, d = product(a, b, workers, c, step, symmetric=symmetric, **fixed)
    assert plan.layout.mirrors == symmetric
    left, right = x.T if flags["trans_a"] else x, x if b is a else y.T if flags["trans_b"] else y
    np.testing.assert_array_equal(d.compute(scheduler="sync"), 2 * left @ right + 3 * z)


@pytest.mark.parametrize("workers", [1, 4])
@pytest.mark.parametrize("p_k", [1, 2])
def test_stacks_with_c(workers, p_k):
    x, y, z = integers((5, 20, 30), 0), integers((30, 25), 1), integers((5, 20, 25), 2)
    a, b = da.from_array(x, chunks=(2, 7, 11)), da.from_array(y, chunks=30)
    c = da.from_array(z, chunks=(3, 20, 6))
    plan, d = product(a, b, workers, c, ADDED, blocks=8, slabs=9, p_k=p_k)
    assert plan.layout.cuts_c
    np.testing.assert_array_equal(d.compute(scheduler="sync"), 2 * x @ y + 3 * z)


def test_c_that_lies_elsewhere_takes_memory_there_and_where_it_is_added():
    square = MatrixSpec((64, 64), chunks=((16,) * 4,) * 2)

    def held(owners):
        problem = Problem(square, square, c=replace(square, owners=owners))
        plan = plan_matmul(problem, gpus(4), options=Options(blocks=16, slabs=16, p_k=1))
        return sum(plan.spill_terms.values()), plan

    there, plan = held((0,) * 16)
    here, _ = held(plan.layout.result_owners(4))
    # One worker has all of it, another one fetches its quarter.
    assert there - here >= square.nbytes * (1 - 1 / 4) + square.nbytes / 4
