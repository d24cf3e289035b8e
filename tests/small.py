"""Matrices of small integers: in float32, every order of summation gives the same bits."""

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


def same_bits(result, right):
    """Of a NumPy or a Dask array: dtype, shape and all elements."""
    result, right = np.asarray(result), np.asarray(right)
    assert result.dtype == right.dtype
    assert result.shape == right.shape
    np.testing.assert_array_equal(result, right)
