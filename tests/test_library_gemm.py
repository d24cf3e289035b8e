"""The NumPy verbs against plain NumPy expressions."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from multimm.errors import ArrayTypeError, ShapeError
from multimm.gpu import library_gemm

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
NUMBERS = [np.dtype(c) for c in "?bBhHiIlLefdgFDG"]
ALLOWED = [*NUMBERS, BFLOAT16]


def values(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Small integers, complex where the dtype is: exact in every dtype, in any order of sums."""
    if dtype.kind == "b":
        return rng.integers(0, 2, shape).astype(bool)
    low = 0 if dtype.kind == "u" else -2
    x = rng.integers(low, 3, shape)
    return (x + 1j * rng.integers(low, 3, shape) if dtype.kind == "c" else x).astype(dtype)


sizes = st.integers(0, 6)
dtypes = st.sampled_from(ALLOWED)
stacks = st.sampled_from([((), ()), ((3,), ()), ((2, 1), (3,)), ((0,), (1,)), ((2, 3), (2, 3))])


@given(dtypes, dtypes, sizes, sizes, sizes, stacks, st.booleans(), st.booleans(), st.booleans())
def test_gemm_is_matmul(left, right, m, n, k, batch, trans_a, trans_b, fortran):
    rng = np.random.default_rng(3)
    a = values(rng, (*batch[0], *((k, m) if trans_a else (m, k))), left)
    b = values(rng, (*batch[1], *((n, k) if trans_b else (k, n))), right)
    if fortran:
        a, b = np.asfortranarray(a), np.asfortranarray(b)
    before = a.copy(), b.copy()
    result = library_gemm.gemm(a, b, trans_a=trans_a, trans_b=trans_b)
    expected = np.matmul(a.swapaxes(-1, -2) if trans_a else a, b.swapaxes(-1, -2) if trans_b else b)
    assert result.dtype == expected.dtype == library_gemm.result_dtype(left, right)
    np.testing.assert_array_equal(result, expected, strict=True)
    assert result.flags.c_contiguous
    assert not any(np.shares_memory(result, x) for x in (a, b))
    np.testing.assert_array_equal(a, before[0])
    np.testing.assert_array_equal(b, before[1])


@given(
    st.sampled_from([np.dtype(c) for c in "bifdD"]), sizes, sizes, sizes, st.booleans(),
    st.booleans(), st.sampled_from([0, 1, -2, 3]), st.sampled_from([0, 1, 2]),
)  # fmt: skip
def test_gemm_formula(dtype, m, n, k, with_c, with_partial, alpha, beta):
    rng = np.random.default_rng(5)
    a, b = values(rng, (m, k), dtype), values(rng, (k, n), dtype)
    c = values(rng, (m, n), dtype) if with_c else None
    partial = values(rng, (m, n), dtype) if with_partial else None
    kept = [None if x is None else x.copy() for x in (c, partial)]
    result = library_gemm.gemm(a, b, alpha=alpha, beta=beta, c=c, partial=partial)
    expected = alpha * (a @ b + (0 if partial is None else partial))
    expected = expected + (0 if c is None else beta * c)
    np.testing.assert_array_equal(result, expected)
    assert result.dtype == dtype
    for x, copy in zip((c, partial), kept, strict=True):
        if x is not None:
            np.testing.assert_array_equal(x, copy)
            assert not np.shares_memory(result, x)


def test_what_is_multiplied_by_zero_is_never_read():
    nan, ones = np.full((3, 3), np.nan), np.ones((3, 3))
    np.testing.assert_array_equal(library_gemm.gemm(ones, ones, beta=0, c=nan), ones @ ones)
    result = library_gemm.gemm(nan, nan, alpha=0, beta=2, c=ones, partial=nan)
    np.testing.assert_array_equal(result, 2 * ones)
    np.testing.assert_array_equal(library_gemm.gemm(nan, nan, alpha=0), np.zeros((3, 3)))
    np.testing.assert_array_equal(library_gemm.add_partials([nan], alpha=0), np.zeros((3, 3)))
    np.testing.assert_array_equal(library_gemm.add_partials([ones, ones], c=nan), 2 * ones)


def test_booleans_are_or_of_ands():
    a = np.array([[True, True], [False, False]])
    b = np.array([[True, False], [True, False]])
    np.testing.assert_array_equal(library_gemm.gemm(a, b), [[True, False], [False, False]])
    c = np.array([[True, False], [False, True]])
    for result in (library_gemm.gemm(a, b, beta=1, c=c), library_gemm.gemm(a, b, partial=c)):
        np.testing.assert_array_equal(result, [[True, False], [False, True]], strict=True)


def test_accumulate_holds_sum_and_partial():
    a = np.full((1, 1), 2.0**12, np.float32)
    partial = np.full((1, 1), 1.0, np.float64)
    wide = library_gemm.gemm(a, a, partial=partial, accumulate=np.float64, dtype=np.float64)
    assert wide[0, 0] == 2.0**24 + 1
    assert library_gemm.gemm(a, a, partial=partial, dtype=np.float64)[0, 0] == 2.0**24


@given(st.integers(1, 9), st.sampled_from([0, 1, 2]), st.sampled_from([0, 1, -1]), st.booleans())
def test_add_partials_is_a_sum(count, alpha, beta, with_c):
    rng = np.random.default_rng(count)
    parts = [values(rng, (3, 2), np.dtype(np.float32)) for _ in range(count)]
    c = values(rng, (3, 2), np.dtype(np.float32)) if with_c else None
    kept = [part.copy() for part in parts]
    result = library_gemm.add_partials(parts, alpha=alpha, beta=beta, c=c)
    expected = alpha * np.sum(parts, axis=0) + (beta * c if with_c else 0)
    np.testing.assert_array_equal(result, expected)
    np.testing.assert_array_equal(parts, kept)
    assert not any(np.shares_memory(result, part) for part in parts)


def test_add_partials_is_a_fixed_tree():
    tiny, one = np.float32(2.0**-24), np.float32(1)
    parts = [np.full((1, 1), x, np.float32) for x in (one, tiny, tiny, tiny, tiny)]
    # (1 + tiny) ties to 1; (tiny + tiny) survives its addition; the last tiny ties away again.
    one_ulp = np.float32(1 + 2.0**-23)
    assert library_gemm.add_partials(parts)[0, 0] == (one + tiny + (tiny + tiny)) + tiny
    assert library_gemm.add_partials(parts[:4])[0, 0] == one_ulp
    assert parts[0] + parts[1] + parts[2] + parts[3] == one  # one after the other loses all


@given(st.sampled_from([(0, 3), (1, 4), (4, 1), (2, 3), (5, 2, 3), (2, 0, 3)]), st.booleans())
def test_transpose_is_a_contiguous_copy(shape, fortran):
    a = np.arange(np.prod(shape)).reshape(shape)
    a = np.asfortranarray(a) if fortran else a
    result = library_gemm.transpose(a)
    np.testing.assert_array_equal(result, a.swapaxes(-1, -2), strict=True)
    assert result.flags.c_contiguous
    assert not np.shares_memory(result, a)


def test_foreign_byte_order_gives_native_results():
    a = np.arange(6, dtype=">f4").reshape(2, 3)
    assert library_gemm.result_dtype(a.dtype, a.dtype) == np.float32
    np.testing.assert_array_equal(library_gemm.gemm(a, a, trans_b=True), a @ a.T)


def test_operands_that_do_not_fit():
    ones = np.ones((2, 3))
    for error, sentence, call in (
        (ShapeError, "3 columns of a must equal the 2 rows", lambda: library_gemm.gemm(ones, ones)),
        (ShapeError, r"2 columns of op\(a\) must equal the 3", lambda: library_gemm.gemm(
            ones, ones.T, trans_a=True)),
        (ShapeError, "matrix or a stack", lambda: library_gemm.gemm(ones[0], ones.T)),
        (ShapeError, r"c has shape \(2, 1\)", lambda: library_gemm.gemm(
            ones, ones.T, beta=1, c=ones[:, :1])),
        (ShapeError, r"partial has shape \(4, 2, 2\)", lambda: library_gemm.gemm(
            ones, ones.T, partial=np.ones((4, 2, 2)))),
        (ShapeError, "matrix or a stack", lambda: library_gemm.transpose(ones[0])),
        (ArrayTypeError, "a is a builtins.list", lambda: library_gemm.gemm([[1]], ones)),
        (ArrayTypeError, "MaskedArray", lambda: library_gemm.gemm(ones, np.ma.ones((3, 2)))),
    ):  # fmt: skip
        with pytest.raises(error, match=sentence):
            call()
