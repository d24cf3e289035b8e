"""Symmetric products: one triangle computed, the other mirrored; graphs, and the diagonal."""

from __future__ import annotations

import dask
import dask.array as da
import numpy as np
import pytest
from commands import python
from hypothesis import given, settings
from hypothesis import strategies as st
from labels import block_tasks
from small import integers

import multimm
from multimm.errors import ShapeError
from multimm.graph.block_task import BlockTask
from multimm.graph.lowering import symmetric
from multimm.graph.tasks.multiply import Step
from multimm.io import open_array
from multimm.planning.problem import Problem
from multimm.planning.spec import MatrixSpec
from multimm.planning.tiling import triangle as sub_blocks
from multimm.planning.tiling.triangle import computed, triangle

# What is recognised ----------------------------------------------------------------------


X = da.from_array(integers((40, 30)), chunks=(9, 7), name="gram-x")
TWIN = da.from_array(integers((40, 30)), chunks=(9, 7), name="gram-twin")
STACK = da.from_array(integers((3, 20, 20)), chunks=(1, 8, 8), name="gram-stack")
SQUARE = da.from_array(integers((20, 20)), chunks=10, name="gram-square")


def of_blocks(function, axes):
    return da.blockwise(function, axes, SQUARE, "ij", dtype=SQUARE.dtype)


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
        (lambda: multimm.matmul(X.transpose(1, 0), X, blocks=10), True),
        (lambda: multimm.matmul(X, da.swapaxes(X, 0, 1), blocks=10), True),
        (lambda: multimm.matmul(X.T.T.T, X, blocks=10), True),
        (lambda: multimm.matmul(SQUARE.T, SQUARE, blocks=8), True),
        (lambda: multimm.matmul(SQUARE[::-1].T[:], SQUARE, blocks=8), False),
        (lambda: multimm.matmul(SQUARE.T.persist(scheduler="sync"), SQUARE, blocks=8), False),
        (lambda: multimm.matmul(dask.optimize(SQUARE.T)[0], SQUARE, blocks=8), False),
        (lambda: multimm.matmul(of_blocks(np.rot90, "ji"), SQUARE, blocks=8), False),
        (lambda: multimm.matmul(of_blocks(np.transpose, "ij"), SQUARE, blocks=8), False),
        (lambda: multimm.matmul(X.T, TWIN, blocks=10), False),
        (lambda: multimm.matmul(X.T + 0, X, blocks=10), False),
        (lambda: multimm.matmul(X.T, X + 0, blocks=10), False),
        (lambda: multimm.matmul(X[:30].T, X[10:], blocks=10), False),
        (lambda: multimm.matmul(X[:30], X[:30], blocks=10), False),
        (lambda: multimm.matmul(STACK, STACK, blocks=8), False),
        (lambda: multimm.matmul(X.T, X, blocks=(10, 15)), False),
        # Nothing is left out of one small block, but its operand is taken once.
        (lambda: multimm.matmul(X.T, X, blocks=30), True),
        (lambda: multimm.matmul(X.T, X), True),
    ],
)
def test_one_array_transposed_on_one_side_is_a_symmetric_product(call, expected):
    c = call()
    verbs = [t.kwargs.get("verb", t.func) for t in block_tasks(c).values()]
    mirrored = [verb for verb in verbs if verb is symmetric.link_diagonal]
    assert bool(mirrored) == expected


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


@pytest.mark.parametrize("step", [(2, 2), (1, 2), (-1, -1), (1, -1)])
def test_bits_of_blocks_that_lie_apart_in_memory_are_symmetric(step):
    """BLAS takes no such blocks: NumPy copies them, and each side by itself."""
    x = np.random.default_rng(1).standard_normal((1200, 1100))
    right = x[:: step[0], :: step[1]]
    rows, columns = right.shape
    a = da.from_array(x, chunks=x.shape).map_blocks(
        lambda block: block[:: step[0], :: step[1]], chunks=((rows,), (columns,)), dtype=x.dtype
    )
    c = multimm.matmul(a.T, a, blocks=columns).compute(scheduler="sync")
    np.testing.assert_array_equal(c, c.T)
    np.testing.assert_allclose(c, right.T @ right, atol=1e-9)


def test_blocks_of_the_result_are_in_c_order_and_of_their_own():
    a = da.from_array(integers((40, 40)), chunks=10)
    blocks = multimm.matmul(a, a.T, blocks=10).to_delayed().ravel()
    done = dask.compute(*blocks, scheduler="sync")
    assert all(block.flags.c_contiguous for block in done)
    assert not any(np.shares_memory(x, y) for n, x in enumerate(done) for y in done[:n])


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
from multimm.graph.lowering.symmetric import link_diagonal
from multimm.graph.tasks.multiply import Step, multiply
x = np.random.default_rng(5).standard_normal((500, 500), dtype="float32")
raw = np.empty(x.nbytes + 8, "u1")
start = -raw.ctypes.data % 4 + 1
moved = raw[start : start + x.nbytes].view("float32").reshape(x.shape)
moved[...] = x
assert x.flags.aligned and not moved.flags.aligned
step = Step("float32", "float32", trans_b=True)
known = Step("float32", "float32", trans_b=True, dtype_a=x.dtype)
for product in (lambda y: multiply(y, y, step=step),
                lambda y: link_diagonal(y, step=step, complete=True),
                lambda y: link_diagonal(y, step=known, complete=True)):
    print(np.array_equal(product(x), product(moved)))
"""


def test_bits_do_not_depend_on_where_memory_begins():
    """Blocks that come in messages begin anywhere; BLAS has another routine for X X^T of one X.

    OpenBLAS, that is, where it has one thread, as workers often do.
    """
    one_thread = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    done = python("-c", MOVED, env=one_thread)
    assert done.stdout.split() == ["True", "True", "True"]


# Plans -----------------------------------------------------------------------------------


def test_different_matrices_are_no_symmetric_product():
    with pytest.raises(ShapeError, match="one must be the other transposed"):
        Problem(MatrixSpec((4, 5)), MatrixSpec((5, 6)), symmetric=True)


# Streams, packs, workers -----------------------------------------------------------------


def test_a_transposed_file_is_still_read_in_the_product_s_own_blocks(tmp_path):
    x = integers((60, 50))
    np.save(tmp_path / "x.npy", x)
    a = open_array(tmp_path / "x.npy", chunks=7)
    c = multimm.matmul(a.T, a, blocks=20, slabs=30)
    assert all(isinstance(task, BlockTask) for task in dict(c.dask).values())
    assert {task.label.matrix for task in block_tasks(c).values()} == {"A", "C"}
    np.testing.assert_array_equal(c.compute(scheduler="sync"), x.T @ x)


@pytest.fixture
def small_sub_blocks(monkeypatch):
    """Sub-blocks of 4 and more rows, from even ones on."""
    least = dict.fromkeys(sub_blocks.LEAST_SUB_BLOCK, 4)
    for name, value in (("LEAST_SUB_BLOCK", least), ("LEAST_OTHER", 4), ("GRAIN", 2)):
        monkeypatch.setattr(sub_blocks, name, value)
    for known in (triangle, computed):
        known.cache_clear()
    yield
    for known in (triangle, computed):
        known.cache_clear()


# What is computed


@pytest.mark.parametrize(("dtype", "least"), [("float32", 256), ("float64", 1024)])
@pytest.mark.parametrize("size", [1, 300, 1000, 2047, 2048, 2049, 2736, 4001, 5000])
def test_all_below_the_diagonal_is_computed_once(size, dtype, least):
    times = np.zeros((size, size), np.int8)
    for rows, columns in triangle(size, dtype):
        assert rows.start % sub_blocks.GRAIN == columns.start % sub_blocks.GRAIN == 0
        assert min(rows.stop - rows.start, columns.stop - columns.start) >= min(size, least)
        times[rows, columns] += 1
    assert times.max() == 1
    assert np.tril(times).sum() == size * (size + 1) // 2
    assert times.sum() == computed(size, dtype)


# NumPy


@pytest.mark.parametrize("dtype", ["f4", "f8", "c8", "i8"])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("shape", [(3, 20), (9, 7), (40, 30), (2, 33, 5)])
def test_what_is_below_the_diagonal_is_the_product(small_sub_blocks, dtype, turned, shape):
    x, p = integers(shape, dtype=dtype), integers((*shape[:-1], shape[-2]), 1, dtype)
    step = Step(dtype, dtype, trans_a=turned, trans_b=not turned, alpha=3)
    stored = np.ascontiguousarray(x.swapaxes(-1, -2)) if turned else x
    for partial in (None, p):
        found = symmetric.link_diagonal(stored, partial, step=step)
        exact = 3 * (x @ x.swapaxes(-1, -2) + (0 if partial is None else p))
        np.testing.assert_array_equal(np.tril(found), np.tril(exact))
        assert found.dtype == dtype
    if shape[-2] > 9:
        assert found[..., 0, -1].ravel()[0] == 0  # not computed


@pytest.mark.parametrize("hermitian", [False, True])
@pytest.mark.parametrize("shape", [(0, 0), (1, 1), (5, 5), (2, 6, 6), (7, 7), (2, 3, 19, 19)])
def test_mirrored_tile_by_tile_as_at_once(monkeypatch, shape, hermitian):
    """On a CPU; what was above the diagonal does not count, and the sums are left alone."""
    monkeypatch.setattr(symmetric, "TILE", 6)
    sums = integers(shape, dtype="c16") + 1j * integers(shape, 1, "c16")
    step = Step("complex128", "complex128", trans_b=True, conj_b=hermitian)
    assert step.hermitian == hermitian
    before = sums.copy()
    turned = sums.swapaxes(-1, -2).conj() if hermitian else sums.swapaxes(-1, -2)
    expected = np.tril(sums) + np.triu(turned, 1)
    if hermitian:
        expected = expected - 1j * np.eye(shape[-1]) * expected.imag
    found = symmetric._mirrored(sums, step)
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(sums, before)
    assert found.flags.c_contiguous
    assert not np.shares_memory(found, sums)
