"""Small products are planned for some of the workers, where those are the faster."""

from __future__ import annotations

from dataclasses import replace

import pytest

from multimm.planning.choice import plan_matmul
from multimm.planning.problem import Problem
from multimm.planning.spec import H200, INFINIBAND, NVLINK, ClusterSpec, MatrixSpec

#: For two of many workers, in `float32`: measured on four.
MEDIUM = (12288, 12288, 12288)


def gpus(workers, per_node=0):
    return ClusterSpec((H200,) * workers, NVLINK, per_node=per_node, between=INFINIBAND)


def problem(m, k, n, pack="float32", **options):
    return Problem(MatrixSpec((m, k)), MatrixSpec((k, n)), pack=pack, **options)


@pytest.mark.parametrize("workers", [3, 4, 6, 8, 24, 64, 1024])
def test_a_small_product_takes_no_longer_on_many_workers(workers):
    two = plan_matmul(problem(*MEDIUM), gpus(2))
    plan = plan_matmul(problem(*MEDIUM), gpus(workers))
    assert plan.grid.workers == 2
    assert plan.seconds == two.seconds
    assert plan.memory_terms == two.memory_terms
    assert plan.received == two.received
    assert plan.bytes_bound == two.bytes_bound


def test_the_plan_says_how_many_workers_it_uses():
    assert "8 of NVIDIA H200, 2 of them used" in str(plan_matmul(problem(*MEDIUM), gpus(8)))
    assert "used" not in str(plan_matmul(problem(*[65536] * 3), gpus(8)))


@pytest.mark.parametrize("size", [32768, 65536])
@pytest.mark.parametrize("workers", [2, 3, 4, 6, 7, 8])
@pytest.mark.parametrize("pack", ["float32", "tf32", ""])
def test_a_large_product_uses_all_workers_of_a_node(size, workers, pack):
    assert plan_matmul(problem(size, size, size, pack), gpus(workers)).grid.workers == workers


def test_whole_nodes_are_left_out_of_larger_products():
    square = problem(20480, 20480, 20480)
    plan = plan_matmul(square, gpus(32, per_node=8))
    assert plan.grid.workers == 8
    assert "between nodes" not in str(plan).split("moved")[1]
    assert plan.seconds < plan_matmul(square, gpus(32)).seconds  # one node, on paper


def test_fewer_workers_that_lack_memory_are_not_taken():
    # Each of two would hold half of A and C, one GB, and sums on top.
    small = replace(H200, memory_bytes=890_000_000, spills=False)
    cluster = ClusterSpec((small,) * 8, NVLINK)
    plan = plan_matmul(problem(*MEDIUM), cluster)
    assert plan.grid.workers > 2
    assert plan.check()


def test_workers_that_are_left_out_do_not_count():
    slow = replace(H200, name="slow", gflops=H200.gflops / 2, memory_bytes=H200.memory_bytes // 2)
    cluster = ClusterSpec((H200,) * 2 + (slow,) * 6, NVLINK)
    plan = plan_matmul(problem(*MEDIUM), cluster)
    assert plan.grid.workers == 2
    assert plan.used.slowest == H200
    assert plan.budget_bytes == H200.budget_bytes
    assert plan.seconds == plan_matmul(problem(*MEDIUM), gpus(2)).seconds
