"""Operands in other blocks than the plan's, among several workers: cut where they lie, once."""

from __future__ import annotations

import dask.array as da
import numpy as np
import pytest
from clusters import counting_client, soon
from distributed import wait
from small import integers

import multimm
from multimm.cluster.plugins.transfer_counter import received_bytes, reset_received_bytes
from multimm.errors import ShapeError
from multimm.graph.array import build
from multimm.graph.lowering.rechunk import cut_out, join
from multimm.graph.lowering.sub_blocks import SubBlocks
from multimm.graph.tasks.multiply import Step
from multimm.planning.choice import plan_matmul
from multimm.planning.options import Options
from multimm.planning.problem import Problem
from multimm.planning.spec import H200, ClusterSpec, MatrixSpec

PLAIN = Step("float32", "float32")
SIZE = 96


client = counting_client(4)


def cutting(c):
    """The tasks that cut or join operand blocks, by key."""
    tasks = dict(c.dask).items()
    return {key: t for key, t in tasks if getattr(t, "func", None) in (cut_out, join)}


# ----------------------------------------------------------------- on workers


def test_chunks_that_were_fetched_to_be_joined_are_let_go(client):
    a = client.persist(da.from_array(integers((SIZE, SIZE), 6), chunks=12, name="rechunked-small"))
    wait(a)
    reset_received_bytes(client)
    c = multimm.matmul(a, a, blocks=48, slabs=48).persist()
    wait(c)
    assert sum(received_bytes(client).values())
    soon(lambda: [len(those) for those in client.who_has(a).values()] == [1] * 64)


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
