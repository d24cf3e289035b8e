"""Matrices of small integers: in float32, every order of summation gives the same bits."""

from __future__ import annotations

import numpy as np


def integers(shape: int | tuple[int, ...], seed: int = 0, dtype: str = "float32") -> np.ndarray:
    """From -8 to 8; the same for the same seed and shape."""
    return np.random.default_rng(seed).integers(-8, 9, shape).astype(dtype)
