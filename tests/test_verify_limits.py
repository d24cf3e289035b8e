"""`verify` certifies nothing that it can't see; what NumPy does at the ends of a dtype is right."""

from __future__ import annotations

import itertools
import warnings

import dask
import dask.array as da
import numpy as np
import pytest
from repeated import others_slow
from small import integers

import multimm
from multimm import verify
from multimm.errors import DTypeError, IntegerOverflowWarning


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
    assert "a or b makes 3 rows and 2 columns non-finite" in str(result)
    assert "could be checked" not in str(result)
    c[20, 20] += 1
    assert "WRONG" in str(verify(held(a), held(b), held(c)))
    assert "non-finite" not in str(verify(np.eye(3), np.eye(3), np.eye(3)))
    a, b = np.ones((150, 40)), np.ones((40, 50))
    a[:, 5], a[0, 5] = np.inf, 1
    b[7, :3] = -np.inf
    with np.errstate(all="ignore"):
        c = a @ b
    said = str(verify(held(a), held(b), held(c)))
    assert "149 rows and 3 columns non-finite, of which 64 and 3 could be checked" in said


NOT_FINITE = (np.nan, np.inf, -np.inf)


@pytest.mark.parametrize(
    ("scale", "dtype"),
    others_slow(
        itertools.product([{}, {"alpha": -2, "beta": 0.5}], ["float16", "float64"]),
        *(({}, "float64"), ({"alpha": -2, "beta": 0.5}, "float16")),
    ),
)
def test_which_infinity_or_nan_is_checked(held, dtype, scale):
    """One element of another kind than IEEE arithmetic makes, beside those that are right."""
    for seed in range(2):
        rng = np.random.default_rng(seed)
        shapes = (30, 20), (20, 40), (30, 40)
        a, b, c0 = (rng.integers(-3, 4, shape).astype(dtype) for shape in shapes)
        a[rng.integers(30, size=3), 3] = rng.choice(NOT_FINITE, 3)
        b[4, rng.integers(40, size=3)] = rng.choice(NOT_FINITE, 3)
        if scale and seed % 2:
            c0[2, 2], c0[3, 3] = np.inf, -np.inf
        more = {**scale, "c0": held(c0)} if scale else {}
        with np.errstate(all="ignore"):
            c = scale.get("alpha", 1) * (a @ b) + scale.get("beta", 0) * (c0 if scale else 0)
            c = c.astype(dtype)
        a, b = held(a), held(b)
        assert verify(a, b, held(c), **more)
        place = tuple(rng.choice(np.argwhere(~np.isfinite(c))))
        for value in NOT_FINITE:
            wrong = c.copy()
            wrong[place] = value
            same = np.array_equal(wrong, c, equal_nan=True)
            result = verify(a, b, held(wrong), **more)
            assert bool(result) == same, f"{seed}: {place}: {result}"
            assert same or f"c[{place[0]}, {place[1]}]" in str(result)


def test_columns_of_a_stack_are_named_where_they_stand(held):
    a, b = np.ones((2, 30, 20)), np.ones((20, 40))
    b[3, 7] = np.inf
    c = a @ b
    assert verify(held(a), held(b), held(c))
    c[1, 5, 7] = np.nan
    assert "c[1, 5, 7] is wrong" in str(verify(held(a), held(b), held(c)))


def test_a_lone_infinity_among_rows_that_overflow(held):
    rng = np.random.default_rng(0)
    a, b = (rng.normal(size=shape).astype("f2") * 40 for shape in ((200, 64), (64, 30)))
    a[:150] *= 12
    with np.errstate(all="ignore"):
        c = (a.astype("f4") @ b.astype("f4")).astype("f2")
    assert np.isinf(c).any(axis=1).sum() > 64
    assert not np.isinf(c[170]).any()
    assert verify(held(a), held(b), held(c))
    c[170, 4] = np.inf
    assert "c[170, 4] is wrong" in str(verify(held(a), held(b), held(c)))


def test_detects_promises_nothing_of_rows_that_nobody_looks_at(held):
    rng = np.random.default_rng(3)
    a, b = rng.normal(size=(128, 32)).astype("f2"), rng.normal(size=(32, 40)).astype("f2")
    b[:, 0] = 60000  # an infinity in nearly every row
    with np.errstate(all="ignore"):
        c = a @ b
    rows = np.isinf(c).any(axis=1).sum()
    assert rows > 96
    result = verify(held(a), held(b), held(c))
    assert result
    assert result.unchecked >= (rows - 64) * 40
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


@pytest.mark.parametrize(
    "dtype", others_slow(["float16", "float32", "float64", "complex64"], "float64", "complex64")
)
@pytest.mark.filterwarnings("ignore:overflow encountered", "ignore:invalid value encountered")
def test_sums_that_overflow_on_their_way_are_right_in_any_order(dtype):
    there = 0
    for seed in range(8):
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


@pytest.mark.parametrize("dtype", others_slow(["float32", "float64"], "float32"))
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


def test_complex_elements_whose_absolute_values_overflow(held):
    """Their parts are finite: all is checked, and no infinity is said to be in C."""
    a, b = np.eye(30) * (1.5e308 + 1.5e308j), np.eye(30, dtype="c16")
    result = verify(held(a), held(b), held(a))
    assert result
    assert result.unchecked == 0
    assert "(largest element 1.8e+308)" in str(result)
    c = a.copy()
    c[7, 7] *= 1 - 1e-9
    assert "c[7, 7] is wrong" in str(verify(held(a), held(b), held(c)))


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "int32", "uint32", "int64", "uint64"])
def test_integers_that_wrapped_around_are_said_to_have(held, dtype):
    info = np.iinfo(dtype)
    rng = np.random.default_rng(1)
    small = [rng.integers(0, 2, shape).astype(dtype) for shape in ((40, 30), (30, 20))]
    result = verify(*map(held, (*small, small[0] @ small[1])))
    assert "all integers agree;" in str(result)
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


LONG = pytest.mark.skipif(np.finfo("g").max == np.finfo("d").max, reason="they are float64 here")


@pytest.mark.parametrize(
    ("dtype", "scale"),
    [
        *[(dtype, scale) for dtype in "dD" for scale in ("1e-150", "1e-155", "1e-160")],
        *[pytest.param(x, y, marks=LONG) for x in "gG" for y in ("1e-160", "1e-200", "1e-2000")],
    ],
)
def test_what_would_show_at_the_lower_end_of_float64_does(held, dtype, scale):
    """No right product is called wrong there, of long doubles below it either."""
    scale = np.dtype(dtype).type(scale).real
    a, b = integers((40, 30), 3, dtype) * scale, integers((30, 50), 4, dtype) * scale
    c = a @ b
    result = verify(held(a), held(b), held(c))
    assert result
    assert result.detects >= 5e-324
    c[3, 4] += c.dtype.type(result.detects) * 2
    assert not verify(held(a), held(b), held(c))


@LONG
@pytest.mark.parametrize("where", ["all", "a", "b", "c"])
@pytest.mark.parametrize("dtype", ["g", "G"])
def test_long_doubles_beyond_the_range_of_float64(held, where, dtype):
    """They were infinite for the check: it passed wrong ones, and called right ones wrong."""
    a, b = integers((40, 30), 3, dtype), integers((30, 50), 4, dtype)
    scale = {"a": np.longdouble("1e400"), "all": np.longdouble("1e200")}
    a, b = a * scale.get(where, 1), b * scale.get({"a": "", "b": "a"}.get(where, where), 1)
    c = a @ b
    if where == "c":
        c[3, 4] = scale["a"]
    with pytest.raises(DTypeError, match=r"float64, .* beyond its range: scale") as caught:
        verify(held(a), held(b), held(c))
    assert "\n" not in str(caught.value)
    c[:] = np.inf  # which float64 has
    assert not verify(held(np.ones_like(a)), held(np.ones_like(b)), held(c))


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
