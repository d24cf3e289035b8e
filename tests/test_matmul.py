from __future__ import annotations

import dask.array as da
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from repeated import others_slow
from small import same_bits

import multimm
from multimm.errors import ShapeError

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = [
    *map(np.dtype, ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32")),
    *map(np.dtype, ("uint64", "float16", "float32", "float64", "complex64", "complex128")),
    BFLOAT16,
]
U32 = 2.0**-24


def integers(rng, shape, dtype):
    """Small integers: sums of products are exact in every dtype and every order."""
    dtype = np.dtype(dtype)
    low = 0 if dtype.kind in "ub" else -2
    return rng.integers(low, 3 if dtype.kind != "b" else 2, shape).astype(dtype)


def chunked(array, rng):
    """The array in random chunks, equal or ragged, now and then as a lazy slice or transpose."""
    chunks = []
    for size in array.shape:
        cuts = np.sort(rng.integers(0, size + 1, rng.integers(0, 4)))
        edges = np.unique(np.concatenate([[0], cuts, [size]]))
        chunks.append(tuple(int(c) for c in np.diff(edges)) or (0,))
    way = rng.integers(4) if array.ndim >= 2 else 0
    if way == 1:
        flipped = da.from_array(array.swapaxes(-1, -2), (*chunks[:-2], chunks[-1], chunks[-2]))
        return da.swapaxes(flipped, -1, -2)
    if way == 2:
        padded = np.pad(array, [(0, 0)] * (array.ndim - 1) + [(1, 2)])
        return da.from_array(padded, 3)[..., 1:-2]
    return da.from_array(array, tuple(chunks))


def within_contract(result, a, b, terms=None):
    """|C - exact| <= (k + 6) u |A||B| + one rounding, per element; False for NaN."""
    exact = a.astype(np.float64) @ b.astype(np.float64)
    sizes = np.abs(a).astype(np.float64) @ np.abs(b).astype(np.float64)
    k = a.shape[-1]
    bound = (k + 6) * U32 * sizes + 3 * U32 * np.abs(exact) + (k + 1) * 2.0**-149
    return bool((np.abs(np.asarray(result).astype(np.float64) - exact) <= bound).all())


@st.composite
def shapes(draw):
    size = st.integers(0, 9)
    m, k, n = draw(size), draw(size), draw(size)
    batch = draw(st.lists(st.integers(1, 3), max_size=2))
    left = [draw(st.sampled_from([d, 1])) for d in batch][draw(st.integers(0, len(batch))) :]
    right = [draw(st.sampled_from([d, 1])) for d in batch][draw(st.integers(0, len(batch))) :]
    a = draw(st.sampled_from([(*left, m, k), (k,)]))
    b = draw(st.sampled_from([(*right, k, n), (k,)]))
    return a, b


@given(shapes(), st.sampled_from(DTYPES), st.integers(0, 2**32), st.sampled_from(["ab", "a", "b"]))
def test_numpy_semantics_on_any_shape_and_chunks(pair, dtype, seed, lazy):
    rng = np.random.default_rng(seed)
    a, b = (integers(rng, shape, dtype) for shape in pair)
    right = np.matmul(a, b)
    left, other = (
        chunked(x, rng) if name in lazy else x for name, x in zip("ab", (a, b), strict=True)
    )
    c = multimm.matmul(left, other)
    assert isinstance(c, da.Array)
    assert c.dtype == right.dtype
    assert c.shape == right.shape
    assert type(c._meta) is np.ndarray
    assert c._meta.dtype == right.dtype
    assert c._meta.ndim == right.ndim
    same_bits(c.compute(scheduler="sync"), right)
    same_bits(multimm.matmul(a, b), right)


@given(
    st.tuples(*[st.integers(1, 40)] * 3),
    st.tuples(*[st.integers(1, 45)] * 4),
    st.integers(0, 2**32),
)
def test_random_float32_products_keep_the_contract(sizes, edges, seed):
    rng = np.random.default_rng(seed)
    m, k, n = sizes
    a, b = rng.normal(size=(m, k)).astype("f4"), rng.normal(size=(k, n)).astype("f4")
    left = da.from_array(a, (edges[0], edges[1]))
    right = da.from_array(b, (edges[2], edges[3]))
    c = multimm.matmul(left, right).compute(scheduler="sync")
    assert within_contract(c, a, b)
    c[0, 0] = np.nan
    assert not within_contract(c, a, b)


@pytest.mark.parametrize(
    "left",
    others_slow(DTYPES, *map(np.dtype, ("bool", "int8", "uint16", "int64", "f2", "f4", "D"))),
    ids=str,
)
def test_numpy_result_dtype_whatever_the_chunks(left):
    rng = np.random.default_rng(0)
    a = integers(rng, (4, 6), left)
    for right in DTYPES:
        b = integers(rng, (6, 5), right)
        try:
            both = np.matmul(a, b)
        except TypeError:
            with pytest.raises(multimm.errors.DTypeError):
                multimm.matmul(da.from_array(a), b)
            continue
        for chunks in (-1, 3):
            c = multimm.matmul(da.from_array(a, chunks), da.from_array(b, chunks))
            assert c.dtype == both.dtype, right
            same_bits(c.compute(scheduler="sync"), both)


@pytest.mark.parametrize("dtype", [np.dtype("float16"), BFLOAT16], ids=str)
def test_half_formats_are_summed_in_float32(dtype):
    """Sums in the half format stick where half a unit of the sum is rounded away."""
    a, b = np.ones((3, 4096), dtype), np.full((4096, 2), 0.5, dtype)
    out = np.matmul(a[:, :1], b[:1]).dtype
    stuck = dtype.type(0)
    for _ in range(4096):
        stuck = dtype.type(stuck + dtype.type(0.5))
    assert float(stuck) < 2048
    for k_tiles in (None, 1, 64):
        options = {} if k_tiles is None else {"slabs": k_tiles * 64}
        c = multimm.matmul(da.from_array(a, 300), da.from_array(b, 700), **options)
        same_bits(c.compute(scheduler="sync"), np.full((3, 2), 2048, out))
    same_bits(multimm.matmul(a, b), np.full((3, 2), 2048, out))


@pytest.mark.parametrize(
    ("shape_a", "shape_b"),
    [
        ((0, 4), (4, 3)),
        ((3, 0), (0, 4)),
        ((0,), (0, 3)),
        ((2, 3, 0), (0, 4)),
        ((0, 3, 4), (1, 4, 5)),
    ],
)
@pytest.mark.parametrize("options", [{}, {"blocks": 2}, {"slabs": 2}, {"p_k": 2}], ids=str)
def test_dimensions_of_size_zero(shape_a, shape_b, options):
    """Of stacks, and with options: else the sizes of any product may be 0."""
    a, b = np.ones(shape_a, "int32"), np.ones(shape_b, "int32")
    same_bits(multimm.matmul(a, b), a @ b)
    c = multimm.matmul(da.from_array(a, 2), da.from_array(b, 2), **options)
    same_bits(c.compute(scheduler="sync"), a @ b)


def test_stacks_of_as_many_dimensions_as_numpy_multiplies():
    """`numpy.broadcast_shapes` stops at 32."""
    a = np.arange(12.0).reshape((2, *[1] * 59, 3, 2))
    b = np.arange(6.0).reshape((3, *[1] * 57, 2, 1))
    same_bits(multimm.matmul(a, b), a @ b)
    c = multimm.matmul(da.from_array(a, -1), da.from_array(b, -1))
    same_bits(c.compute(scheduler="sync"), a @ b)


def test_numpy_and_lists_in_numpy_out():
    a, b = [[1, 2], [3, 4]], [[5, 6], [7, 8]]
    assert type(multimm.matmul(a, b)) is np.ndarray
    same_bits(multimm.matmul(a, b), np.matmul(a, b))
    same_bits(multimm.matmul(np.asarray(a), b), np.matmul(a, b))
    c = multimm.matmul(da.from_array(np.asarray(a), 1), b)
    assert isinstance(c, da.Array)
    same_bits(c.compute(), np.matmul(a, b))


@pytest.mark.parametrize("dtype", ["float32", "int16", "bool", "complex64"])
def test_two_vectors_of_numpy_make_a_scalar(dtype):
    x = np.ones(3, dtype)
    right = np.matmul(x, x)
    result = multimm.matmul(x, x)
    assert type(result) is type(right)
    assert result == right
    assert type(multimm.matmul([1.0, 2.0], [3.0, 4.0])) is np.float64
    lazy = multimm.matmul(da.from_array(x, 2), x)
    assert isinstance(lazy, da.Array)
    assert lazy.ndim == 0
    plain = da.matmul(da.from_array(x, 2), x).compute()
    assert type(lazy.compute()) is type(plain)  # an array of 0 dimensions
    assert lazy.compute() == right
    assert type(multimm.matmul(x[None], x)) is np.ndarray


def test_chunks_of_the_operands_do_not_change_the_bits_of_a_fixed_plan():
    rng = np.random.default_rng(8)
    a, b = rng.normal(size=(64, 100)).astype("f4"), rng.normal(size=(100, 64)).astype("f4")
    options = {"blocks": (16, 32), "slabs": 20, "p_k": 1}
    results = [
        multimm.matmul(da.from_array(a, left), da.from_array(b, right), **options).compute()
        for left, right in [(64, 64), (7, 11), ((16, 20), (20, 32))]
    ]
    same_bits(results[0], results[1])
    same_bits(results[0], results[2])


def test_vectors_are_planned_as_they_are_multiplied():
    x, v = da.ones((4000, 300), chunks=(1000, 300)), np.ones(300)
    column, row = multimm.plan(x, v), multimm.plan(np.ones(4000), x)
    assert (column.m, column.k, column.n) == (4000, 300, 1)
    assert (row.m, row.k, row.n) == (1, 4000, 300)
    assert multimm.plan(v, v).flops == 600
    with pytest.raises(ShapeError, match="operands need at least 1 dimension"):
        multimm.plan(x, np.float64(3))
    with pytest.raises(ShapeError, match="use matmul"):  # gemm takes none
        multimm.plan(x, v, trans_b=True)
