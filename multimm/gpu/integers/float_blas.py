"""Products of integers by the float products of a library, in stretches of k that are exact.

NumPy multiplies integers by loops, 34 to 130 times slower than float32 (`planning.problem`), and
CuPy by a kernel without tensor cores. A float product of the same numbers is exact as long as no
sum can leave the integers that its format holds. So k is cut where one could, and what the
stretches make is added in integers.

How long a stretch may be depends on the largest elements that there are: reading them takes a pass
over the operands, which is little beside a product.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np

from multimm.gpu.integers.bounds import HELD, magnitude, terms

Array = Any
DType = np.dtype[Any]

#: float32 is twice as fast as float64, and its sums are added more often: of so short stretches as
#: often as it saves (uint8 at 4000 on two cores of an x86 server).
LEAST = {"float32": 128, "float64": 32}
#: Longer stretches are no faster, and their operands take more memory as floats: arbitrary.
MOST = 4096
#: Multiply-adds below which NumPy's own loop is done before operands are looked at: arbitrary.
SMALL = 2**15
#: Elements that are converted at a time when stretches are added: they stay in the cache.
STRIP = 2**17


def stretches(most_a: int, most_b: int, k: int) -> tuple[str, int] | None:
    """The format to multiply in and the length of a stretch; None if none is worth it.

    Parameters
    ----------
    most_a, most_b : int
        Largest absolute values of the operands.
    k : int

    >>> stretches(128, 128, 9000), stretches(1, 2, 9000), stretches(2**15, 2**15, 9000)
    (('float32', 1024), ('float32', 4096), ('float64', 4096))
    >>> stretches(2**31, 2**31, 9000) is None
    True
    """
    for name, held in HELD.items():
        length = terms(most_a, most_b, held)
        # A float holds the factors, too.
        if max(most_a, most_b) <= held and length >= min(k, LEAST[name]):
            return name, min(length, MOST, max(1, k))
    return None


def largest(x: Array) -> int:
    """The largest absolute value; of a CuPy array, waits for it."""
    if not x.size:
        return 0
    if x.dtype.kind == "b":
        return 1
    if x.dtype.kind == "u":
        return int(x.max())
    return max(int(x.max()), -int(x.min()))


def most(xp: ModuleType, x: Array) -> int:
    """The largest absolute value that there is, or, of a byte on a GPU, could be: nobody waits."""
    return largest(x) if xp is np or x.dtype.itemsize > 1 else magnitude(x.dtype)


def product(
    xp: ModuleType, left: Array, right: Array, shape: tuple[int, ...], dtype: DType
) -> Array:
    """Stacks of integers multiplied, as an array that nobody else holds; of wide ones as xp does.

    Parameters
    ----------
    xp : module
        NumPy or CuPy.
    left, right : array of integers or bool
        op(A) and op(B), not converted.
    shape : tuple of int
        Of the result; not empty, and neither is k.
    dtype : dtype
        Integers, or floats: of the sums that are added up, modulo 2^bits or rounded.
    """
    k, cut = left.shape[-1], None
    if shape[-2] * shape[-1] * k > SMALL and dtype.kind != "c":
        cut = stretches(most(xp, left), most(xp, right), k)
    if cut is None:
        left, right = left.astype(dtype, copy=False), right.astype(dtype, copy=False)
        return xp.matmul(left, right).astype(dtype, copy=False)
    name, length = cut
    total: Array = None
    for start in range(0, k, length):
        at = slice(start, start + length)
        part = xp.matmul(left[..., at].astype(name), right[..., at, :].astype(name))
        if total is None:
            total = _converted(part, dtype)
        else:
            _add(xp, total, part)
    return total


def _converted(part: Array, dtype: DType) -> Array:
    """Exact floats as `dtype`: what it cannot hold modulo 2^bits, which is undefined for floats."""
    if dtype.kind in "iu":
        part = part.astype(np.int32 if part.dtype.itemsize == 4 else np.int64)
    return part.astype(dtype, copy=False)


def _add(xp: ModuleType, total: Array, part: Array) -> None:
    """Add to what nobody else holds."""
    if xp is not np:
        total += _converted(part, total.dtype)
        return
    to, of = total.reshape(-1), part.reshape(-1)
    for start in range(0, to.size, STRIP):
        at = slice(start, start + STRIP)
        to[at] += _converted(of[at], to.dtype)
