"""Symmetric products: one triangle computed, the other mirrored; in plans and on workers."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from itertools import product

import dask
import dask.array as da
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small import integers

import multimm
from multimm.cluster.inspect.cluster_spec import listed
from multimm.errors import ShapeError
from multimm.graph.array import build
from multimm.graph.block_task import BlockTask
from multimm.graph.label import Kind
from multimm.graph.lowering import symmetric
from multimm.graph.lowering.operand import peel
from multimm.graph.tasks import multiply
from multimm.graph.tasks.multiply import Step
from multimm.io import open_array
from multimm.planning import search
from multimm.planning.choice import plan_matmul
from multimm.planning.cost import communication, counted_transfers, memory, time
from multimm.planning.options import Options
from multimm.planning.problem import Problem
from multimm.planning.schedule import Schedule
from multimm.planning.spec import H200, LOCAL_TCP, ClusterSpec, DeviceSpec, MatrixSpec
from multimm.planning.tiling.counts import MOST_ELEMENTS
from multimm.planning.tiling.grid import Grid, even

SYMMETRIC = Step("float32", "float32", trans_b=True)


def symmetric_problem(m, k, batch=(), **options):
    a = MatrixSpec((*batch, m, k))
    return Problem(a, a.T, symmetric=True, **options)


def cpus(workers, memory=10**9):
    device = DeviceSpec("cpu", "cpu", memory, 50.0, 20.0)
    return ClusterSpec.homogeneous(device, workers, LOCAL_TCP)


def layout_of(blocks=12, grid=(2, 2, 1), k_tiles=4, batch=(), edge=10):
    problem = symmetric_problem(blocks * edge, k_tiles * edge, tuple(map(sum, batch)))
    sizes = even(blocks * edge, blocks)
    cut = even(k_tiles * edge, k_tiles)
    rows = blocks * int(np.prod([len(b) for b in batch]))
    band = -(-rows // grid[0])
    return Schedule(problem, Grid(*grid), batch, sizes, sizes, cut, band, mirrors=True)


def block_tasks(array):
    return {k: t for k, t in dict(array.dask).items() if isinstance(t, BlockTask)}


def kinds(made):
    return Counter(task.label.kind for task in made.values())


def product_of(a, plan, step=SYMMETRIC):
    return build(plan, a, a, None, step, np.empty((0,) * a.ndim, "float32"))


# What is recognised ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "transposed",
    [
        lambda x: x.T,
        lambda x: x.transpose(),
        lambda x: x.transpose(1, 0),
        lambda x: da.swapaxes(x, 0, 1),
        lambda x: np.swapaxes(x, -1, -2),
        lambda x: multimm.transpose(x),
        lambda x: x.T.T.T,
    ],
)
def test_lazy_transposes_are_peeled_off(transposed):
    x = da.from_array(integers((30, 20)), chunks=(7, 6)) + 1
    y = transposed(x)
    base, turned = peel(y)
    assert turned
    assert (base.name, base.chunks, base.dtype) == (x.name, x.chunks, x.dtype)
    np.testing.assert_array_equal(base.compute(), x.compute())
    assert y.name not in base.dask.layers


@pytest.mark.parametrize(
    "other",
    [
        lambda x: x,
        lambda x: x.T + 0,
        lambda x: x[::-1].T[:],
        lambda x: x.T.persist(scheduler="sync"),
        lambda x: da.blockwise(np.rot90, "ji", x, "ij", dtype=x.dtype),
        lambda x: da.blockwise(np.transpose, "ij", x, "ij", dtype=x.dtype, axes=(0, 1)),
        lambda x: dask.optimize(x.T)[0],
    ],
)
def test_what_is_more_than_a_transpose_stays(other):
    x = da.from_array(integers((20, 20)), chunks=10)
    y = other(x)
    base, _ = peel(y)
    if base is not y:
        np.testing.assert_array_equal(base.T.compute(), y.compute())
    assert base.name != x.name or y is x


def test_only_the_last_two_axes_are_peeled():
    x = da.ones((4, 3, 2), chunks=1)
    assert peel(x.transpose(0, 2, 1))[1]
    assert not peel(x.transpose(1, 0, 2))[1]
    assert not peel(x.T)[1]


def test_annotations_of_a_transpose_are_not_lost():
    x = da.ones((4, 3), chunks=1)
    with dask.annotate(priority=3):
        y = x.T
    assert peel(y)[0] is y


X = da.from_array(integers((40, 30)), chunks=(9, 7), name="gram-x")
TWIN = da.from_array(integers((40, 30)), chunks=(9, 7), name="gram-twin")
STACK = da.from_array(integers((3, 20, 20)), chunks=(1, 8, 8), name="gram-stack")


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda: multimm.matmul(X.T, X, blocks=10), True),
        (lambda: multimm.matmul(X, X.T, blocks=10), True),
        (lambda: multimm.matmul(multimm.transpose(X), X, blocks=10), True),
        (lambda: multimm.gemm(2, X, X, trans_a=True, blocks=10), True),
        (lambda: multimm.gemm(2, X, X, trans_b=True, blocks=10), True),
        (lambda: multimm.gemm(1, X.T, X, 1, np.ones((30, 30), "f4"), blocks=10), True),
        (lambda: multimm.gemm(1, X.T, X.T, trans_b=True, blocks=10), True),
        (lambda: multimm.matmul(STACK, STACK.transpose(0, 2, 1), blocks=8), True),
        (lambda: multimm.matmul(X.T, TWIN, blocks=10), False),
        (lambda: multimm.matmul(X.T + 0, X, blocks=10), False),
        (lambda: multimm.matmul(X.T, X + 0, blocks=10), False),
        (lambda: multimm.matmul(X[:30].T, X[10:], blocks=10), False),
        (lambda: multimm.matmul(X[:30], X[:30], blocks=10), False),
        (lambda: multimm.matmul(STACK, STACK, blocks=8), False),
        (lambda: multimm.matmul(X.T, X, blocks=(10, 15)), False),
        (lambda: multimm.matmul(X.T, X, blocks=30), False),
    ],
)
def test_one_array_transposed_on_one_side_is_a_symmetric_product(call, expected):
    c = call()
    verbs = [t.kwargs.get("verb", t.func) for t in block_tasks(c).values()]
    mirrored = [verb for verb in verbs if verb is symmetric.multiply_diagonal]
    assert bool(mirrored) == expected


@pytest.mark.usefixtures("no_compute")
def test_recognising_computes_nothing():
    multimm.matmul(X.T, X, blocks=10)
    multimm.plan(X, X, trans_a=True)


# Results ---------------------------------------------------------------------------------


@settings(max_examples=40)
@given(
    st.tuples(st.integers(1, 14), st.integers(0, 14)),
    st.integers(1, 5),
    st.integers(1, 5),
    st.integers(1, 5),
    st.none() | st.integers(1, 4),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_any_layout_gives_the_product(size, block, k_tile, chunk, p_k, left, batched, with_c):
    shape = (3, *size) if batched else size
    x = integers(shape)
    a = da.from_array(x, chunks=chunk)
    options = {"blocks": block, "slabs": k_tile, "p_k": p_k}
    turned = x.swapaxes(-1, -2)
    right = turned @ x if left else x @ turned
    if with_c and not batched:
        c = integers(right.shape, 1)
        lazy = da.from_array(c, chunks=chunk)
        flags = {"trans_a": left, "trans_b": not left}
        result = multimm.gemm(3, a, a, 2, lazy, **flags, **options).compute(scheduler="sync")
        np.testing.assert_array_equal(result, 3 * right + 2 * c)
        return
    flipped = da.swapaxes(a, -1, -2)
    lazy = multimm.matmul(*((flipped, a) if left else (a, flipped)), **options)
    result = lazy.compute(scheduler="sync")
    assert result.shape == right.shape
    np.testing.assert_array_equal(result, right)


@pytest.mark.parametrize("p_k", [1, 3])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "complex64", "int32"])
def test_bits_are_symmetric(dtype, p_k):
    x = (np.random.default_rng(1).standard_normal((150, 77)) * 9).astype(dtype)
    a = da.from_array(x, chunks=40)
    c = multimm.matmul(a.T, a, blocks=20, slabs=30, p_k=p_k).compute(scheduler="sync")
    assert c.dtype == (x.T @ x).dtype
    np.testing.assert_array_equal(c, c.T)
    np.testing.assert_allclose(
        c, x.T.astype("c16") @ x, rtol=1e-2 if dtype == "float16" else 1e-3, atol=2
    )


def test_blocks_of_the_result_are_in_c_order_and_of_their_own():
    a = da.from_array(integers((40, 40)), chunks=10)
    blocks = multimm.matmul(a, a.T, blocks=10).to_delayed().ravel()
    done = dask.compute(*blocks, scheduler="sync")
    assert all(block.flags.c_contiguous for block in done)
    assert not any(np.shares_memory(x, y) for n, x in enumerate(done) for y in done[:n])


def test_beta_c_is_added_after_mirroring():
    """C is not symmetric: added before, its triangle would be mirrored, too."""
    x, c = integers((30, 20)), integers((30, 30), 2)
    a = da.from_array(x, chunks=7)
    for p_k in (1, 2):
        lazy = multimm.gemm(0.5, a, a, -2, c, trans_b=True, blocks=8, slabs=6, p_k=p_k)
        np.testing.assert_array_equal(lazy.compute(), 0.5 * (x @ x.T) - 2 * c)
        assert kinds(block_tasks(lazy))[Kind.FINISH] == 16


def test_alpha_zero_reads_no_operands():
    x = np.full((20, 20), np.nan, "f4")
    a, c = da.from_array(x, chunks=5), np.ones((20, 20), "f4")
    result = multimm.gemm(0, a, a, 3, c, trans_a=True, blocks=5)
    assert (result.compute() == 3).all()
    assert (multimm.gemm(0, a, a, trans_a=True, blocks=5).compute() == 0).all()


def test_not_a_number_stays_where_it_belongs():
    x = integers((30, 20))
    x[3, 4] = np.nan
    a = da.from_array(x, chunks=7)
    result = multimm.matmul(a, a.T, blocks=6, slabs=5).compute()
    np.testing.assert_array_equal(np.isnan(result), np.isnan(x @ x.T))


#: Prints whether products of an array and of a copy at an odd address are the same.
MOVED = """
import numpy as np
from multimm.graph.lowering.symmetric import multiply_diagonal
from multimm.graph.tasks.multiply import Step, multiply
x = np.random.default_rng(5).standard_normal((500, 500), dtype="float32")
raw = np.empty(x.nbytes + 8, "u1")
start = -raw.ctypes.data % 4 + 1
moved = raw[start : start + x.nbytes].view("float32").reshape(x.shape)
moved[...] = x
assert x.flags.aligned and not moved.flags.aligned
step = Step("float32", "float32", trans_b=True)
for product in (lambda y: multiply(y, y, step=step),
                lambda y: multiply_diagonal(y, step=step, complete=True)):
    print(np.array_equal(product(x), product(moved)))
"""


def test_bits_do_not_depend_on_where_memory_begins():
    """Blocks that come in messages begin anywhere; BLAS has another routine for X X^T of one X.

    OpenBLAS, that is, where it has one thread, as workers often do.
    """
    one_thread = os.environ | dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    done = subprocess.run(
        [sys.executable, "-c", MOVED], env=one_thread, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["True", "True"]


def test_bits_do_not_depend_on_the_number_of_workers():
    x = np.random.default_rng(5).standard_normal((200, 300), dtype="float32")
    a = da.from_array(x, chunks=64)
    results = []
    for workers in (1, 2, 3, 6, 16):
        problem = replace(symmetric_problem(200, 300), a=spec_of(a), b=spec_of(a).T)
        options = Options(blocks=60, slabs=45, p_k=3)
        plan = plan_matmul(problem, cpus(workers), options=options)
        results.append(product_of(a, plan).compute(scheduler="threads"))
    for other in results[1:]:
        np.testing.assert_array_equal(results[0], other)


def spec_of(x):
    return MatrixSpec(x.shape, str(x.dtype), x.dtype.itemsize, x.chunks)


# Layouts ---------------------------------------------------------------------------------


def test_half_of_the_blocks_is_computed_and_every_block_is_made_once():
    a = da.ones((60, 50), chunks=10, dtype="f4")
    c = multimm.matmul(a, a.T, blocks=10, slabs=10)
    made = block_tasks(c)
    assert kinds(made) == {Kind.MULTIPLY: 21 * 5, Kind.FINISH: 15}
    assert {key[1:] for key in made if key[0] == c.name} == set(np.ndindex(6, 6))
    multiplied = (task.label.block for task in made.values() if task.label.kind is Kind.MULTIPLY)
    assert all(i >= j for i, j in multiplied)


@pytest.mark.parametrize("reads_c", [False, True])
@pytest.mark.parametrize("p_k", [1, 3])
def test_the_plan_counts_the_tasks_of_the_graph(reads_c, p_k):
    a = da.ones((60, 50), chunks=10, dtype="f4")
    c = np.ones((60, 60), "f4") if reads_c else None
    added = MatrixSpec((60, 60)) if reads_c else None
    problem = replace(symmetric_problem(60, 50, c=added), a=spec_of(a), b=spec_of(a).T)
    plan = plan_matmul(problem, cpus(4), options=Options(blocks=10, slabs=10, p_k=p_k))
    lazy = multimm.gemm(1, a, a, int(reads_c), c, trans_b=True, blocks=10, slabs=10, p_k=p_k)
    assert len(block_tasks(lazy)) == plan.tasks
    assert plan.flops == 2 * 50 * 21 * 100


@pytest.mark.parametrize("grid", [(2, 4, 1), (4, 2, 1), (8, 1, 1), (1, 8, 1), (3, 2, 2), (2, 2, 2)])
def test_work_is_even_and_every_block_has_a_place_that_holds_both_operands(grid):
    layout = layout_of(24, grid)
    load = Counter()
    for i, j in layout.pairs:
        at = layout.worker(i, j, 0)
        assert (at.row, at.col) in {(i, j), (j, i)}
        load[layout.grid.rank(at)] += 100
    mean = 24 * 25 / 2 * 100 / (grid[0] * grid[1])
    assert max(load.values()) == layout.work.most_summed <= 1.05 * mean
    assert layout.share_result <= 1.05 * 240 * 240 / (grid[0] * grid[1])


@pytest.mark.parametrize(
    ("workers", "blocks", "panels"),
    [(2, 4, 4), (3, 3, 2), (4, 4, 3), (5, 5, 3), (6, 6, 3), (7, 7, 4), (8, 4, 2), (8, 8, 5)],
)
def test_few_workers_in_a_column_have_even_shares_of_few_blocks(workers, blocks, panels):
    layout = layout_of(blocks, (workers, 1, 1), k_tiles=8, edge=8192)
    assignment = layout.work.assignment
    assert assignment.free
    assert assignment.most_computed <= 1.03 * assignment.computed_in_all / workers
    assert layout.work.panels == (panels * 8192, 0)
    held, begun = Counter(), Counter()
    for block, k_tile in product(range(blocks), range(8)):
        owner = layout.tiles.owner("a", 0, block, k_tile)
        assert (owner.row, owner.col) in set().union(*layout.work.users("a", 0, block))
        held[layout.grid.rank(owner)] += 1
        begun[layout.grid.rank(owner)] += k_tile == 0
    assert max(held.values()) <= blocks * 8 / workers + blocks
    assert max(begun.values()) <= -(-blocks // workers) + 1
    # What moves is counted from the assignment, too, before a plan is chosen.
    assert (
        sum(counted_transfers.received(layout, workers).values())
        == communication.moved(layout, workers).total
    )


@pytest.mark.parametrize("fan_in", [2, 4])
@pytest.mark.parametrize("grid", [(4, 4, 4), (2, 2, 2), (8, 1, 4), (3, 2, 4)])
def test_workers_with_parts_of_the_same_sums_keep_as_many(grid, fan_in):
    """The places of a cyclic assignment see rows and columns of one remainder alone."""
    layout = replace(layout_of(24, grid, k_tiles=8), fan_in=fan_in)
    kept = Counter(layout.grid.rank(layout.owner(*pair)) for pair in layout.pairs)
    places = Counter()
    for rank, count in kept.items():
        places[layout.grid.place(rank)[:2]] += count
    for rank, count in kept.items():
        assert count <= -(-places[layout.grid.place(rank)[:2]] // grid[2]) + 1


def test_in_long_columns_and_of_many_blocks_the_assignment_is_cyclic():
    assert not layout_of(17, (8, 1, 1)).work.assignment.free
    assert not layout_of(17, (17, 1, 1)).work.assignment.free
    assert not layout_of(8, (4, 2, 1)).work.assignment.free


@pytest.mark.parametrize("workers", [2, 3, 5])
@pytest.mark.parametrize("reads_c", [False, True])
def test_a_free_assignment_gives_the_product(workers, reads_c):
    x, c = integers((10 * workers, 40)), integers((10 * workers, 10 * workers), 2)
    a = da.from_array(x, chunks=(10, 20))
    layout = layout_of(workers, (workers, 1, 1), k_tiles=2, edge=10)
    c = da.from_array(c, chunks=10) if reads_c else None
    added = None if c is None else spec_of(c)
    problem = replace(symmetric_problem(10 * workers, 40, c=added), a=spec_of(a), b=spec_of(a).T)
    layout = replace(layout, problem=problem, k_tiles=(20, 20))
    plan = replace(plan_matmul(problem, cpus(workers)), layout=layout)
    step = replace(SYMMETRIC, alpha=2, beta=3 if reads_c else 0)
    lazy = build(plan, a, a, c, step, np.empty((0, 0)))
    assert layout.work.assignment.free
    assert len(block_tasks(lazy)) == plan.tasks
    expected = 2 * x @ x.T + (3 * c.compute() if reads_c else 0)
    np.testing.assert_array_equal(lazy.compute(scheduler="sync"), expected)


def test_memory_is_a_sum_of_named_terms():
    layout = layout_of(2, (1, 2, 1), k_tiles=2, edge=13)
    stay, spill = memory.held(layout, cpus(2))
    # Three blocks for two workers: one has two of them, and the mirror of the one below.
    assert stay == {
        "partial sums": 2 * 169 * 4,
        "sums being made": 169 * (4 + 4 + 1),  # the result of one, and the mask that mirrors it
        "A in flight": 2 * 26 * 13 * 4,
    }
    # Of the four blocks of A one worker keeps three.
    assert spill == {"C finished": 169 * 4, "A kept": 3 * 169 * 4}


# Plans -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("m", "k", "pack", "least"),
    [
        (65536, 65536, "", 1.8),
        (65536, 65536, "float32", 1.6),
        (131_072, 131_072, "float32", 1.8),
        (32768, 2_097_152, "", 1.9),
        (16384, 2_097_152, "", 1.8),
    ],
)
def test_a_symmetric_product_is_predicted_to_take_little_more_than_half(m, k, pack, least):
    cluster = ClusterSpec.homogeneous(H200, 8)
    symmetric = plan_matmul(symmetric_problem(m, k, pack=pack), cluster)
    plain = plan_matmul(replace(symmetric_problem(m, k, pack=pack), symmetric=False), cluster)
    assert plain.seconds >= least * symmetric.seconds
    assert symmetric.flops < 0.6 * plain.flops
    assert symmetric.strategy.startswith("Gram, ")
    assert "one triangle of C computed and mirrored" in str(symmetric)
    assert symmetric.peak_bytes <= symmetric.budget_bytes


def test_nobody_receives_less_than_nothing():
    """Of uneven k-tiles what is kept is counted as if all were the longest."""
    one = (870,)
    sizes = one, one, (50000, 10585)
    layout = Schedule(symmetric_problem(870, 60585), Grid(8, 1, 1), (), *sizes, 1, mirrors=True)
    assert communication.moved(layout, 8).busiest == 0


def test_two_blocks_are_packed_for_a_product_off_the_diagonal():
    problem = symmetric_problem(8192, 4096, pack="float32")
    blocks = (2048,) * 4
    layout = Schedule(
        problem, Grid(1, 1, 1), (), blocks, blocks, (4096,), 4, pack_once=False, mirrors=True
    )
    cluster = ClusterSpec.homogeneous(H200, 1)
    elements = 2048 * 4096
    off, on = 2 * 6 * time.WITHIN_BYTES * (4 + 4), 4 * time.MIRRORED_BYTES * 4  # the diagonal
    expected = (off + on) * elements / (H200.copy_gbps * 1e9)
    assert time.seconds(layout, cluster, 0)["packing"] == pytest.approx(expected)


@pytest.mark.parametrize("options", [Options(), Options(blocks=8192, slabs=8192, p_k=1)])
@pytest.mark.parametrize("workers", [67, 127])
def test_a_prime_number_of_workers_shares_a_triangle_too(workers, options):
    """Some of them: an arrangement of all would be a column, with as many block rows."""
    cluster = ClusterSpec.homogeneous(H200, workers)
    plan = plan_matmul(symmetric_problem(65536, 65536), cluster, options=options)
    assert plan.layout.mirrors
    assert max(plan.grid.p_m, plan.grid.p_n) < plan.grid.workers < workers
    assert plan.flops < 0.6 * plan.layout.problem.flops


def test_ten_blocks_of_a_triangle_are_assigned_out_freely_to_eight_gpus():
    """Six off the diagonal and four halves on it: at a place of its own each, nobody has two."""
    plan = plan_matmul(
        symmetric_problem(32768, 32768, pack="float32"), ClusterSpec.homogeneous(H200, 8)
    )
    assert plan.grid == (8, 1, 1)
    assert len(plan.layout.m_blocks) == 4
    assert plan.layout.work.multiplied(1) < 1.1 * 8192**2


@pytest.mark.parametrize(("pack", "least"), [("float32", 1.7), ("tf32", 1.5), ("", 1.87)])
def test_eight_gpus_share_a_triangle_without_parts_of_k(pack, least):
    cluster = ClusterSpec.homogeneous(H200, 8)
    symmetric = plan_matmul(symmetric_problem(65536, 65536, pack=pack), cluster)
    plain = plan_matmul(
        replace(symmetric_problem(65536, 65536, pack=pack), symmetric=False), cluster
    )
    assert symmetric.grid == (8, 1, 1)
    assert plain.seconds >= least * symmetric.seconds


def test_a_lone_chain_has_few_k_tiles_but_none_larger_than_was_ever_multiplied():
    plan = plan_matmul(symmetric_problem(2048, 2**21), ClusterSpec.homogeneous(H200, 1))
    assert plan.layout.k_tiles == (2**20, 2**20)
    assert MOST_ELEMENTS == 2048 * 2**20


def test_a_triangle_of_millions_of_blocks_is_not_assigned_out():
    plan = plan_matmul(symmetric_problem(2**22, 2048), ClusterSpec.homogeneous(H200, 8))
    assert not plan.layout.mirrors


def test_where_k_alone_is_divided_a_whole_block_is_fewer_tasks():
    plan = plan_matmul(symmetric_problem(8192, 2**20), ClusterSpec.homogeneous(H200, 2))
    assert str(plan.grid) == "1 x 1 x 2"
    assert plan.layout.m_blocks == (8192,)


def test_where_one_block_is_enough_nothing_is_mirrored():
    plan = plan_matmul(symmetric_problem(500, 20_000_000), ClusterSpec.homogeneous(H200, 8))
    assert type(plan.layout) is Schedule
    assert plan.strategy == "split k"


@pytest.mark.parametrize("workers", [1, 2, 8])
@pytest.mark.parametrize(
    ("m", "k", "pack"),
    [
        (3000, 2048, "float32"),
        (4096, 512, "tf32"),
        (36000, 4096, "float32"),
        (65536, 4096, "float32"),
    ],
)
def test_all_of_c_is_looked_at_where_it_may_be_as_fast(monkeypatch, workers, m, k, pack):
    cluster = ClusterSpec.homogeneous(H200, workers)
    chosen = plan_matmul(symmetric_problem(m, k, pack=pack), cluster).layout
    plan_matmul.cache_clear()
    monkeypatch.setattr(search, "_ahead_of_all", lambda *_: False)
    assert plan_matmul(symmetric_problem(m, k, pack=pack), cluster).layout == chosen
    if m > 10000 and workers == 8:  # one of either kind
        assert chosen.mirrors == (m == 65536)


def test_different_matrices_are_no_symmetric_product():
    with pytest.raises(ShapeError, match="one must be the other transposed"):
        Problem(MatrixSpec((4, 5)), MatrixSpec((5, 6)), symmetric=True)


def test_plans_of_shapes_and_arrays():
    spec = MatrixSpec((40_000, 40_000))
    cluster = ClusterSpec.homogeneous(H200, 8)
    for trans in ({"trans_a": True}, {"trans_b": True}):
        assert multimm.plan(spec, spec, cluster=cluster, **trans).layout.mirrors
    assert not multimm.plan(spec, spec, cluster=cluster).layout.mirrors
    assert not multimm.plan(
        spec, MatrixSpec((40_000, 40_000)), trans_a=True, cluster=cluster
    ).layout.mirrors
    x = da.ones((40_000, 40_000), chunks=8192, dtype="f4")
    assert multimm.plan(x.T, x, cluster=cluster).layout.mirrors


# Streams, packs, workers -----------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("p_k", [1, 2])
def test_a_streamed_operand_is_read_in_time_and_no_earlier(tmp_path, workers, p_k):
    x = integers((600, 2000))
    np.save(tmp_path / "x.npy", x)
    a = open_array(tmp_path / "x.npy")
    problem = symmetric_problem(600, 2000, rereadable=(True, True))
    plan = plan_matmul(
        problem, cpus(workers, 2_000_000), options=Options(blocks=50, slabs=50, p_k=p_k)
    )
    layout = plan.layout
    assert layout.stream
    assert layout.mirrors
    c = product_of(a, plan)
    made = block_tasks(c)
    assert len(made) == plan.tasks
    steps = layout.steps
    reads = {key: task for key, task in made.items() if task.func is multiply.read}
    for task in reads.values():
        row_panel, step = task.place.order[:2]
        for barrier in task.dependencies:
            at = made[barrier].place
            assert at.order[0] * steps + at.order[1] == row_panel * steps + step - 2
            ranks = {
                layout.grid.rank(made[name].place.owner) for name in made[barrier].dependencies
            }
            assert ranks == {layout.grid.rank(at.owner)}
    np.testing.assert_array_equal(c.compute(scheduler="sync"), x @ x.T)


def test_a_transposed_file_is_still_read_in_the_product_s_own_blocks(tmp_path):
    x = integers((60, 50))
    np.save(tmp_path / "x.npy", x)
    a = open_array(tmp_path / "x.npy", chunks=7)
    c = multimm.matmul(a.T, a, blocks=20, slabs=30)
    assert all(isinstance(task, BlockTask) for task in dict(c.dask).values())
    assert {task.label.matrix for task in block_tasks(c).values()} == {"A", "C"}
    np.testing.assert_array_equal(c.compute(scheduler="sync"), x.T @ x)


def test_a_block_is_packed_once_for_both_sides():
    a = da.ones((4096, 512), chunks=(1024, 256), dtype="f4")
    problem = symmetric_problem(4096, 512, pack="float32")
    cluster = ClusterSpec.homogeneous(H200, 2)
    plan = plan_matmul(problem, cluster, options=Options(blocks=1024, slabs=256))
    assert plan.layout.operands.packed
    c = product_of(a, plan)
    made = block_tasks(c)
    assert len(made) == plan.tasks
    assert kinds(made)[Kind.PACK] == 4 * 2
    np.testing.assert_array_equal(c.compute(scheduler="sync"), np.full((4096, 4096), 512.0))


def test_a_packed_left_factor_is_the_right_one_turned(monkeypatch):
    """The tiles of both sides are the same; only the block's shape is another."""
    from dataclasses import dataclass

    @dataclass(frozen=True)
    class Packed:
        side: str
        tiles: str
        raw: np.ndarray | None = None

    seen = []
    monkeypatch.setattr(symmetric, "is_packed", lambda block: isinstance(block, Packed))
    monkeypatch.setattr(symmetric, "link", lambda a, b, p=None, *, step: seen.append((a, b)))
    raw = integers((3, 5))
    symmetric.link_symmetric(Packed("a", "x"), Packed("a", "y"), step=SYMMETRIC)
    symmetric.link_symmetric(Packed("a", "x"), Packed("a", "y", raw), step=SYMMETRIC)
    assert seen[0] == (Packed("a", "x"), Packed("b", "y"))
    assert seen[1][1].raw.shape == (5, 3)


@pytest.mark.parametrize(("workers", "block", "free"), [(4, 64, False), (3, 256, True)])
def test_on_workers_blocks_lie_as_planned_and_move_as_counted(workers, block, free):
    from distributed import wait

    from multimm.cluster.plugins.transfer_counter import received_bytes, reset_received_bytes

    with multimm.cluster.start(workers=workers, memory_limit="1GB") as client:
        a = da.random.default_rng(3).standard_normal((1024, 768), chunks=(block, 128), dtype="f4")
        plan = multimm.plan(a, a, trans_b=True, blocks=block, slabs=128)
        assert plan.layout.mirrors
        assert plan.layout.work.assignment.free == free
        reset_received_bytes(client)
        c = multimm.matmul(a, a.T, blocks=block, slabs=128).persist()
        wait(c)
        assert 0 < sum(received_bytes(client).values()) <= 1.05 * plan.bytes_received
        held = {str(key): tuple(at) for key, at in client.who_has(c).items()}
        ranks = sorted(listed(client))
        for i, j in plan.layout.pairs:
            owner = ranks[plan.grid.rank(plan.layout.worker(i, j, 0))]
            assert owner in held[str((c.name, i, j))]
            assert owner in held[str((c.name, j, i))]
        x = a.compute()
        result = c.compute()
        assert np.abs(result - x @ x.T).max() < 1e-3
        np.testing.assert_array_equal(result, result.T)
        assert multimm.verify(a, a.T, c)
