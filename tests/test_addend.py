"""The C of `gemm` in any chunks: cut where it lies, joined by the tasks that add it, counted."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace

import dask.array as da
import numpy as np
import pytest
from clusters import counting_client
from distributed import wait
from labels import tasks_of
from small import integers

import multimm
from multimm.cluster.inspect.cluster_spec import listed
from multimm.cluster.plugins.transfer_counter import received_bytes, reset_received_bytes
from multimm.graph.array import build
from multimm.graph.block_task import BlockTask
from multimm.graph.label import Kind
from multimm.graph.lowering.rechunk import cut_out
from multimm.graph.tasks.multiply import Step
from multimm.planning.candidates.block_order import by_owner
from multimm.planning.choice import plan_matmul
from multimm.planning.options import Options
from multimm.planning.problem import Problem
from multimm.planning.spec import H200, ClusterSpec, MatrixSpec
from multimm.planning.tiling.blocking import lay_out
from multimm.planning.tiling.grid import Grid

ADDED = Step("float32", "float32", alpha=2, beta=3)
SIZE = 96


client = counting_client(4)


def cuts(d):
    """The tasks that cut blocks of C, by key."""
    found = tasks_of(d, Kind.CUT, "C")
    assert all(task.func is cut_out for task in found.values())
    return found


# ----------------------------------------------------------------- on workers


@pytest.mark.parametrize("chunks", [12, 18, 24, 48, (36, 60), (96, 24), 96])
@pytest.mark.parametrize("p_k", [1, 2])
@pytest.mark.parametrize("gram", [False, True])
@pytest.mark.parametrize("persisted", [True, False])
def test_no_more_travels_than_the_plan_says(client, chunks, p_k, gram, persisted):
    """However large its chunks are: none goes whole to several workers."""
    x, y, z = (integers((SIZE, SIZE), seed) for seed in range(3))
    a, b = client.persist([da.from_array(v, chunks=24).map_blocks(np.copy) for v in (x, y)])
    c = da.from_array(z, chunks=chunks).map_blocks(np.copy)
    # One worker has none of it: by chance all of it might lie where it is needed.
    c = client.persist(c, workers=sorted(listed(client))[:3]) if persisted else c
    wait([a, b, *([c] if persisted else [])])
    b, right = (a.T, x @ x.T) if gram else (b, x @ y)
    fixed = {"blocks": 24, "slabs": 24, "p_k": p_k}
    plan = multimm.plan(a, b, beta=3, c=c, **fixed)
    assert (plan.layout.grid.workers, plan.layout.mirrors) == (4, gram)
    reset_received_bytes(client)
    d = multimm.gemm(2, a, b, 3, c, **fixed)
    assert not [key for key in dict(d.dask) if "rechunk" in str(key)]
    d = d.persist()
    wait(d)
    received = sum(received_bytes(client).values())
    most = plan.bytes_received + plan.bytes_added
    assert plan.bytes_recut == 0 < plan.bytes_added <= c.nbytes
    assert received == most if persisted else received <= most
    np.testing.assert_array_equal(d.compute(), 2 * right + 3 * z)


def test_the_c_of_a_product_is_added_where_it_is_made(client):
    x = integers((SIZE, SIZE), 3)
    a = client.persist(da.from_array(x, chunks=24).map_blocks(np.copy))
    wait(a)
    fixed = {"blocks": 24, "slabs": 24, "p_k": 1}
    c = multimm.matmul(a, a, **fixed)
    plan = multimm.plan(a, a, beta=1, c=c, **fixed)
    assert plan.bytes_added == 0
    assert "of the C" not in str(plan)
    d = multimm.gemm(1, a, a, 1, c, **fixed)
    assert not cuts(d)
    np.testing.assert_array_equal(d.compute(), 2 * (x @ x))


def test_chunks_are_cut_where_they_lie_in_one_bundle_for_each_block(client):
    x = integers((SIZE, SIZE), 4)
    a, c = client.persist([da.from_array(x, chunks=n).map_blocks(np.copy) for n in (24, 12)])
    wait([a, c])
    d = multimm.gemm(1, a, a, 1, c, blocks=24, slabs=24)
    grid = multimm.plan(a, a, beta=1, c=c, blocks=24, slabs=24).grid
    addresses, holders = sorted(listed(client)), client.who_has()
    made = cuts(d)
    assert made
    for task in made.values():
        assert len([*task.place.blocks]) > 1  # what is alone travels as it is
        for source, lies in task.place.blocks:
            assert task.place.owner == lies
            assert addresses[grid.rank(lies)] in holders[source]
    for task in dict(d.dask).values():
        if isinstance(task, BlockTask) and task.key[0] == d.name:
            own = grid.rank(task.place.owner)
            of_c = [x for x in task.place.blocks if x[0] in made or x[0][0] == c.name]
            away = [grid.rank(lies) for _, lies in of_c if grid.rank(lies) != own]
            assert set(Counter(away).values()) <= {1}
    np.testing.assert_array_equal(d.compute(), x @ x + x)


@pytest.mark.parametrize("chunk", [8, 24])
def test_what_was_fetched_of_c_is_let_go(client, chunk):
    x = integers((SIZE, SIZE), 5)
    a, c = client.persist([da.from_array(x, chunks=n).map_blocks(np.copy) for n in (24, chunk)])
    wait([a, c])
    d = multimm.gemm(1, a, a, 1, c, blocks=24, slabs=24).persist()
    wait(d)
    for _ in range(100):  # the message takes a moment
        if {len(those) for those in client.who_has(c).values()} == {1}:
            return
        time.sleep(0.02)
    pytest.fail("chunks of C have copies")


# ------------------------------------------------------------------ the graph


def spec_of(x, *owners):
    return MatrixSpec(x.shape, chunks=x.chunks, owners=owners)


def product(a, b, c, workers, owners=(), step=ADDED, gram=False, **fixed):
    specs = [spec_of(x) for x in (a, b)]
    turned = (x.T if t else x for x, t in zip(specs, (step.trans_a, step.trans_b), strict=True))
    problem = Problem(*turned, c=spec_of(c, *owners), gram=gram)
    cluster = ClusterSpec.homogeneous(H200, workers)
    plan = plan_matmul(problem, cluster, options=Options(**fixed))
    return plan, build(plan, a, b, c, step, np.empty((0,) * c.ndim, "float32"))


@pytest.mark.parametrize("workers", [1, 4, 6])
@pytest.mark.parametrize("p_k", [1, 3])
@pytest.mark.parametrize("chunks", [7, 60, (60, 10), ((1, 19, 40), (5, 0, 50, 5))])
@pytest.mark.parametrize("kind", ["plain", "turned", "gram"])
def test_products_with_c_in_any_chunks_are_right(workers, p_k, chunks, kind):
    x, y, z = (integers((60, 60), seed) for seed in range(6, 9))
    flags = {"trans_a": kind != "plain", "trans_b": kind == "turned"}
    a = da.from_array(x, chunks=20)
    b = a if kind == "gram" else da.from_array(y, chunks=(20, 30))
    c = da.from_array(z, chunks=chunks)
    step = replace(ADDED, **flags)
    gram, fixed = kind == "gram", {"blocks": 20, "slabs": 20, "p_k": p_k}
    plan, d = product(a, b, c, workers, step=step, gram=gram, **fixed)
    assert plan.layout.mirrors == gram
    left, right = x.T if flags["trans_a"] else x, x if b is a else y.T if flags["trans_b"] else y
    np.testing.assert_array_equal(d.compute(scheduler="sync"), 2 * left @ right + 3 * z)


def test_the_order_of_k_is_none_of_c_s():
    """Its rows and columns stay where they are when k is taken as it lies on workers."""
    x, z = integers((60, 30), 9), integers((30, 30), 10)
    a = da.from_array(x, chunks=((5, 15, 10, 30), 30))
    c = da.from_array(z, chunks=((5, 10, 12, 3), 15))
    spec = spec_of(a, 1, 0, 1, 0)
    problem = by_owner(Problem(spec.T, spec, c=spec_of(c)))
    assert problem.order
    plan = plan_matmul(problem, ClusterSpec.homogeneous(H200, 2), options=Options(blocks=10))
    step = replace(ADDED, trans_a=True)
    d = build(plan, a, a, c, step, np.empty((0, 0), "float32"))
    np.testing.assert_array_equal(d.compute(scheduler="sync"), 2 * x.T @ x + 3 * z)


@pytest.mark.parametrize("workers", [1, 4])
@pytest.mark.parametrize("p_k", [1, 2])
def test_stacks(workers, p_k):
    x, y, z = integers((5, 20, 30), 0), integers((30, 25), 1), integers((5, 20, 25), 2)
    a, b = da.from_array(x, chunks=(2, 7, 11)), da.from_array(y, chunks=30)
    c = da.from_array(z, chunks=(3, 20, 6))
    plan, d = product(a, b, c, workers, blocks=8, slabs=9, p_k=p_k)
    assert plan.layout.cuts_c
    np.testing.assert_array_equal(d.compute(scheduler="sync"), 2 * x @ y + 3 * z)


@pytest.mark.parametrize("chunks", [7, 20, 60])
@pytest.mark.parametrize("gram", [False, True])
def test_one_worker_needs_no_tasks_for_it(chunks, gram):
    a = da.ones((60, 60), chunks=20, dtype="float32")
    c = da.ones((60, 60), chunks=chunks, dtype="float32", name="c-of-ones")
    step = replace(ADDED, trans_b=gram)
    plan, d = product(a, a, c, 1, step=step, gram=gram, blocks=20, slabs=20)
    ours = [task for task in dict(d.dask).values() if isinstance(task, BlockTask)]
    assert len(ours) == plan.tasks
    assert plan.bytes_added == plan.layout.recut.tasks == 0


def test_products_with_other_c_are_others():
    a = da.ones((6, 6), chunks=3)
    names = {multimm.gemm(1, a, a, 1, c).name for c in (a, a + 1, a.rechunk(2), a)}
    assert len(names) == 3


@pytest.mark.parametrize("chunks", [16, 4])
def test_only_what_lies_in_parts_elsewhere_takes_tasks(chunks):
    a = da.ones((64, 64), chunks=16, dtype="float32")
    c = da.ones((64, 64), chunks=chunks, dtype="float32", name="c-of-ones")
    owners = np.random.default_rng(0).integers(0, 4, c.npartitions)
    plan, d = product(a, a, c, 4, tuple(owners), blocks=16, slabs=16, p_k=1)
    assert plan.tasks == 4 * 16
    made, expected = cuts(d), plan.layout.recut
    assert bool(made) == (chunks == 4)
    assert 0.9 * expected.tasks <= len(made) <= expected.tasks
    moved = sum(4 * chunks**2 for task in made.values() for _ in task.place.blocks)
    assert 0 < moved + 4 * chunks**2 <= plan.bytes_added or chunks == 16
    assert (d.compute(scheduler="sync") == 2 * 64 + 3).all()


# ------------------------------------------------------------------- the plan


def test_where_c_lies_is_counted():
    square = MatrixSpec((64, 64), chunks=((16,) * 4,) * 2)
    cluster, fixed = ClusterSpec.homogeneous(H200, 4), Options(blocks=16, slabs=16, p_k=1)

    def planned(**known):
        problem = Problem(square, square, c=replace(square, **known))
        return plan_matmul(problem, cluster, options=fixed)

    unknown = planned()
    owners = unknown.layout.result_owners(4)
    assert unknown.bytes_added == square.nbytes
    assert "and at most 16.4 kB of the C that is added" in str(unknown)
    assert planned(owners=owners).bytes_added == 0
    turned = planned(owners=owners[::-1])
    assert turned.bytes_added == square.nbytes
    assert "kB of the C that is added" in str(turned)
    assert "at most" not in str(turned)
    whole = planned(chunks=((64,), (64,)), owners=(0,))
    assert whole.bytes_added == square.nbytes * 3 / 4
    assert whole.time_terms["transfers"] > planned(owners=owners).time_terms["transfers"]
    without = plan_matmul(Problem(square, square), cluster, options=fixed)
    assert without.bytes_added == 0


def test_what_lies_beyond_the_grid_travels_twice_if_it_is_cut():
    a = MatrixSpec((64, 64), chunks=((32, 32), (64,)), owners=(0, 1))
    c = replace(a, owners=(5, 5))
    whole = MatrixSpec((64, 64), chunks=((64,), (64,)), owners=(5,))
    cluster = ClusterSpec.homogeneous(H200, 6)
    for added, times in ((c, 1), (whole, 2)):
        problem = Problem(a, replace(a, chunks=((64,), (64,)), owners=(0,)), c=added)
        layout, _ = lay_out(problem, cluster.first(2), Grid(2, 1, 1), Options(blocks=(32, 64)))
        plan = replace(plan_matmul(problem, cluster), layout=layout)
        assert plan.bytes_added == times * c.nbytes
        assert f"at most {times * c.nbytes / 1000:.3g} kB of the C" in str(plan)


def test_the_memory_of_c():
    square = MatrixSpec((64, 64), chunks=((16,) * 4,) * 2)
    cluster = ClusterSpec.homogeneous(H200, 4)
    quarter, block = square.nbytes / 4, 4 * 16 * 16

    def planned(**known):
        problem = Problem(square, square, c=replace(square, **known))
        return plan_matmul(problem, cluster, options=Options(blocks=16, slabs=16, p_k=1))

    made = planned()
    assert made.memory_terms["C in use"] == block
    assert made.spill_terms["C as it comes"] == quarter
    assert "C on its way" not in made.spill_terms
    owners = made.layout.result_owners(4)
    assert planned(owners=owners).spill_terms == made.spill_terms
    elsewhere = planned(owners=(0,) * 12 + (1,) * 4)
    assert elsewhere.spill_terms["C as it comes"] == 3 * quarter
    assert elsewhere.spill_terms["C on its way"] == quarter
    cut = planned(chunks=((64,), (64,)), owners=(2,))
    assert cut.memory_terms["C in use"] == block
    assert cut.spill_terms["C as it comes"] == square.nbytes
    assert cut.spill_terms["C on its way"] == square.nbytes + quarter  # bundles, and blocks
    spread = planned(chunks=((8,) * 8, (40, 24)))
    assert spread.spill_terms["C as it comes"] == 4 * 4 * 8 * 40
