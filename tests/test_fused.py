"""K-tiles that a worker has at home are multiplied by one task, not by one after another."""

from __future__ import annotations

from dataclasses import replace

import dask.array as da
import numpy as np
import pytest
from clusters import in_threads, scattered
from distributed import Client, wait

import multimm
from multimm.cluster.inspect.cluster_spec import listed
from multimm.graph.array import build
from multimm.graph.block_task import BlockTask
from multimm.graph.tasks import multiply
from multimm.graph.tasks.multiply import in_turn
from multimm.planning.choice import plan_matmul
from multimm.planning.cost import time
from multimm.planning.options import Options
from multimm.planning.problem import Problem
from multimm.planning.spec import H200, ClusterSpec, DeviceSpec, MatrixSpec
from multimm.planning.tiling.grid import Grid

K_TILES, LENGTH, SIDE = 8, 30, 24


@pytest.fixture(scope="module", params=[1, 2])
def client(request):
    with in_threads(request.param) as cluster, Client(cluster) as client:
        yield client


def products(array):
    ours = [task for task in dict(array.dask).values() if isinstance(task, BlockTask)]
    return [task for task in ours if in_turn in (task.func, task.kwargs.get("verb"))]


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("added", [None, SIDE, 7])
def test_the_result_is_that_of_one_task_a_k_tile(client, symmetric, added):
    x, y = np.random.default_rng(1).standard_normal((2, K_TILES * LENGTH, SIDE)).astype("float32")
    p_k = len(listed(client))
    owners = [0] * (K_TILES // 2) + [p_k - 1] * (K_TILES // 2)

    def product(a, b):
        fixed = {"blocks": SIDE, "slabs": LENGTH, "p_k": p_k}
        if added is None:
            return multimm.matmul(a.T, b, **fixed)
        c = da.from_array(np.arange(SIDE**2, dtype="float32").reshape(SIDE, SIDE), chunks=added)
        return multimm.gemm(3.0, a.T, b, 2.0, c, **fixed)

    a = scattered(client, x, LENGTH, owners)
    fused = product(a, a if symmetric else scattered(client, y, LENGTH, owners))
    on_host = da.from_array(x, chunks=(LENGTH, SIDE))
    one_by_one = product(on_host, on_host if symmetric else da.from_array(y, chunks=(LENGTH, SIDE)))
    assert len(products(fused)) == p_k
    assert not products(one_by_one)
    np.testing.assert_array_equal(fused.compute(), one_by_one.compute())


def test_the_gpu_is_waited_for_once(monkeypatch):
    waited = []
    monkeypatch.setattr(multiply, "finished", lambda block: waited.append(block) or block)
    step = multiply.Step("float32", "float32")
    a, b = np.ones((2, 3), "f4"), np.ones((3, 2), "f4")
    twice = replace(step, alpha=2)
    result = in_turn(a, b, None, link=multiply.link, before=[[a, b]] * 3, step=twice, inner=step)
    np.testing.assert_array_equal(result, np.full((2, 2), 2 * 12))
    assert len(waited) == 1
    assert waited[0] is result


def laid_out(workers, rows, k_tiles, side=2048, symmetric=True, owners=None, **options):
    """A plan for a tall operand whose k-tiles lie with the workers in turn."""
    per = k_tiles // workers
    owners = owners or tuple(s // per for s in range(k_tiles))
    chunks = ((rows // k_tiles,) * k_tiles, (side,))
    b = MatrixSpec((rows, side), chunks=chunks, owners=owners)
    a = b.T if symmetric else MatrixSpec((rows, side), chunks=chunks, owners=owners).T
    problem = Problem(a, b, symmetric=symmetric, pack="float32")
    return plan_matmul(problem, ClusterSpec.homogeneous(H200, workers), **options)


@pytest.mark.parametrize("symmetric", [True, False])
def test_a_worker_s_k_tiles_are_one_task_where_they_take_little_memory(symmetric):
    plan = laid_out(4, 2**22, 16, symmetric=symmetric)
    assert plan.grid == Grid(1, 1, 4)
    assert plan.layout.k_tiles_per_task == 4
    assert plan.tasks == 4 + 1
    lone = replace(plan.layout, k_tiles_per_task=1)
    terms, apart = (time.seconds(x, plan.cluster, 0) for x in (plan.layout, lone))
    assert time.total_seconds(terms) < time.total_seconds(apart)
    # Three tasks less, and none that is waited for.
    saved = 3 * (time.SWITCH["gpu"] + time.CHAINED["gpu"]) * plan.cluster.task_overhead_s
    assert apart["between tasks"] - terms["between tasks"] == pytest.approx(saved)


def test_what_a_task_works_on_is_held_and_never_spilled():
    """The plan keeps it to a share of the memory: two tasks of four k-tiles, not one of eight."""
    plan = laid_out(4, 2**25, 32)
    assert plan.layout.k_tiles_per_task == 4
    assert plan.tasks == 2 * 4 + 1
    k_tile = 2**20 * 2048 * 4
    assert plan.memory_terms["A in use"] == 4 * k_tile < 0.3 * plan.budget_bytes
    assert plan.spill_terms["A kept"] == 4 * k_tile


def test_no_plan_may_fuse_what_comes_in_sub_blocks():
    """The tasks of a fused loop are given whole blocks; plans see to that."""
    x = da.zeros((40, 40), chunks=40, dtype="float32")
    spec = MatrixSpec(x.shape, chunks=x.chunks)
    cpu = DeviceSpec("cpu", "cpu", 10**9, 50.0, 20.0)
    plan = plan_matmul(
        Problem(spec, spec), ClusterSpec.homogeneous(cpu, 1), options=Options(blocks=20, slabs=20)
    )
    fused = replace(plan, layout=replace(plan.layout, cut_once=False, k_tiles_per_task=2))
    step = multiply.Step("float32", "float32")
    with pytest.raises(AssertionError, match="come in sub-blocks"):
        build(fused, x, x, None, step, np.empty((0, 0), "f4"))


def test_a_product_of_no_elements_is_planned_in_k_tiles(client):
    """Nothing is in use, of which several k-tiles at once would take so many bytes."""
    x = da.zeros((100, 0), chunks=(10, 1)).persist()
    wait(x)
    for a, b in ((x.T, x), (x.T, da.zeros((100, 0), chunks=(20, 1)))):
        c = multimm.matmul(a, b, slabs=10)
        assert c.compute().shape == (0, 0)
