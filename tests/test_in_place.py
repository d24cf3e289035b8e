"""Sides, k and stacks that stay where they lie: who has which, and products are right in any."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import dask.array as da
import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from paper import cpus, gpus

from multimm.graph.array import build
from multimm.graph.tasks.multiply import Step
from multimm.planning.candidates.in_place import parts_in_place, stack_in_place, turns_of
from multimm.planning.choice import plan_matmul
from multimm.planning.options import Options
from multimm.planning.problem import Problem
from multimm.planning.schedule import Schedule
from multimm.planning.spec import MatrixSpec
from multimm.planning.tiling.blocking import lay_out
from multimm.planning.tiling.grid import Coordinate, Grid, Located

BANDS = (0,) * 8 + (2,) * 8 + (1,) * 8 + (3,) * 8

# --------------------------------------------------------------------- the plan


@given(st.lists(st.integers(0, 4), max_size=40), st.integers(1, 5))
def test_blocks_are_assigned_out_to_those_who_have_them(owners, workers):
    """Whose are more than a fair share gives away just what is beyond it."""
    owners = [owner % workers for owner in owners]
    turns = turns_of(owners, workers)
    assert sorted(turns) == list(range(len(owners)))
    stay = sum(owner == turn % workers for owner, turn in zip(owners, turns, strict=True))
    places = Counter(i % workers for i in range(len(owners)))
    assert stay == sum(min(count, places[owner]) for owner, count in Counter(owners).items())


def in_rows(owners, shape=(2**20, 8192)):
    """A matrix in blocks of rows, each on a worker."""
    rows = shape[0] // len(owners)
    return MatrixSpec(shape, chunks=((rows,) * len(owners), shape[1:]), owners=tuple(owners))


def test_where_more_of_c_would_travel_than_of_the_rows_these_do():
    a, shape = in_rows(BANDS), (2**20, 16384)
    where_a_lies, in_turn = in_rows(BANDS, shape), in_rows((0, 1, 2, 3) * 8, shape)
    in_place, other = (
        plan_matmul(Problem(a, MatrixSpec((8192, 16384)), c=c), gpus())
        for c in (where_a_lies, in_turn)
    )
    assert in_place.layout.located.rows
    assert not in_place.bytes_added
    assert not other.layout.located.rows
    assert not other.bytes_added
    assert other.bytes_moved == other.bytes_received == in_place.bytes_moved + a.nbytes * 3 / 4
    assert a.nbytes < in_turn.nbytes


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
    assert {layout.located.parts for layout in found} == {(0, 1, 0, 1)}
    moved = min(rank.moved for rank in found.values())
    assert moved == 4 * 88 * 14640 * 4 + 176 * 176 * 4  # of 16 blocks; and sums
    assert plan_matmul(problem, cpus(2)).bytes_moved <= moved


# -------------------------------------------------------------------- the graph


@given(
    st.permutations(range(4)), st.permutations(range(3)), st.integers(1, 4), st.booleans(),
    st.booleans(), st.booleans(), st.sampled_from([(1, 1, 1), (2, 1, 1), (1, 3, 1), (2, 2, 1)]),
)  # fmt: skip
def test_products_of_sides_in_any_turn_are_right(rows, columns, band, trans_a, trans_b, added, at):
    m, n, k, grid = (3, 5, 2, 4), (6, 1, 3), (2, 2, 4, 1, 3), Grid(*at)
    rng = np.random.default_rng(0)
    x, y, z = (
        rng.integers(-8, 9, (sum(u), sum(v))).astype("float32") for u, v in ((m, k), (k, n), (m, n))
    )
    a, b, c = (da.from_array(x, chunks=(m, k)), da.from_array(y, chunks=(k, n)),
               da.from_array(z, chunks=(m, n)))  # fmt: skip
    problem = Problem(
        *(MatrixSpec(v.shape, chunks=v.chunks) for v in (a, b)),
        c=MatrixSpec(z.shape, chunks=c.chunks) if added else None,
        chunks=(m, n),
    )
    located = Located(tuple(rows), tuple(columns))
    layout = Schedule(problem, grid, (), m, n, k, band, located=located)
    for i, j in np.ndindex(4, 3):
        assert layout.completes(i, j) == grid.rank(Coordinate(rows[i], columns[j], 0))
    plan = replace(plan_matmul(problem, gpus(grid.workers)), layout=layout)
    step = Step("float32", "float32", trans_a=trans_a, trans_b=trans_b, alpha=2, beta=3 * added)
    stored = a.T if trans_a else a, b.T if trans_b else b
    result = build(plan, *stored, c if added else None, step, np.empty((0, 0), "float32"))
    assert result.chunks == (m, n)
    np.testing.assert_array_equal(result.compute(scheduler="sync"), 2 * x @ y + 3 * added * z)


@given(st.permutations(range(5)), st.sampled_from(["own", "one", "two-dimensional"]), st.booleans(),
       st.booleans(), st.booleans(), st.integers(2, 4))  # fmt: skip
def test_stacks_in_any_order_are_right(order, kind, trans_a, trans_b, added, workers):
    sizes, rng = (3, 1, 2, 4, 1), np.random.default_rng(0)
    stack = {"own": (11,), "one": (1,), "two-dimensional": ()}[kind]
    x, y, z = (
        rng.integers(-8, 9, shape).astype("float32")
        for shape in ((11, 4, 6), (*stack, 6, 5), (11, 4, 5))
    )
    blocks = {11: sizes, 1: (1,)}
    a, b, c = (da.from_array(v, chunks=(*(blocks[n] for n in v.shape[:-2]), *v.shape[-2:]))
               for v in (x, y, z))  # fmt: skip
    owners = tuple(i % workers for i in order)
    own = owners if kind == "own" else ()
    problem = Problem(MatrixSpec(x.shape, chunks=a.chunks, owners=owners),
                      MatrixSpec(y.shape, chunks=b.chunks, owners=own),
                      c=MatrixSpec(z.shape, chunks=c.chunks) if added else None,
                      chunks=(sizes, (4,), (5,)))  # fmt: skip
    layout = stack_in_place(problem, workers)
    assert layout.batch_blocks[0] == sizes
    assert sorted(map(layout.completes, (0,) * 5, (0,) * 5, range(5))) == sorted(owners)
    plan = replace(plan_matmul(problem, gpus(workers)), layout=layout)
    step = Step("float32", "float32", trans_a=trans_a, trans_b=trans_b, alpha=2, beta=3 * added)
    stored = (v.swapaxes(-1, -2) if turned else v for v, turned in ((a, trans_a), (b, trans_b)))
    result = build(plan, *stored, c if added else None, step, np.empty((0, 0, 0), "float32"))
    assert result.chunks == ((sizes), (4,), (5,))
    np.testing.assert_array_equal(result.compute(scheduler="sync"), 2 * x @ y + 3 * added * z)


# ------------------------------------------------------------------ the graph


@given(
    st.permutations(range(5)),
    st.booleans(),
    st.booleans(),
    st.sampled_from([(7, 7), (20, 20), (4, 9)]),
    st.sampled_from([1, 2, 3]),
)
def test_products_in_any_order_are_right(parts, trans_a, trans_b, cut, workers):
    """Cut, joined or used as they are; stored either way."""
    k, rng = (3, 6, 2, 5, 4), np.random.default_rng(0)
    x = rng.integers(-8, 9, (12, 20)).astype("float32")
    y = rng.integers(-8, 9, (20, 10)).astype("float32")
    a, b = da.from_array(x, chunks=((5, 7), k)), da.from_array(y, chunks=(k, (6, 4)))
    problem = Problem(*(MatrixSpec(v.shape, chunks=v.chunks) for v in (a, b)))
    blocks, k_tiles = cut
    fixed, located = Options(blocks=blocks, slabs=k_tiles), Located(parts=tuple(parts))
    layout, _ = lay_out(problem, gpus(workers), Grid(1, 1, workers), fixed, located=located)
    assert layout.spec("a").chunks[1] == tuple(k[i] for i in layout.k_order or range(5))
    plan = replace(plan_matmul(problem, gpus(workers), options=fixed), layout=layout)
    for once in (True, False) if workers == 1 else (True,):
        plan = replace(plan, layout=replace(layout, cut_once=once))
        step = Step("float32", "float32", trans_a=trans_a, trans_b=trans_b)
        stored = a.T if trans_a else a, b.T if trans_b else b
        c = build(plan, *stored, None, step, np.empty((0, 0), "float32"))
        np.testing.assert_array_equal(c.compute(scheduler="sync"), x @ y)


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
    layout, _ = lay_out(replace(problem, symmetric=False), gpus(workers), grid, options)
    own = [
        [size for size, owner in zip(k, owners, strict=True) if owner == x] for x in range(workers)
    ]
    k_tiles = tuple(size for part in own for size in part)
    located = Located(parts=owners)
    layout = replace(layout, k_tiles=k_tiles, located=located, k_tiles_per_task=at_once)
    assert layout.steps == max(counts)
    assert layout.share_k == max(map(sum, own))
    plan = replace(plan_matmul(problem, gpus(workers)), layout=layout)
    c = build(
        plan, a, a.T if symmetric else b, None, Step("float32", "float32"), np.empty((0, 0), "f4")
    )
    np.testing.assert_array_equal(c.compute(scheduler="sync"), x @ y)
