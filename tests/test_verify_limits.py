"""`verify` certifies nothing that it can't see; what NumPy does at the ends of a dtype is right."""

from __future__ import annotations

import warnings

import dask
import dask.array as da
import numpy as np
import pytest
from small import integers

import multimm
from multimm import verify
from multimm.errors import IntegerOverflowWarning


@pytest.fixture(params=["numpy", "threads"])
def held(request):
    """What arrays are given as."""
    with dask.config.set(scheduler="threads"):
        yield (lambda x: x) if request.param == "numpy" else (lambda x: da.from_array(x, chunks=16))


# Nothing to see -----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "complex64"])
@pytest.mark.parametrize("where", ["a", "b", "c0"])
def test_a_product_without_a_finite_element_does_not_pass(held, dtype, where):
    given = {name: np.ones((40, 40), dtype) for name in ("a", "b", "c0")}
    if where == "a":
        given["a"][:, 3] = np.nan
    elif where == "b":
        given["b"][7] = np.inf
    else:
        given["c0"][:] = np.nan
    with np.errstate(all="ignore"):
        c = given["a"] @ given["b"] + given["c0"]
    assert not np.isfinite(c).any()
    a, b, c0 = map(held, given.values())
    result = verify(a, b, held(c), beta=1, c0=c0)
    assert not result
    assert "nothing could be checked" in str(result)
    assert "WRONG" not in str(result)
    assert "verified (" not in str(result)
    assert result.unchecked
    assert "\n" not in str(result)


def test_how_much_non_finite_operands_hide_is_said(held):
    a, b = integers((60, 40), 1, "f8"), integers((40, 50), 2, "f8")
    a[[3, 17, 41], 5] = np.nan
    b[7, [0, 9]] = np.inf
    with np.errstate(all="ignore"):
        c = a @ b
    result = verify(held(a), held(b), held(c))
    assert result
    assert "3 rows and 2 columns could not be checked" in str(result)
    c[20, 20] += 1
    assert "WRONG" in str(verify(held(a), held(b), held(c)))
    assert "could not be checked" not in str(verify(np.eye(3), np.eye(3), np.eye(3)))


def test_detects_promises_nothing_of_rows_that_nobody_looks_at(held):
    rng = np.random.default_rng(3)
    a, b = rng.normal(size=(64, 32)).astype("f2"), rng.normal(size=(32, 40)).astype("f2")
    b[:, 0] = 60000  # an infinity in nearly every row
    with np.errstate(all="ignore"):
        c = a @ b
    rows = np.isinf(c).any(axis=1).sum()
    assert rows > 32
    result = verify(held(a), held(b), held(c))
    assert result
    assert result.unchecked >= (rows - 16) * 40
    assert result.detects == np.inf
    assert "would not show" in str(result)
    few = verify(a[:8], b, c[:8])
    assert few.unchecked == 0
    assert few.detects < np.inf
    spoilt = c[:8].copy()
    spoilt[2, 5] += np.float16(2 * few.detects + 1)
    assert not verify(a[:8], b, spoilt)


# Sums at the end of a format -----------------------------------------------------------


def near_the_end(seed, dtype):
    """Operands whose sums may or may not overflow, and come back or not."""
    rng, top = np.random.default_rng(seed), float(np.finfo(dtype).max)
    m, k, n = rng.integers(1, 40, 3)
    size = np.sqrt(top / max(1, k) ** rng.uniform(0, 1)) * rng.uniform(0.3, 3)
    return (rng.normal(size=shape) * size for shape in ((m, k), (k, n)))


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "complex64"])
@pytest.mark.filterwarnings("ignore:overflow encountered", "ignore:invalid value encountered")
def test_sums_that_overflow_on_their_way_are_right_in_any_order(dtype):
    there = 0
    for seed in range(15):
        a, b = (x.astype(dtype) for x in near_the_end(seed, dtype))
        with np.errstate(all="ignore"):
            c = a @ b
            order = np.random.default_rng(seed).permutation(a.shape[1])
            others = [a[:, order] @ b[order], a[:, ::-1] @ b[::-1]]
            others.append(multimm.matmul(da.from_array(a, 7), da.from_array(b, 7)).compute())
        there += sum(not np.isfinite(x).all() for x in others)
        for product in (c, *others):
            result = verify(a, b, product)
            assert result or not np.isfinite(product).any(), f"{seed}: {result}"
            assert result.worst <= 1
    assert there


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.filterwarnings("ignore:overflow encountered", "ignore:invalid value encountered")
def test_finite_elements_beside_them_are_still_held_to_their_bounds(dtype):
    top, found = float(np.finfo(dtype).max), 0
    for seed in range(40):
        a, b = (x.astype(dtype) for x in near_the_end(seed, dtype))
        with np.errstate(all="ignore"):
            c = a @ b
        large = np.argwhere(np.isfinite(c) & (np.abs(c) > top / 1000))
        if len(large):
            at = tuple(large[len(large) // 2])
            c[at] = -c[at]
            result = verify(a, b, c)
            assert not result or result.unchecked, f"{seed}: {result}"
            found += not result
    assert found > 10


# Integers that wrap around ---------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "int32", "uint32", "int64", "uint64"])
def test_integers_that_wrapped_around_are_said_to_have(held, dtype):
    info = np.iinfo(dtype)
    rng = np.random.default_rng(1)
    small = [rng.integers(0, 2, shape).astype(dtype) for shape in ((40, 30), (30, 20))]
    result = verify(*map(held, (*small, small[0] @ small[1])))
    assert str(result).endswith("all integers agree")
    large = [x.copy() for x in small]
    large[0][5, :2], large[1][:2, 3] = info.max // 2, 4
    c = large[0] @ large[1]
    result = verify(*map(held, (*large, c)))
    assert result
    assert f"modulo 2^{info.bits}" in str(result)
    assert "1 rows" in str(result)
    assert "wrap around" in str(result)
    assert dtype in str(result)
    c[5, 3] += 1
    assert "WRONG" in str(verify(*map(held, (*large, c))))


# What the user has NumPy do on overflow ---------------------------------------------------

DATA = {
    "zeros": (np.zeros((5, 6)), np.zeros((6, 7))),
    "tiny": (np.full((5, 6), 1e-200), np.full((6, 7), 1e-50)),
    "a row of zeros": (np.vstack([np.zeros(6), np.ones(6)]), np.eye(6)),
    "subnormal": (np.full((5, 6), 1e-44, "f4"), np.ones((6, 7), "f4")),
    "huge": (np.full((5, 6), 1e150), np.full((6, 7), 1e150)),
    "halves": (np.full((5, 6), 1e-7, "f2"), np.ones((6, 7), "f2")),
    "complex": (np.full((5, 6), 1e-200j), np.full((6, 7), 1e-50)),
    "integers": (np.full((5, 6), 100, "i1"), np.full((6, 7), 100, "i1")),
}


@pytest.mark.parametrize("name", DATA)
@pytest.mark.parametrize("lazy", [False, True])
def test_errors_and_warnings_of_numpy_are_raised_where_numpy_raises_them(name, lazy):
    a, b = DATA[name]
    with np.errstate(all="raise"), warnings.catch_warnings(), dask.config.set(scheduler="sync"):
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", IntegerOverflowWarning)  # which is ours
        c = np.matmul(a, b)  # NumPy has nothing to raise here
        x, y = (da.from_array(x, chunks=3) for x in (a, b)) if lazy else (a, b)
        assert verify(x, y, c)
        assert not verify(x, y, c + c + c.dtype.type(1))
        product = multimm.matmul(x, y)
        np.testing.assert_array_equal(product.compute() if lazy else product, c)
        if c.dtype.kind == "f":
            multimm.plan(x, y, alpha=1e-300)
            multimm.plan(x, y, alpha=1e300)
