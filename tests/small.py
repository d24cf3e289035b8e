"""Matrices of integers, small ones whose sums are the same bits in any order, and comparisons."""

from __future__ import annotations

import numpy as np


def integers(shape: int | tuple[int, ...], seed: int = 0, dtype: str = "float32") -> np.ndarray:
    """From -8 to 8; the same for the same seed and shape."""
    return np.random.default_rng(seed).integers(-8, 9, shape).astype(dtype)


def gaussian(shape, seed=0, dtype="c8"):
    """Small Gaussian integers, of which sums are exact in any order; or their real parts."""
    rng = np.random.default_rng(seed)
    values = rng.integers(-4, 5, shape) + 1j * rng.integers(-4, 5, shape)
    return (values if np.dtype(dtype).kind == "c" else values.real).astype(dtype)


def numbers(shape, dtype, seed=0, most=None):
    """Booleans, or integers of all sizes that a narrow dtype holds, or of at most so much."""
    rng = np.random.default_rng(seed)
    if dtype == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
    if most is not None:
        low, high = max(low, -most), min(high, most)
    return rng.integers(low, high, shape, dtype, endpoint=True)


def op(x, trans, conj):
    """What a matrix of a product is multiplied as."""
    x = x.conj() if conj else x
    return x.swapaxes(-1, -2) if trans else x


def same_bits(result, right):
    """Of a NumPy or a Dask array: dtype, shape and all elements."""
    result, right = np.asarray(result), np.asarray(right)
    assert result.dtype == right.dtype
    assert result.shape == right.shape
    np.testing.assert_array_equal(result, right)
