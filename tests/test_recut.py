"""Operands in other blocks than the plan's, among several workers: cut where they lie, once."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace

import dask.array as da
import numpy as np
import pytest
from clusters import counting_client
from distributed import wait
from small import integers

import multimm
from multimm.cluster.inspect.cluster_spec import listed
from multimm.cluster.plugins.transfer_counter import received_bytes, reset_received_bytes
from multimm.errors import ShapeError
from multimm.graph.array import build
from multimm.graph.block_task import BlockTask
from multimm.graph.lowering.rechunk import cut_out, join
from multimm.graph.lowering.sub_blocks import SubBlocks
from multimm.graph.tasks.multiply import Step
from multimm.planning.choice import plan_matmul
from multimm.planning.cost.redistribution import brought
from multimm.planning.options import Options
from multimm.planning.problem import Problem
from multimm.planning.spec import H200, ClusterSpec, MatrixSpec
from multimm.planning.tiling.blocking import lay_out
from multimm.planning.tiling.grid import Grid
from multimm.planning.tiling.rechunk import once

PLAIN = Step("float32", "float32")
SIZE = 96


client = counting_client(4)


def cutting(c):
    """The tasks that cut or join operand blocks, by key."""
    tasks = dict(c.dask).items()
    return {key: t for key, t in tasks if getattr(t, "func", None) in (cut_out, join)}


# ----------------------------------------------------------------- on workers


@pytest.mark.parametrize(
    ("chunks", "blocks", "k_tiles"),
    [(12, 24, 24), (24, 12, 12), (48, 12, 12), ((36, 60), 24, 24), (96, 24, 24), (18, 24, 32)],
)
@pytest.mark.parametrize("persisted", [True, False])
def test_no_more_travels_than_the_plan_says(client, chunks, blocks, k_tiles, persisted):
    """However large the blocks are that operands come in: none goes whole to several workers."""
    x, y = integers((SIZE, SIZE), 0), integers((SIZE, SIZE), 1)
    a, b = (da.from_array(z, chunks=chunks).map_blocks(np.copy) for z in (x, y))
    if persisted:
        a, b = client.persist([a, b])
        wait([a, b])
    fixed = {"blocks": blocks, "slabs": k_tiles}
    plan = multimm.plan(a, b, **fixed)
    assert plan.grid.workers == 4
    reset_received_bytes(client)
    c = multimm.matmul(a, b, **fixed)
    assert cutting(c)
    c = c.persist()
    wait(c)
    most = plan.bytes_received + plan.bytes_recut
    if not plan.bytes_recut:  # of one chunk that is still to be made, a plan knows nothing
        most += x.nbytes + y.nbytes
    received = sum(received_bytes(client).values())
    assert received == most if persisted else 0 < received <= most
    np.testing.assert_array_equal(c.compute(), x @ y)


def test_blocks_are_cut_where_they_lie_and_joined_at_owner(client):
    x = integers((SIZE, SIZE), 2)
    a, b = client.persist([da.from_array(x, chunks=48, name=f"rechunked-{n}") for n in "ab"])
    wait([a, b])
    c = multimm.matmul(a, b, blocks=24, slabs=24)
    plan = multimm.plan(a, b, blocks=24, slabs=24)
    addresses = sorted(listed(client))
    holders = client.who_has()
    owners, cuts = Counter(), 0
    for task in cutting(c).values():
        if task.func is join:
            owners[plan.grid.rank(task.place.owner)] += 1
            role, at = task.label.matrix.lower(), task.label.block
            row_or_column, k_tile = at if role == "a" else at[::-1]
            assert task.place.owner == plan.layout.tiles.owner(role, 0, row_or_column, k_tile)
            continue
        cuts += 1
        for source, lies in task.place.blocks:
            assert task.place.owner == lies
            assert addresses[plan.grid.rank(lies)] in holders[source]
    assert set(owners.values()) == {2 * 16 // 4}
    assert 0 < cuts < 2 * 16  # what is in place already is cut as it is joined
    np.testing.assert_array_equal(c.compute(), x @ x)


def test_blocks_of_a_transpose_are_cut_where_they_lie(client):
    x, y = integers((SIZE, SIZE), 7), integers((SIZE, SIZE), 8)
    a = client.persist(da.from_array(x, chunks=(48, 32), name="rechunked-turned"))
    b = client.persist(da.from_array(y, chunks=24, name="rechunked-plain"))
    wait([a, b])
    c = multimm.matmul(a.T, b, blocks=24, slabs=24)
    grid = multimm.plan(a.T, b, blocks=24, slabs=24).grid
    addresses = sorted(listed(client))
    holders, seen = client.who_has(), 0
    for task in cutting(c).values():
        for source, lies in task.place.blocks:
            if source[0] == a.name:
                seen += 1
                assert addresses[grid.rank(lies)] in holders[source]
    assert seen
    np.testing.assert_array_equal(c.compute(), x.T @ y)


def test_chunks_that_were_fetched_to_be_joined_are_let_go(client):
    a = client.persist(da.from_array(integers((SIZE, SIZE), 6), chunks=12, name="rechunked-small"))
    wait(a)
    reset_received_bytes(client)
    c = multimm.matmul(a, a, blocks=48, slabs=48).persist()
    wait(c)
    assert sum(received_bytes(client).values())
    for _ in range(100):  # the message takes a moment
        holders = [len(those) for those in client.who_has(a).values()]
        if holders == [1] * 64:
            return
        time.sleep(0.02)
    pytest.fail(f"chunks have copies: {holders}")


# ------------------------------------------------------------------ the graph


def product(a, b, workers, **fixed):
    specs = [MatrixSpec(x.shape, chunks=x.chunks) for x in (a, b)]
    cluster = ClusterSpec.homogeneous(H200, workers)
    plan = plan_matmul(Problem(*specs), cluster, options=Options(**fixed))
    return plan, build(plan, a, b, None, PLAIN, np.empty((0, 0), "float32"))


def test_what_a_worker_has_of_a_block_travels_in_one_coalesced():
    """However small the chunks: each fetch takes longer than its bytes do."""
    x = integers((64, 64), 10)
    a = da.from_array(x, chunks=4, name="rechunked-scattered")
    owners = tuple(np.random.default_rng(0).integers(0, 4, 16 * 16))
    spec = MatrixSpec(a.shape, chunks=a.chunks, owners=owners)
    cluster = ClusterSpec.homogeneous(H200, 4)
    plan = plan_matmul(Problem(spec, spec), cluster, options=Options(blocks=16, slabs=16))
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


def test_a_chunk_that_is_alone_travels_as_it_is():
    """No task is needed for it."""
    x = integers((64, 64), 11)
    a = da.from_array(x, chunks=(16, 64), name="rechunked-alone")
    b = da.from_array(x, chunks=(64, 64), name="rechunked-near")
    specs = (MatrixSpec(a.shape, chunks=a.chunks, owners=(0, 1, 1, 0)),
             MatrixSpec(b.shape, chunks=b.chunks, owners=(0,)))  # fmt: skip
    layout, _ = lay_out(Problem(*specs), ClusterSpec.homogeneous(H200, 2), Grid(2, 1, 1),
                        Options(blocks=32, slabs=64))  # fmt: skip
    plan = plan_matmul(Problem(*specs), ClusterSpec.homogeneous(H200, 2))
    c = build(replace(plan, layout=layout), a, b, None, PLAIN, np.empty((0, 0), "float32"))
    of_a = [task for key, task in cutting(c).items() if key[0].split("-")[2] == "a"]
    assert [task.func for task in of_a] == [join, join]
    assert layout.operands.rechunk.tasks == 2 + 2 + 1  # and half of one block of B, expected
    np.testing.assert_array_equal(c.compute(scheduler="sync"), x @ x)


def test_a_block_that_fits_is_taken_as_it_is():
    a = da.ones((40, 40), chunks=((10, 10, 20), 20), dtype="float32")
    b = da.ones((40, 40), chunks=(20, 10), dtype="float32")
    _, c = product(a, b, 2, blocks=10, slabs=20)
    made = cutting(c)
    assert all(key[0].split("-")[2] == "a" for key in made)
    # The first two block rows of A are left alone; of the third each half goes somewhere.
    assert {key[1] for key in made} == {2, 3}
    np.testing.assert_array_equal(c.compute(scheduler="sync"), np.full((40, 40), 40.0))


def test_blocks_that_are_still_to_be_made_are_spread_over_the_workers():
    """By number, or all that are cut alike would go to one worker."""
    a = b = da.ones((64, 64), chunks=16, dtype="float32")
    plan, c = product(a, b, 4, blocks=8, slabs=8)
    made = {}
    for task in dict(c.dask).values():
        if isinstance(task, BlockTask):
            made |= {key: at for key, at in task.place.blocks if key[0] == a.name}
    assert len(made) == 16
    assert set(Counter(map(plan.grid.rank, made.values())).values()) == {4}


def test_what_lies_beyond_the_grid_is_cut_in_it():
    """It travels to a worker of the grid, and on from there: twice, at most."""
    x = integers((40, 40), 9)
    a = da.from_array(x, chunks=20, name="rechunked-beyond")
    b = da.from_array(x, chunks=(20, 10), name="rechunked-near")
    specs = [MatrixSpec(z.shape, chunks=z.chunks, owners=(at,) * z.npartitions)
             for z, at in ((a, 7), (b, 0))]  # fmt: skip
    cluster, fixed = ClusterSpec.homogeneous(H200, 8), Options(blocks=10, slabs=10)
    layout, _ = lay_out(Problem(*specs), cluster.first(2), Grid(2, 1, 1), fixed)
    assert (
        layout.operands.rechunk.nbytes == 1.5 * a.nbytes + b.nbytes / 2
    )  # of a half, nothing is known
    assert brought(layout, 2) == 2 * a.nbytes + b.nbytes / 2
    own = once(specs[0], layout.operand_chunks("a"), 2, beyond=False)
    assert (
        layout.operands.rechunk.fetched == own.fetched + 8 + 16
    )  # half of B's sub-blocks, and all of A's once more
    plan = replace(plan_matmul(Problem(*specs), cluster, options=fixed), layout=layout)
    c = build(plan, a, b, None, PLAIN, np.empty((0, 0), "float32"))
    at = {lies for task in cutting(c).values() for key, lies in task.place.blocks
          if key[0] == a.name}  # fmt: skip
    assert at == {layout.grid.place(0), layout.grid.place(1)}
    np.testing.assert_array_equal(c.compute(scheduler="sync"), x @ x)


def test_of_one_chunk_that_lies_somewhere_the_plan_knows():
    a = MatrixSpec((64, 64), chunks=((64,), (64,)), owners=(2,))
    unknown = replace(a, owners=())
    cluster, fixed = ClusterSpec.homogeneous(H200, 4), Options(blocks=16, slabs=16)
    plan = plan_matmul(Problem(a, unknown), cluster, options=fixed)
    assert plan.layout.operands.cut_again == ("a",)
    assert plan.bytes_recut == a.nbytes * 3 / 4  # a quarter stays
    assert "and 12.3 kB before to cut A into these blocks" in str(plan)


def test_of_operands_that_are_still_to_be_made_the_plan_says_at_most():
    """They may be made where they are needed. They are there twice for a while, and on the way."""
    a = b = MatrixSpec((64, 64), chunks=((8,) * 8,) * 2)
    cluster, fixed = ClusterSpec.homogeneous(H200, 4), Options(blocks=32, slabs=32)
    plan = plan_matmul(Problem(a, b), cluster, options=fixed)
    assert plan.bytes_recut == a.nbytes + b.nbytes
    assert "and at most 32.8 kB before to cut A and B into these blocks" in str(plan)
    quarter = a.nbytes / 4
    for role in "ab":
        assert plan.spill_terms[f"{role.upper()} as it comes"] == quarter
        assert plan.spill_terms[f"{role.upper()} on its way"] == plan.layout.operands.kept[role] > 0
    known = replace(a, owners=(0,) * 48 + (1,) * 16)
    plan = plan_matmul(Problem(known, b), cluster, options=fixed)
    assert plan.spill_terms["A as it comes"] == 3 * quarter
    assert "at most" in str(plan)  # of one of them it is not known


def test_one_worker_cuts_blocks_as_it_joins_them():
    a = b = da.ones((8192, 8192), chunks=1000, dtype="float32")
    plan, c = product(a, b, 1, blocks=1024, slabs=8192)
    assert plan.layout.cut_once
    made = cutting(c)
    assert {task.func for task in made.values()} == {join}
    assert len(made) == plan.layout.operands.rechunk.tasks == 2 * 8


@pytest.mark.parametrize("workers", [1, 4])
def test_stacks_and_transposed_operands(workers):
    x, y = integers((3, 20, 30), 3), integers((20, 30), 4)
    a = da.from_array(x, chunks=(2, 7, 11))
    b = da.from_array(y, chunks=(20, 30))
    specs = MatrixSpec(a.shape, chunks=a.chunks), MatrixSpec(b.shape, chunks=b.chunks).T
    cluster = ClusterSpec.homogeneous(H200, workers)
    plan = plan_matmul(Problem(*specs), cluster, options=Options(blocks=8, slabs=9))
    step = Step("float32", "float32", trans_b=True)
    c = build(plan, a, b, None, step, np.empty((0, 0, 0), "float32"))
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
