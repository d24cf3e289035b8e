"""Sides, k and stacks in the order in which they lie on workers: products are right in any."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, pairwise

import dask.array as da
import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from paper import gpus

from multimm.graph.array import build
from multimm.graph.tasks.multiply import Step
from multimm.planning.candidates import in_place
from multimm.planning.candidates.block_order import (
    as_stored,
    stack_where_it_lies,
)
from multimm.planning.choice import plan_matmul
from multimm.planning.options import Options
from multimm.planning.problem import Problem
from multimm.planning.spec import MatrixSpec
from multimm.planning.tiling.blocking import lay_out
from multimm.planning.tiling.grid import Grid

# -------------------------------------------------------------------- the graph


@given(
    st.permutations(range(4)), st.permutations(range(3)), st.permutations(range(5)),
    st.booleans(), st.booleans(), st.booleans(), st.sampled_from([1, 2, 4]),
)  # fmt: skip
def test_products_of_sides_in_any_order_are_right(
    rows, columns, terms, trans_a, trans_b, added, workers
):
    m, n, k = (3, 5, 2, 4), (6, 1, 3), (2, 2, 4, 1, 3)
    rng = np.random.default_rng(0)
    x, y, z = (
        rng.integers(-8, 9, (sum(u), sum(v))).astype("float32") for u, v in ((m, k), (k, n), (m, n))
    )
    a, b, c = (da.from_array(x, chunks=(m, k)), da.from_array(y, chunks=(k, n)),
               da.from_array(z, chunks=(m, n)))  # fmt: skip
    sorted_m, sorted_n, sorted_k = (
        tuple(blocks[i] for i in order) for blocks, order in ((m, rows), (n, columns), (k, terms))
    )
    problem = Problem(
        MatrixSpec(x.shape, chunks=(sorted_m, sorted_k)),
        MatrixSpec(y.shape, chunks=(sorted_k, sorted_n)),
        c=MatrixSpec(z.shape, chunks=(sorted_m, sorted_n)) if added else None,
        order=tuple(terms), rows=tuple(rows), columns=tuple(columns), chunks=(m, n),
    )  # fmt: skip
    plan = plan_matmul(problem, gpus(workers), options=Options(p_k=1))
    layout, _ = lay_out(problem, gpus(workers), Grid(workers, 1, 1), Options())
    layout = replace(layout, m_blocks=sorted_m, n_blocks=sorted_n, k_tiles=sorted_k, band=4)
    plan = replace(plan, layout=layout)
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
    other = stack_where_it_lies(problem, workers)
    layout = in_place._whole_matrices(other, gpus(workers))
    assert as_stored(layout.batch_blocks[0], other.stack) == sizes
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
def test_products_in_any_order_are_right(order, trans_a, trans_b, cut, workers):
    """Cut, joined or used as they are; stored either way."""
    k, rng = (3, 6, 2, 5, 4), np.random.default_rng(0)
    x = rng.integers(-8, 9, (12, 20)).astype("float32")
    y = rng.integers(-8, 9, (20, 10)).astype("float32")
    a, b = da.from_array(x, chunks=((5, 7), k)), da.from_array(y, chunks=(k, (6, 4)))
    sorted_k = tuple(k[i] for i in order)
    specs = (
        MatrixSpec(x.shape, chunks=((5, 7), sorted_k)),
        MatrixSpec(y.shape, chunks=(sorted_k, (6, 4))),
    )
    problem = Problem(*specs, order=tuple(order))
    blocks, k_tiles = cut
    fixed = Options(blocks=blocks, slabs=k_tiles)
    layout, _ = lay_out(problem, gpus(workers), Grid(1, 1, workers), fixed)
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
    owners = tuple(part for part, count in enumerate(counts) for _ in range(count))
    left = MatrixSpec(x.shape, chunks=a.chunks, owners=owners * 2)
    problem = Problem(left, MatrixSpec(y.shape, chunks=b.chunks), symmetric=symmetric)
    grid, options = Grid(1, 1, workers), Options(blocks=4)
    layout, _ = lay_out(replace(problem, symmetric=False), gpus(workers), grid, options)
    layout = replace(layout, k_tiles=k, part_k_tiles=tuple(counts), k_tiles_per_task=at_once)
    assert layout.steps == max(counts)
    assert layout.share_k == max(
        sum(k[start:end]) for start, end in pairwise([0, *accumulate(counts)])
    )
    plan = replace(plan_matmul(problem, gpus(workers)), layout=layout)
    c = build(
        plan, a, a.T if symmetric else b, None, Step("float32", "float32"), np.empty((0, 0), "f4")
    )
    np.testing.assert_array_equal(c.compute(scheduler="sync"), x @ y)
