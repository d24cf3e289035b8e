"""The triple loop with Numba on the CPU."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

Array = Any


@numba.njit  # type: ignore[untyped-decorator]
def compiled(a: Array, b: Array) -> Array:
    """Multiply with one core."""
    m, k = a.shape
    n = b.shape[1]
    result = np.empty((m, n), np.float32)
    for i in range(m):
        for j in range(n):
            total = np.float32(0)
            for p in range(k):
                total += a[i, p] * b[p, j]
            result[i, j] = total
    return result


@numba.njit(parallel=True)  # type: ignore[untyped-decorator]
def compiled_parallel(a: Array, b: Array) -> Array:
    """Multiply with all cores, a row of the result at a time."""
    m, k = a.shape
    n = b.shape[1]
    result = np.empty((m, n), np.float32)
    for i in numba.prange(m):
        for j in range(n):
            total = np.float32(0)
            for p in range(k):
                total += a[i, p] * b[p, j]
            result[i, j] = total
    return result
