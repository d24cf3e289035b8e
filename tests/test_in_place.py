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
        assert len(layout.result.owners(workers + 1)) == c.npartitions


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
