"""The model of splitting and of the split product: exact where it must be, else within bounds."""

from __future__ import annotations

import re

import numpy as np
import pytest
import wgmma_model as model
from hypothesis import example, given
from hypothesis import strategies as st
from pack_reference import (
    BROAD_SHIFT,
    LEAST_BROAD,
    broad_parts,
    split,
)
from wgmma_model import broad_model, wgmma_model

from multimm.gpu.emulated.configs import SLAB, SPLIT_REGISTRY
from multimm.gpu.runtime.kernel_source import kernel_text
from multimm_benchmarks.distributions import DISTRIBUTIONS, draw

U = 2.0**-24


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=8))
@example([4194305, 234881024])
def test_any_bits_are_carried_or_listed(bits):
    x = np.array([bits], np.uint32).view(np.float32)
    s = split(x)
    finite = np.isfinite(x)
    largest = np.abs(np.where(finite, x, 0)).max()
    y = np.ldexp(np.where(finite, x, 0).astype(np.float64), -int(s.exponents[0]))
    if largest > 0:
        assert 2.0**14 <= np.abs(y).max() < 2.0**15
    else:
        assert s.exponents[0] == 0
    np.testing.assert_array_equal(s.rest != 0, finite & (x != 0) & (np.abs(y) < 2.0**-14))
    error = np.abs(s.high.astype(float) + s.low.astype(float) / 2**11 - y)[s.rest == 0]
    y = np.abs(y[s.rest == 0])
    # Of the smallest that are carried the low part may be subnormal: see common/split.cuh.
    assert (error <= np.where(y < 2.0**-13, 2.0**-22, 2.0**-23) * y).all()


def operands(kind: str, m: int, n: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    """A, m x k, and B, n x k, of a distribution that accuracy is measured on."""
    a, b = draw(np, kind, m, n, k)
    return a, np.ascontiguousarray(b.T)


def fma_chain(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a @ b.T as FP32 multiply-adds compute it, one k after the other."""
    total = np.zeros((len(a), len(b)), np.float32)
    for x, y in zip(a.T.astype(np.float64), b.T.astype(np.float64), strict=True):
        total = (np.multiply.outer(x, y) + total).astype(np.float32)
    return total


def errors(result: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """In units of 2^-24 |A||B|, less what the smallest numbers cost anyone."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    error = np.abs(result - a @ b.T) - a.shape[1] * 2.0**-149
    sizes = np.abs(a) @ np.abs(b).T
    return np.divide(error, sizes * U, out=np.zeros_like(error), where=error > 0)


@pytest.mark.parametrize("kind", sorted(DISTRIBUTIONS.keys() - {"exponents 2^40"}))
@pytest.mark.parametrize("k", [256, 300, 4096])
def test_float32_keeps_its_promise(kind, k):
    a, b = operands(kind, 12, 10, k)
    chain = errors(fma_chain(a, b), a, b)
    found = errors(wgmma_model(a, b), a, b)
    assert found.max() <= 24
    # Where most elements are listed apart, most is summed in float32 as by the chain.
    factor = 1.25 if kind in ("graded columns 10^6", "graded columns 10^8") else 1
    assert np.sqrt(np.mean(found**2)) <= factor * np.sqrt(np.mean(chain**2)) + 1e-3


@pytest.mark.parametrize("kind", DISTRIBUTIONS)
@pytest.mark.parametrize("k", [256, 1100])
def test_parts_of_a_wide_range_keep_the_promise(kind, k):
    """Nearer than a chain of multiply-adds, also where most is one product of thousands."""
    a, b = operands(kind, 12, 10, k)
    chain, found = errors(fma_chain(a, b), a, b), errors(broad_model(a, b), a, b)
    assert found.max() <= 24
    assert np.sqrt(np.mean(found**2)) <= np.sqrt(np.mean(chain**2)) + 1e-3
    assert errors(broad_model(a, b, 1), a, b).max() <= (2.0**-9 + 2 * k * U) / U


@pytest.mark.parametrize("k", [256, 8192])
def test_parts_of_a_wide_range_keep_the_promise_of_constants(k):
    """All roundings of an element have one sign."""
    a, b = (
        np.repeat((1 + np.random.default_rng(i).random((20, 1))).astype("f4"), k, 1) for i in (1, 2)
    )
    assert errors(broad_model(a, b), a, b).max() <= 24
    assert errors(broad_model(a, b, 1), a, b).max() <= (2.0**-9 + 2 * k * U) / U / 2


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=8))
@example([0x00000001, 0x00800000])
@example([0x7F7FFFFF, 0x47000001, 0x3F7FFFFF])
def test_three_parts_are_the_number(bits):
    x = np.array([bits], np.uint32).view(np.float32)
    x = np.where(np.isfinite(x), x, np.float32(1))
    parts, exponents = broad_parts(x)
    y = np.ldexp(x.astype(np.float64), -int(exponents[0]))
    carried = abs(y) >= LEAST_BROAD
    assert abs(y).max() < 2.0**48
    np.testing.assert_array_equal(parts.astype(np.float64).sum(axis=0), np.where(carried, y, 0))
    assert not (parts.view(np.uint32) & 0xFFFF).any()
    assert ((parts == 0) | (abs(parts) >= 2.0**-126)).all(), "none is subnormal"
    assert (abs(parts[1]) <= 2.0**-8 * abs(parts[0])).all()
    (rounded,), _ = broad_parts(x, 1)
    assert (abs(rounded - y)[carried] <= 2.0**-11 * abs(y[carried])).all()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["normal", "uniform", "lognormal 2"])
def test_float32_keeps_its_promise_over_many_k(kind):
    a, b = operands(kind, 2, 2, 2**17)
    assert errors(wgmma_model(a, b), a, b).max() <= 24


@pytest.mark.parametrize("kind", DISTRIBUTIONS)
def test_tf32_keeps_its_promise(kind):
    for k in (17, 256, 4096):
        a, b = operands(kind, 8, 8, k)
        assert errors(wgmma_model(a, b, parts=1), a, b).max() <= 2.0**-9 / U + 2 * k


@pytest.mark.parametrize("parts", [1, 2])
def test_the_ends_of_float32_are_reached_without_infinities(parts):
    """Where no sum comes near them, whatever the scales are, and whichever elements are listed."""
    largest, k, listed = np.finfo("f4").max, 64, 0
    bound = 2.0**-9 + 2 * k * U if parts == 1 else (k + 2) * U
    rng = np.random.default_rng(parts)
    for _ in range(300):
        a, b = (at_the_ends(rng, 3, k) for _ in "ab")
        listed += np.count_nonzero(split(a, parts).rest)
        exact = np.abs(a.astype(float)) @ np.abs(b.T.astype(float))
        far = exact * (1 + bound) < largest
        with np.errstate(over="ignore", invalid="ignore"):
            found = wgmma_model(a, b, parts=parts)
        assert np.isfinite(found[far]).all()
        assert (errors(np.where(far, found, 0), a, b)[far] <= bound / U).all()
    assert listed > 1000


def at_the_ends(rng: np.random.Generator, rows: int, k: int) -> np.ndarray:
    """Rows of any scale, most of them extreme, of elements of like size or not."""
    top = rng.choice([-149, -140, -126, -64, 0, 64, 126, 127], (rows, 1))
    x = np.ldexp(1 + rng.random((rows, k)), top - rng.integers(0, rng.choice([1, 29, 200]), k))
    x *= rng.choice([-1, 0, 1], x.shape)
    x[rng.integers(rows), rng.integers(k)] = rng.choice([0, 2.0**128])
    largest = np.finfo("f4").max
    return np.clip(x, -largest, largest).astype("f4")


def test_the_kernel_has_the_models_constants():
    text = kernel_text("sgemm_split.cu", SPLIT_REGISTRY[0].config.defines())
    found = dict(re.findall(r"(\w+) = (\d+)[,;]", text))
    for name in ("FOLD", "FLUSH", "PROMOTE"):
        assert int(found[name]) * SLAB == getattr(model, name), name


def test_the_kernels_of_a_wide_range_have_the_models_constants():
    text = kernel_text("broad_pack.cu", {"PARTS": 3, "CAP": 1})
    assert f"BROAD_SHIFT = {BROAD_SHIFT};" in text
    assert f"LEAST_BROAD = 1.0f / (1ull << {-int(np.log2(LEAST_BROAD))});" in text


@pytest.mark.parametrize("k", [256, 2048, 6144])
def test_one_product_of_half_precision_keeps_the_promise_of_float32(k):
    """Its operands are exact; sums of one sign are the worst, a sixth of the bound off."""
    rng = np.random.default_rng(k)
    level = np.repeat(1 + rng.random((8, 1)), k, 1)
    for x in (rng.standard_normal((8, k)), rng.random((8, k)), level):
        a, b = (v.astype(np.float16).astype(np.float32) for v in (x, x[::-1]))
        terms = abs(a).astype(float) @ abs(b).astype(float).T
        off = abs(wgmma_model(a, b, parts=1) - a.astype(float) @ b.astype(float).T) / terms / U
        assert off.max() <= (k + 2) / 4
    assert off.max() > 10  # of what is level
