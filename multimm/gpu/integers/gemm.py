"""Products of integers: exact, on whatever is fast for their numbers.

On GPUs with tensor cores integers that FP16 carries go there (`tensor_cores`), and large products
of others of 16 bits as bytes (`in_bytes`); all else is multiplied by the float products of NumPy or
CuPy in stretches (`float_blas`), in digits where they are too large (`digits`).
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np

from multimm.gpu.arrays import is_cupy
from multimm.gpu.integers import float_blas
from multimm.gpu.integers.bounds import FP16, is_integer, is_narrow, magnitude

Array = Any
DType = np.dtype[Any]

#: The precision of `multimm.gpu.emulated` whose one product of FP16 numbers integers use.
TENSOR_CORES = "tf32"
#: Instead of a format, of wide integers: float64, if need be in digits. As in
#: `multimm.planning.problem`.
DIGITS = "digits"


def takes(a: DType, b: DType, sums: DType) -> bool:
    """Whether it is a product of integers, or of bool: an OR is a sum that is not zero."""
    return is_integer(a) and is_integer(b) and sums.kind in "iufb"


def format_of(a: DType, b: DType, k: int, sums: DType, tensor_cores: bool) -> str:
    """The format that integers are multiplied in, as far as dtypes tell; empty for all else.

    >>> int8, int16, int64 = (np.dtype(name) for name in ("int8", "int16", "int64"))
    >>> format_of(int8, int8, 9000, int8, True), format_of(int8, int16, 9000, int8, False)
    ('tf32', 'float64')
    >>> format_of(int8, int64, 9000, int64, True)
    'digits'
    """
    if not takes(a, b, sums):
        return ""
    if not (is_narrow(a) and is_narrow(b)):
        return "" if sums.kind == "f" else DIGITS
    most = magnitude(a), magnitude(b)
    if tensor_cores and max(most) <= FP16 and sums.kind != "b":
        return TENSOR_CORES
    cut = float_blas.cut(*most, k)
    return "" if cut is None else cut.format


def product(
    xp: ModuleType,
    a: Array,
    b: Array,
    trans: tuple[bool, bool],
    shape: tuple[int, ...],
    sums: DType,
    *,
    partial: Array = None,
    final: DType | None = None,
    lower: bool = False,
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
        Of the result: integers, modulo 2^bits, floats, or bool.
    partial : array of `shape` and dtype `sums`, optional
    final : dtype, optional
        That the result is converted to next, if it is nothing else: it may be that already.
    lower : bool, optional
        What is above the diagonal is not asked for: it may be anything.
    """
    if xp is not np and sums.kind != "b":
        from multimm.gpu.integers import in_bytes, tensor_cores

        if tensor_cores.able(a, b):
            own: dict[str, Any] = {"partial": partial, "lower": lower}
            made = tensor_cores.product(a, b, trans, shape, sums, final=final, **own)
            if made is None:
                made = in_bytes.product(a, b, trans, shape, sums, **own)
            if made is not None:
                return made
    left = a.swapaxes(-1, -2) if trans[0] else a
    right = b.swapaxes(-1, -2) if trans[1] else b
    total = float_blas.product(xp, left, right, shape, sums)
    if partial is not None:
        total += partial.astype(sums, copy=False)
    return total


def leaves_out(a: Array, sums: DType) -> bool:
    """Whether a product of an array and its transpose is computed below the diagonal alone."""
    if not (is_cupy(a) and takes(a.dtype, a.dtype, sums)) or sums.kind == "b":
        return False
    from multimm.gpu.integers import tensor_cores

    return tensor_cores.able(a, a)
