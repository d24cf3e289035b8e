"""Operands and the C of `gemm` in other blocks than the plan's: cut, joined, added, counted."""

from __future__ import annotations

from dataclasses import replace

import dask.array as da
import numpy as np
import pytest
from by_plan import FLOAT, by_plan, spec_of
from clusters import counting_client, soon
from distributed import wait
from labels import tasks_of
from paper import gpus
from small import integers

import multimm
from multimm.cluster.plugins.transfer_counter import received_bytes, reset_received_bytes
from multimm.errors import ShapeError
from multimm.graph.label import Kind
from multimm.graph.lowering.rechunk import cut_out, join
from multimm.graph.tasks.multiply import Step
from multimm.planning.choice import plan_matmul
from multimm.planning.options import Options
from multimm.planning.problem import Problem
from multimm.planning.spec import MatrixSpec

ADDED = Step("float32", "float32", alpha=2, beta=3)
SIZE = 96

client = counting_client(4)


def product(a, b, workers, c=None, step=FLOAT, *, symmetric=False, **fixed):
    """A plan, and the product by it."""
    turned = (spec_of(x).T if t else spec_of(x)
              for x, t in ((a, step.trans_a), (b, step.trans_b)))  # fmt: skip
    added = None if c is None else spec_of(c)
    problem = Problem(*turned, c=added, symmetric=symmetric)
    plan = plan_matmul(problem, gpus(workers), options=Options(**fixed))
    return plan, by_plan(plan, a, b, c, step)


# Operands ------------------------------------------------------------------------------


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
    c = by_plan(plan, a, a)
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
@pytest.mark.parametrize("chunk", [10, 30])
def test_a_block_that_is_not_what_its_chunks_say_is_an_error(workers, chunk):
    """Larger ones, too, of which a part could be taken for the block."""
    a = da.ones((60, 60), chunks=chunk, dtype="float32")
    false = a.map_blocks(lambda x: np.pad(x, ((0, 3), (0, 0))), dtype="float32", chunks=a.chunks)
    _, c = product(false, a, workers, blocks=20, slabs=60)
    with pytest.raises(ShapeError, match="its array's chunks say"):
        c.compute(scheduler="sync")


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
    here, _ = held(plan.layout.result.owners(4))
    # One worker has all of it, another one fetches its quarter.
    assert there - here >= square.nbytes * (1 - 1 / 4) + square.nbytes / 4
