"""Operands in other blocks than the plan's, cut and joined by every product that uses them."""

from __future__ import annotations

from dataclasses import replace

import dask.array as da
import numpy as np
import pytest
from clusters import in_threads
from distributed import Client, wait
from hypothesis import given
from hypothesis import strategies as st
from small import integers

import multimm
from multimm.errors import ShapeError
from multimm.graph.array import build
from multimm.graph.block_task import BlockTask
from multimm.graph.lowering.sub_blocks import Pieces, multiply_bands, pieces
from multimm.graph.tasks.multiply import Step
from multimm.io import open_array
from multimm.planning import distribution
from multimm.planning.choice import plan_matmul
from multimm.planning.cost import memory, time
from multimm.planning.hardware import CALL_S, LONE_CALL_S
from multimm.planning.options import Options
from multimm.planning.problem import Problem
from multimm.planning.schedule import Schedule
from multimm.planning.spec import H200, ClusterSpec, MatrixSpec
from multimm.planning.tiling.grid import Grid, regular
from multimm.planning.tiling.rechunk import cuts_of

PLAIN = Step("float32", "float32")


def square(size, chunk):
    sizes = regular(size, chunk)
    return MatrixSpec((size, size), chunks=(sizes, sizes))


def gpus(workers):
    return ClusterSpec.homogeneous(H200, workers)


def spec_of(x, *, turned=False):
    spec = MatrixSpec(x.shape, chunks=x.chunks)
    return spec.T if turned else spec


def planned(a, b, step=PLAIN, *, once=False, gram=False, **fixed):
    """A plan for one worker, in which each product cuts its own."""
    specs = spec_of(a, turned=step.trans_a), spec_of(b, turned=step.trans_b)
    plan = plan_matmul(Problem(*specs, gram=gram), gpus(1), options=Options(**fixed))
    return replace(plan, layout=replace(plan.layout, cut_once=once))


def product(plan, a, b, step=PLAIN, c=None):
    return build(plan, a, b, c, step, np.empty((0, 0), "float32"))


# ------------------------------------------------------------------ the graph


@pytest.mark.parametrize("step", [PLAIN, replace(PLAIN, trans_a=True, trans_b=True)])
@pytest.mark.parametrize(
    "fixed", [{"blocks": 10, "slabs": 10}, {"blocks": (30, 9), "slabs": 35}, {"blocks": 40}]
)
def test_products_of_pieces_are_right_and_take_no_other_tasks(step, fixed):
    x, y = integers((31, 35), 0), integers((35, 33), 1)
    a, b = (z.T if step.trans_a else z for z in (x, y))
    a = da.from_array(a, chunks=(7, (30, a.shape[1] - 30)), name="pieces-a")
    b = da.from_array(b, chunks=(11, 8), name="pieces-b")
    plan = planned(a, b, step, **fixed)
    assert plan.layout.operands.cut_again == ("a", "b")
    c = product(plan, a, b, step)
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
        product(planned(a, b, once=once, blocks=32, slabs=16), a, b).compute(scheduler="sync")
        for once in (True, False)
    ]
    np.testing.assert_array_equal(*results)


def test_gram_products_and_addends():
    x, d = integers((35, 30), 4), integers((30, 30), 5)
    a = da.from_array(x, chunks=(9, 7), name="pieces-gram")
    step = Step("float32", "float32", trans_a=True, alpha=2, beta=3)
    plan = planned(a, a, step, gram=True, blocks=10, slabs=20)
    assert plan.layout.mirrors
    c = product(plan, a, a, step, da.from_array(d, chunks=10))
    np.testing.assert_array_equal(c.compute(scheduler="sync"), 2 * x.T @ x + 3 * d)


@pytest.mark.parametrize("stored", ["as multiplied", "turned", "A turned", "B turned"])
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize(
    ("slabs", "along_k"),
    [((24,), (24,)), ((10, 14), (10, 14)), ((24,), (10, 8, 6)), ((7, 17), (10, 14))],
)
@pytest.mark.parametrize("dtype", ["float32", "float16", "int32"])
@pytest.mark.parametrize("added", [False, True])
def test_long_pieces_are_multiplied_as_they_come(
    monkeypatch, stored, wide, slabs, along_k, dtype, added
):
    """Nothing of them is joined, also where blocks of C, or slabs, end within one."""
    monkeypatch.setattr(distribution, "LEAST_BAND", 1)
    monkeypatch.setattr(distribution, "PACKED_SLAB", 1)
    monkeypatch.setattr(Pieces, "copied", None)
    x, y, d = integers((130, 24), 8), integers((24, 3), 9), integers((130, 3), 10)
    chunks = (((40, 7, 43, 40), along_k), (slabs, (3,)))
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
    layout = replace(layout, slabs=slabs, cut_once=False, in_bands=True)
    assert layout.operands.banded == ("b" if wide else "a")
    plan = replace(plan_matmul(problem, gpus(1)), layout=layout)
    meta = np.empty((0, 0), of_sums)
    c = build(plan, a, b, da.from_array(d.astype(of_sums)) if added else None, step, meta)
    assert c.dtype == of_sums
    expected = x.astype("int64") @ y.astype("int64")
    expected = 2 * expected + 3 * d if added else expected
    np.testing.assert_array_equal(c.compute(scheduler="sync"), expected)


def test_a_wrong_piece_is_named():
    x = integers((8, 8), 8)
    whole = Pieces([x], (((slice(0, 8),) * 2,) * 2,), ((9, 8),), (8, 8))
    with pytest.raises(ShapeError, match=r"\(8, 8\).*\(9, 8\)"):
        multiply_bands(whole, x, banded="a", step=PLAIN)


def test_stacks():
    x, y = integers((3, 8, 8), 6), integers((8, 8), 7)
    a = da.from_array(x, chunks=((1, 2), 3, 5), name="pieces-stack")
    b = da.from_array(y, chunks=3, name="pieces-shared")
    plan = planned(a, b, blocks=4, slabs=4)
    meta = np.empty((0, 0, 0), "float32")
    c = build(plan, a, b, None, PLAIN, meta)
    np.testing.assert_array_equal(c.compute(scheduler="sync"), x @ y)


def test_a_block_within_another_is_no_copy():
    x = integers((8, 8), 8)
    cuts = (((slice(2, 4), slice(0, 8)), (slice(0, 2), slice(0, 8))),)
    whole = Pieces([x], cuts, ((8, 8),), (2, 8))
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


def test_keys_are_those_of_the_array():
    x = da.ones((6, 6), chunks=(4, 3), name="pieces-keys")
    part, keys = pieces(lambda at: (x.name, *at), x.chunks, (slice(2, 6), slice(3, 6)))
    assert keys == [("pieces-keys", 0, 1), ("pieces-keys", 1, 1)]
    assert part.dependencies == set(keys)


# ------------------------------------------------------------------- the plan


@pytest.mark.parametrize("chunks", [1000, 2048, 4096])
@pytest.mark.parametrize("pack", ["float32", "tf32", ""])
def test_a_lone_worker_cuts_operands_within_its_products(chunks, pack):
    """One task where there would be one for each block of C, and more to cut the operands."""
    a, b = (square(8192, chunks) for _ in "ab")
    plan = plan_matmul(Problem(a, b, pack=pack), gpus(1))
    assert not plan.layout.cut_once
    assert plan.tasks == 1
    assert "A and B cut by every product" in str(plan)
    assert plan.memory_terms["operands being joined"] == a.nbytes + b.nbytes
    assert not plan.bytes_received
    assert not plan.bytes_recut


@pytest.mark.parametrize("workers", [2, 4, 8])
def test_several_workers_cut_operands_once(workers):
    """What is cut has to travel first, and would for every product."""
    specs = [square(65536, 3000) for _ in "ab"]
    plan = plan_matmul(Problem(*specs, pack="float32"), gpus(workers))
    assert plan.layout.cut_once
    assert "cut by every product" not in str(plan)


def test_large_operands_in_many_chunks_are_cut_once():
    specs = [square(32768, 1024) for _ in "ab"]
    assert plan_matmul(Problem(*specs, pack="float32"), gpus(1)).layout.cut_once


@pytest.mark.parametrize("pack", ["float32", "tf32", ""])
@pytest.mark.parametrize("wide", [False, True])
def test_a_lone_worker_joins_no_long_pieces_and_has_few_tasks(pack, wide):
    """4194304 x 2048 by 256 columns in 32 tasks took an H200 124 to 143 ms."""
    rows = regular(4194304, 32768)
    x = MatrixSpec((4194304, 2048), chunks=(rows, (2048,)), owners=(0,) * 128)
    w = MatrixSpec((2048, 256))
    specs = (w.T, x.T) if wide else (x, w)
    plan = plan_matmul(Problem(*specs, pack=pack), gpus(1))
    large = "B" if wide else "A"
    assert f"{large} multiplied piece by piece" in str(plan)
    assert "cut by every product" not in str(plan)
    assert 4 <= plan.tasks <= 8
    assert "operands being joined" not in plan.memory_terms
    if pack:
        at_once = (32768 + 256) * 2048 * (4 if pack == "float32" else 2)
        assert plan.memory_terms["operands being packed"] == pytest.approx(at_once, rel=0.02)
    joined = replace(plan.layout, in_bands=False)
    more = time.seconds(joined, gpus(1), 0), time.seconds(plan.layout, gpus(1), 0)
    copies = 2 * x.nbytes / 4.2e12 + 128 * time.PIECE_S
    assert more[0]["cutting"] - more[1]["cutting"] == pytest.approx(copies, rel=0.1)
    kernels = more[1]["block products"] + more[1]["packing"]
    assert more[0]["launching"] == 0
    launching = max(0, 128 * (1 + bool(pack)) * time.LAUNCH_S - kernels)
    assert more[1]["launching"] == pytest.approx(launching)


@pytest.mark.parametrize("pack", ["float32", "tf32", ""])
def test_pieces_along_k_take_no_tasks_of_their_own(pack):
    """1048576 x 8192 in Dask's chunks took an H200 248 ms in 32 tasks that joined them."""
    chunks = regular(1048576, 5792), (5792, 2400)
    x = MatrixSpec((1048576, 8192), chunks=chunks, owners=(0,) * 364)
    plan = plan_matmul(Problem(x, MatrixSpec((8192, 1024)), pack=pack), gpus(1))
    assert "A multiplied piece by piece" in str(plan)
    assert plan.tasks <= 8
    assert plan.layout.slabs == (8192,)
    assert plan.layout.operands.sums_in_bands == 1
    assert plan.memory_terms["sums of pieces"] == 2 * 5792 * 1024 * 4
    terms = time.seconds(plan.layout, gpus(1), 0)
    c = 1048576 * 1024
    assert terms["sums between slabs"] == pytest.approx(c * 4 * time.SUMS_BYTES / 4.2e12, rel=0.2)


@pytest.mark.parametrize(
    ("chunk", "columns", "blocks", "bandable"),
    [
        ((2048, 2048), 256, None, ""),
        ((262144, 128), 256, None, ""),
        ((16384, 2048), 16384, (131072, 16384), ""),
        ((16384, 2048), 256, 524288, "a"),
    ],
    ids=["small", "short along k", "beside much", "fixed"],
)
def test_other_pieces_are_joined(chunk, columns, blocks, bandable):
    """Also where the caller has fixed blocks: what they come in must not show in their bits."""
    x = MatrixSpec((1048576, 2048), chunks=(regular(1048576, chunk[0]), regular(2048, chunk[1])))
    problem = Problem(x, MatrixSpec((2048, columns)), pack="float32")
    layout = plan_matmul(problem, gpus(1), options=Options(blocks=blocks)).layout
    assert layout.operands.cut_again == ("a",)
    assert not layout.operands.banded
    assert replace(layout, cut_once=False, in_bands=True).operands.banded == bandable


def test_both_sides_of_a_gram_product_are_joined():
    a = square(65536, 3000)
    problem = Problem(a, a, pack="float32", gram=True)
    plan = plan_matmul(problem, gpus(1))
    within = replace(plan, layout=replace(plan.layout, cut_once=False, pack_once=False))
    assert within.layout.mirrors
    assert within.layout.operands.cut_again == ("a",)
    block = max(within.layout.m_blocks) * max(within.layout.slabs) * 4
    assert within.memory_terms["operands being joined"] == 2 * block


def test_each_thread_joins_operands_of_its_own():
    problem = Problem(square(4096, 1000), square(4096, 1000))
    one, two = (ClusterSpec.homogeneous(H200, 1, threads=n) for n in (1, 2))
    layout = replace(plan_matmul(problem, one).layout, cut_once=False)
    joined = [memory.held(layout, cluster)[0]["operands being joined"] for cluster in (one, two)]
    assert joined[1] == 2 * joined[0] > 0


def test_a_call_takes_longer_on_several_workers():
    problem = Problem(square(8192, 8192), square(8192, 8192), pack="float32")
    starts = [plan_matmul(problem, gpus(n)).time_terms["starting"] for n in (1, 2)]
    assert starts[1] - starts[0] == pytest.approx(CALL_S - LONE_CALL_S)


def test_what_products_cut_is_priced_by_its_uses():
    """Two block rows of C each cut and join all of B, and their own rows of A."""
    a, b = square(4096, 1024), square(4096, 1024)
    halves, whole = (2048, 2048), (4096,)
    problem, grid = Problem(a, b), Grid(1, 1, 1)
    once = Schedule(problem, grid, (), halves, whole, whole, band=2)
    within = replace(once, cut_once=False)
    assert once.operands.recut == (0, 3, 0, 32, a.nbytes + b.nbytes)
    assert within.operands.recut == (0, 0, 0, 16 + 2 * 16, a.nbytes + 2 * b.nbytes)
    alone = gpus(1)
    moved = 2 * (a.nbytes + 2 * b.nbytes) / (alone.slowest.copy_gbps * 1e9)
    terms = time.seconds(within, alone, 0)
    assert terms["cutting"] == pytest.approx(48 * time.PIECE_S + moved)
    assert terms["from step to step"] == 0
    assert time.seconds(once, alone, 0)["from step to step"] > 0
    # Of several workers any one may do it, and what lies elsewhere is fetched piece by piece.
    far = replace(problem, a=replace(a, owners=(1,) * 16), b=replace(b, owners=(0,) * 16))
    elsewhere = replace(within, problem=far)
    assert elsewhere.operands.recut.nbytes == a.nbytes
    assert elsewhere.operands.arrives("a")
    assert not elsewhere.operands.arrives("b")
    terms = time.seconds(elsewhere, gpus(2).first(1), 0)
    assert terms["cutting"] == pytest.approx(48 * time.PIECE_S + 16 * time.FETCH_S + moved)


def test_a_lone_task_takes_as_long_on_a_cluster_of_many():
    """Wherever it runs it finds what it needs, as far as the plan knows."""
    problem = Problem(square(8192, 2048), square(8192, 2048), pack="float32")
    alone, among = (plan_matmul(problem, gpus(workers)) for workers in (1, 8))
    assert among.tasks == alone.tasks == 1
    assert among.time_terms["cutting"] == alone.time_terms["cutting"]


def test_one_operand_in_pieces_and_the_other_from_a_file(tmp_path):
    x, y = integers((40, 40), 11), integers((40, 40), 12)
    np.save(tmp_path / "x.npy", x)
    a, b = open_array(tmp_path / "x.npy"), da.from_array(y, chunks=7)
    specs = MatrixSpec(a.shape, chunks=a.chunks), spec_of(b)
    problem = Problem(*specs, rereadable=(True, False))
    plan = plan_matmul(problem, gpus(1), options=Options(blocks=20, slabs=20))
    plan = replace(plan, layout=replace(plan.layout, cut_once=False))
    assert plan.layout.operands.cut_again == ("b",)
    c = product(plan, a, b)
    assert all(key[0] != a.name for key in dict(c.dask))
    np.testing.assert_array_equal(c.compute(scheduler="sync"), x @ y)


def test_one_block_is_one_task():
    for size in (8192, 16384):
        specs = [MatrixSpec((size, size), chunks=((size,), (size,)), owners=(0,)) for _ in "ab"]
        assert plan_matmul(Problem(*specs, pack="float32"), gpus(1)).tasks == 1


# --------------------------------------------------------------- on a cluster


def test_a_worker_multiplies_what_it_has_and_nothing_else_runs():
    x, y = integers((60, 60), 9), integers((60, 60), 10)
    with in_threads(1, memory_limit=0) as cluster, Client(cluster) as client:
        a, b = (da.from_array(z, chunks=7).persist() for z in (x, y))
        wait([a, b])
        c = multimm.matmul(a, b, blocks=20, slabs=20)
        plan = multimm.plan(a, b, blocks=20, slabs=20)
        assert not plan.layout.cut_once
        before = set(cluster.scheduler.tasks)
        result = c.persist()
        wait(result)
        made = {str(key[0]) for key in set(cluster.scheduler.tasks) - before}
        assert all(name.startswith("multimm-") for name in made)
        np.testing.assert_array_equal(client.gather(client.compute(result)), x @ y)
        assert multimm.verify(a, b, result)
