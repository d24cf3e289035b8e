"""k that is summed where it lies: products are right in any order of its chunks."""

from __future__ import annotations

from dataclasses import replace

import dask.array as da
import numpy as np
from by_plan import by_plan
from hypothesis import given
from hypothesis import strategies as st
from paper import cpus, gpus

from multimm.planning.blocking import lay_out
from multimm.planning.candidates.in_place import parts_in_place, stacks_in_place
from multimm.planning.choice import plan_matmul
from multimm.planning.cost.counted_transfers import received
from multimm.planning.options import Options
from multimm.planning.problem import Problem
from multimm.planning.spec import MatrixSpec
from multimm.planning.tiling.grid import Grid

# --------------------------------------------------------------------- the plan


def test_who_owns_nothing_of_k_has_no_part():
    a = MatrixSpec((4096, 64), chunks=((1024, 2048, 1024, 0), (64,)), owners=(0, 1, 0, 2))
    full = replace(a, chunks=((1024, 1024, 1024, 1024), (64,)))
    assert parts_in_place(Problem(a.T, a), gpus(3)) == {}
    found = parts_in_place(Problem(full.T, full), gpus(3))
    assert {layout.parts for layout in found} == {3}


def test_ranges_of_k_stay_where_they_lie_unless_sums_are_larger_than_operands():
    """All of A and B takes less to send than a C for each worker."""
    for side, there in ((1024, True), (20_000, False)):
        a = MatrixSpec((side, 4096), chunks=((side,), (1024,) * 4), owners=(0, 1, 0, 1))
        assert bool(parts_in_place(Problem(a, a.T), gpus(2))) == there


def test_a_range_of_k_is_summed_by_who_has_most_of_it():
    """Neither A nor B has its ranges on one worker each."""
    lies = (0, 1, 0, 1, 0, 1, 1, 0), (1, 1, 0, 0, 0, 1, 0, 1)  # two rows, and two columns, of four
    chunks = ((88, 88), (14640,) * 4)
    a, b = (MatrixSpec((176, 58560), chunks=chunks, owners=x) for x in lies)
    problem = Problem(a, b.T, chunks=((88, 88), (88, 88)))
    found = parts_in_place(problem, cpus(2))
    assert {layout.k_parts for layout in found} == {(0, 1, 0, 1)}
    moved = min(rank.moved for rank in found.values())
    assert moved == 4 * 88 * 14640 * 4 + 176 * 176 * 4  # of 16 blocks; and sums
    assert plan_matmul(problem, cpus(2)).bytes_moved <= moved


def stack(owners, shape=(4096, 4096)):
    """Matrices of a stack, each on a worker."""
    chunks = ((1,) * len(owners), *((size,) for size in shape))
    return MatrixSpec((len(owners), *shape), chunks=chunks, owners=owners)


def test_matrices_of_a_stack_are_multiplied_where_most_of_them_lies():
    a, b = stack((0, 1, 1, 0, 1, 0)), stack((1, 0, 1, 0, 1, 0), (4096, 512))
    plan = plan_matmul(Problem(a, b), gpus(2))
    assert plan.layout.row_owners == a.owners
    assert plan.bytes_moved == 2 * 4096 * 512 * 4  # of B's, where A's lies elsewhere
    assert plan.layout.result_owners(2) == a.owners
    assert "each block of the stack is multiplied where most of it lies" in plan.reason


def test_matrices_of_a_stack_leave_a_worker_that_has_all_of_them():
    """As long as products take longer than transfers."""
    owners = (1,) * 8
    large = plan_matmul(Problem(*[stack(owners, (16384, 16384))] * 2), gpus(2))
    assert large.bytes_moved == 8 * 16384 * 16384 * 4  # of four matrices each
    thin = plan_matmul(Problem(stack(owners, (16384, 16384)), stack(owners, (16384, 8))), gpus(2))
    assert thin.bytes_moved == 0


# ------------------------------------------------------------------ the graph


@given(st.data(), st.integers(1, 3), st.booleans())
def test_stacks_are_right_wherever_their_blocks_lie(data, workers, broadcast):
    chunks, rng = (2, 1, 3, 1, 1), np.random.default_rng(0)
    x = rng.integers(-8, 9, (8, 6, 7)).astype("float32")
    y = rng.integers(-8, 9, (1 if broadcast else 8, 7, 5)).astype("float32")
    a = da.from_array(x, chunks=(chunks, 3, 7))
    b = da.from_array(y, chunks=((1,) if broadcast else chunks, 7, 5))
    lies = st.lists(st.integers(0, workers), min_size=10, max_size=10)
    specs = [
        MatrixSpec(v.shape, chunks=v.chunks, owners=tuple(data.draw(lies)[: v.npartitions]))
        for v in (a, b)
    ]
    problem, cluster = Problem(*specs), gpus(workers + 1)
    layouts = [*stacks_in_place(problem, cluster)]
    assert layouts
    for layout in layouts:
        plan = replace(plan_matmul(problem, cluster), layout=layout)
        c = by_plan(plan, a, b)
        np.testing.assert_array_equal(c.compute(scheduler="sync"), x @ y)
        assert plan.bytes_received == sum(received(layout, workers + 1).values())
        assert len(c.dask.layers[c.name]) == plan.tasks
        assert len(layout.result_owners(workers + 1)) == c.npartitions


@given(st.integers(0, 5), st.lists(st.integers(1, 4), min_size=2, max_size=4), st.booleans(),
       st.sampled_from([1, 2, 5]))  # fmt: skip
def test_parts_of_any_length_are_right(seed, counts, symmetric, at_once):
    k, rng = tuple(1 + i % 3 for i in range(sum(counts))), np.random.default_rng(seed)
    x = rng.integers(-8, 9, (9, sum(k))).astype("float32")
    y = x.T if symmetric else rng.integers(-8, 9, (sum(k), 10)).astype("float32")
    a = da.from_array(x, chunks=((5, 4), k))
    b = a.T if symmetric else da.from_array(y, chunks=(k, (6, 4)))
    workers = len(counts)
    owners = tuple(
        rng.permutation([part for part, count in enumerate(counts) for _ in range(count)]).tolist()
    )
    left = MatrixSpec(x.shape, chunks=a.chunks, owners=owners * 2)
    problem = Problem(left, MatrixSpec(y.shape, chunks=b.chunks), symmetric=symmetric)
    grid, options = Grid(1, 1, workers), Options(blocks=4)
    layout = lay_out(replace(problem, symmetric=False), gpus(workers), grid, options)
    own = [
        [size for size, owner in zip(k, owners, strict=True) if owner == x] for x in range(workers)
    ]
    k_tiles = tuple(size for part in own for size in part)
    layout = replace(layout, k_tiles=k_tiles, k_parts=owners, k_tiles_per_task=at_once)
    assert layout.steps == max(counts)
    assert layout.share_k == max(map(sum, own))
    plan = replace(plan_matmul(problem, gpus(workers)), layout=layout)
    c = by_plan(plan, a, a.T if symmetric else b)
    np.testing.assert_array_equal(c.compute(scheduler="sync"), x @ y)
