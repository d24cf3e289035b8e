"""How large sums of products of integers can be, and what holds them: plain arithmetic.

A floating-point sum of integers is exact as long as none of its partial sums leaves the integers
that the format holds without gaps: up to 2^24 for float32, 2^53 for float64.
"""

from __future__ import annotations

from typing import Any

import numpy as np

DType = np.dtype[Any]

#: The integer up to which a format holds all of them.
HELD = {"float32": 2**24, "float64": 2**53}
#: The same of the FP16 numbers that tensor cores multiply.
FP16 = 2**11
#: Bytes of an integer, at most, that counts as narrow: its products fit 32 bits.
NARROW_BYTES = 2


def is_integer(dtype: DType) -> bool:
    """Whether a dtype has integers, bool among them."""
    return dtype.kind in "iub"


def is_narrow(dtype: DType) -> bool:
    """Whether it is bool, or integers of at most 16 bits."""
    return is_integer(dtype) and dtype.itemsize <= NARROW_BYTES


def magnitude(dtype: DType) -> int:
    """The largest absolute value of an integer dtype.

    >>> [magnitude(np.dtype(name)) for name in ("bool", "int8", "uint8", "int16")]
    [1, 128, 255, 32768]
    """
    if dtype.kind == "b":
        return 1
    info = np.iinfo(dtype)
    return max(int(info.max), -int(info.min))


def terms(most_a: int, most_b: int, limit: int) -> int:
    """How many products of such factors can be added without leaving ``-limit ... limit``.

    >>> terms(128, 128, 2**24), terms(255, 255, 2**24), terms(0, 9, 2**24) > 2**60
    (1024, 258, True)
    """
    return limit // (most_a * most_b) if most_a and most_b else 2**62


def sums_fit(a: DType, b: DType, k: int, dtype: DType) -> bool:
    """Whether `dtype` holds every sum of k products of any elements of integer dtypes, exactly.

    >>> int8, int32 = np.dtype("int8"), np.dtype("int32")
    >>> sums_fit(int8, int8, 131071, int32), sums_fit(int8, int8, 131072, int32)
    (True, False)
    """
    most = k * magnitude(a) * magnitude(b)
    if dtype.kind in "iu":
        least = -most if "i" in (a.kind, b.kind) else 0
        info = np.iinfo(dtype)
        return bool(info.min <= least and most <= info.max)
    if dtype.kind == "b":
        return False
    precision = np.finfo(dtype).nmant + 1 if dtype.name != "bfloat16" else 8
    return most <= 1 << int(precision)


def sums_dtype(a: DType, b: DType, k: int, dtype: DType) -> DType:
    """What sums of products of narrow integers are kept in between tasks, for a result of `dtype`.

    Of integers, what they are: sums that leave it come back modulo 2^bits. Of floats and complex
    numbers a format that holds every sum exactly, and the result is rounded once: int32, where no
    sum can leave it, or float64.
    """
    if dtype.kind not in "fc" and dtype.name != "bfloat16":
        return dtype
    if dtype.itemsize >= (16 if dtype.kind == "c" else 8):
        return dtype
    int32 = np.dtype("int32")
    return int32 if sums_fit(a, b, k, int32) else np.dtype("float64")
