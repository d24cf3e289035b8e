"""Small products are planned for some of the workers, where those are the faster."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from multimm.planning.candidates.worker_subset import is_short
from multimm.planning.choice import UNSPLIT, is_small, plan_matmul
from multimm.planning.cost import memory
from multimm.planning.options import Options
from multimm.planning.problem import Problem
from multimm.planning.search import NEARLY, candidates, rank_of
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


def test_the_plan_says_how_many_workers_it_uses_and_why():
    text = str(plan_matmul(problem(*MEDIUM), gpus(8)))
    assert "8 of NVIDIA H200, 2 of them used" in text
    assert "because 2 workers alone take 0.0257 s, all 8 0.0367 s" in text
    assert "next best is 1 x 2 x 1" in text
    text = str(plan_matmul(problem(65536, 512, 512, ""), gpus(8)))
    assert "one worker, because 1 worker alone takes 0.013 s, all 8 0.0315 s; 0 B move\n" in text
    assert "used" not in str(plan_matmul(problem(*[65536] * 3), gpus(8)))


@pytest.mark.parametrize("size", [32768, 65536])
@pytest.mark.parametrize("workers", [2, 3, 4, 6, 7, 8])
@pytest.mark.parametrize("pack", ["float32", "tf32", ""])
def test_a_large_product_uses_all_workers_of_a_node(size, workers, pack):
    assert plan_matmul(problem(size, size, size, pack), gpus(workers)).grid.workers == workers


@settings(max_examples=40, deadline=None)
@given(
    st.tuples(*[st.sampled_from((300, 1024, 5000, 16384, 40000, 2**17))] * 3),
    st.sampled_from((2, 3, 5, 8, 16, 24)),
    st.booleans(),
)
def test_leaving_workers_out_is_never_slower_and_pays(shape, workers, gram):
    m, k, n = (shape[0], shape[1], shape[0]) if gram else shape
    b = MatrixSpec((k, n))
    a = b.T if gram else MatrixSpec((m, k))
    asked, cluster = Problem(a, b, pack="tf32", gram=gram), gpus(workers, min(workers, 8))
    if is_small(asked, cluster):
        return
    layout = plan_matmul(asked, cluster).layout
    seconds = rank_of(layout, cluster, memory.held(layout, cluster)).seconds
    best = min(candidates(asked, cluster, Options()).values()).seconds
    assert seconds <= UNSPLIT * NEARLY * best
    if is_short(asked, cluster):
        for count in (1, 2, 4):
            fewer = candidates(asked, cluster.first(count), Options())
            # Of all of these the worst is 5000 x 5000 @ 5000 x 131072, 10.6 % behind two workers.
            assert seconds <= 1.11 * min(fewer.values()).seconds


@pytest.mark.parametrize("pack", ["float32", "tf32"])
def test_what_was_laid_out_for_one_node_is_planned_for_one_again(pack):
    """A tall product, whose sums of parts of k are best added by few tasks."""
    cluster = gpus(64, per_node=8)
    first = plan_matmul(problem(2048, 2**22, 2048, pack), cluster)
    layout = first.layout
    a = MatrixSpec((2048, 2**22), chunks=(layout.m_blocks, layout.slabs))
    b = MatrixSpec((2**22, 2048), chunks=(layout.slabs, layout.n_blocks))
    again = plan_matmul(Problem(a, b, pack=pack), cluster)
    assert again.grid.workers <= 16
    assert again.seconds <= NEARLY * first.seconds


def test_of_larger_products_more_blocks_are_tried_on_fewer_workers():
    plan = plan_matmul(problem(20480, 32768, 20480, "tf32"), gpus(8))
    found = candidates(plan.layout.problem, gpus(4), Options())
    assert plan.grid == (2, 2, 1)
    assert len(plan.layout.m_blocks) == len(plan.layout.n_blocks) == 4
    assert plan.seconds <= NEARLY * min(found.values()).seconds


def test_blocks_and_slabs_that_are_given_are_no_fewer_on_fewer_workers():
    for options in (Options(blocks=8192), Options(slabs=819), Options(p_k=1)):
        assert plan_matmul(problem(*MEDIUM), gpus(8), options=options).grid.workers == 8


def test_operands_that_are_still_to_be_made_are_made_by_all():
    asked = problem(*MEDIUM, awaited=True)
    assert plan_matmul(asked, gpus(8)).grid.workers == 8
    assert plan_matmul(asked, gpus(32, per_node=8)).grid.workers == 32


def test_whole_nodes_are_left_out_of_larger_products():
    square = problem(20480, 20480, 20480)
    plan = plan_matmul(square, gpus(32, per_node=8))
    assert plan.grid.workers == 8
    assert "between nodes" not in str(plan).split("moved")[1]
    assert plan.seconds < plan_matmul(square, gpus(32)).seconds  # one node, on paper


def test_what_lies_on_another_node_keeps_it_in_use():
    chunks = ((8192, 8192), (16384,))
    b = MatrixSpec((16384, 16384))
    for owners, used in (((0, 7), 8), ((0, 8), 16)):
        a = MatrixSpec((16384, 16384), chunks=chunks, owners=owners)
        assert plan_matmul(Problem(a, b, pack="float32"), gpus(32, 8)).grid.workers >= used


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


def test_when_nodes_are_left_out_the_rest_is_searched_as_thoroughly():
    long = problem(8192, 2**20, 8192, "tf32")
    node = plan_matmul(long, gpus(8))
    plan = plan_matmul(long, gpus(24, per_node=8))
    assert plan.grid == node.grid
    assert plan.seconds == node.seconds


def test_of_nearly_equal_numbers_of_workers_the_smallest_is_used():
    tie = problem(13600, 4096, 13600)
    one, two = (
        min(candidates(tie, gpus(2).first(workers), Options()).values()).seconds
        for workers in (1, 2)
    )
    assert one < two < NEARLY * one
    assert plan_matmul(tie, gpus(8)).grid.workers == plan_matmul(tie, gpus(2)).grid.workers == 1
