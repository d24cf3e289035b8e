"""Products of integers: exact, on whatever is fast for their numbers.

On GPUs with tensor cores integers that FP16 carries go there (`tensor_cores`); all others are
multiplied by the float products of NumPy or CuPy in stretches (`float_blas`).
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np

from multimm.gpu.integers import float_blas
from multimm.gpu.integers.bounds import is_integer

Array = Any
DType = np.dtype[Any]


def takes(a: DType, b: DType, sums: DType) -> bool:
    """Whether it is a product of integers that are added: of bool as bool they are not."""
    return is_integer(a) and is_integer(b) and sums.kind in "iuf"


def product(
    xp: ModuleType,
    a: Array,
    b: Array,
    trans: tuple[bool, bool],
    shape: tuple[int, ...],
    sums: DType,
    *,
    partial: Array = None,
) -> Array:
    """op(A) op(B) + P, as an array that nobody else holds.

    Parameters
    ----------
    xp : module
        NumPy or CuPy.
    a, b : array of integers or bool
        Never changed; not empty.
    trans : (bool, bool)
        Whether they are stored transposed.
    shape : tuple of int
        Of the result; not empty.
    sums : dtype
        Of the result: integers, modulo 2^bits, or floats.
    partial : array of `shape` and dtype `sums`, optional
    """
    left = a.swapaxes(-1, -2) if trans[0] else a
    right = b.swapaxes(-1, -2) if trans[1] else b
    total = float_blas.product(xp, left, right, shape, sums)
    if partial is not None:
        total += partial.astype(sums, copy=False)
    return total
