"""Products of integers by the float products of a library, in stretches of k that are exact.

NumPy multiplies integers by loops, 34 to 130 times slower than float32, and CuPy by a kernel
without tensor cores. A float product of the same numbers is exact as long as no sum can leave the
integers that its format holds. So k is cut where one could, and what the stretches make is added in
integers. Numbers too large for that are cut themselves, into `digits`.

How long a stretch may be, and what has digits, depends on the largest elements that there are:
reading them takes a pass over the operands, which is little beside a product.
"""

from __future__ import annotations

import itertools
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from multimm.gpu.integers import digits
from multimm.gpu.integers.bounds import HELD, magnitude, terms
from multimm.gpu.integers.digits import WHOLE, Digits

Array = Any
DType = np.dtype[Any]

#: Time of a product by its format, beside one in float64, and how many terms are multiplied while a
#: sum is converted and added (one core of an x86 server: 130 to 160).
SECONDS, ADDING = {"float32": 0.5, "float64": 1.0}, 150
#: Terms of a stretch, at least: shorter ones are added for longer than they save.
LEAST = 32
#: Longer stretches are no faster, and their operands take more memory as floats, digits more than
#: whole numbers: arbitrary.
MOST, MOST_IN_DIGITS = 4096, 1024
#: Multiply-adds below which NumPy's own loop is done before operands are looked at: arbitrary.
SMALL = 2**15
#: The shortest side of a product, and its multiply-adds, from which on digits are worth their
#: conversion (int64 and int32 on one core of an x86 server).
SIDE, SMALL_IN_DIGITS = 32, 2**20
#: Elements that are converted at a time when stretches are added: they stay in the cache.
STRIP = 2**17


class Cut(NamedTuple):
    """The format that a library multiplies in, terms of a stretch, and the operands' digits."""

    format: str
    length: int
    a: Digits
    b: Digits


def cut(most_a: int, most_b: int, k: int, bits: int = 0) -> Cut | None:
    """The fastest way to an exact product, None if there is none.

    Parameters
    ----------
    most_a, most_b : int
        Largest absolute values of the operands.
    k : int
    bits : int, optional
        The product is one modulo 2^bits, so that numbers may be cut into digits.

    >>> [cut(x, x, 9000)[:2] for x in (128, 2**15)], cut(2**31, 2**31, 9000)
    ([('float32', 1024), ('float64', 4096)], None)
    >>> cut(2**63, 2**63, 9000, bits=64)
    Cut(format='float64', length=1024, a=Digits(bits=22, count=3), b=Digits(bits=22, count=3))
    """
    ways = [(WHOLE, WHOLE, most_a, most_b, MOST)]
    if bits:
        choices = itertools.product(*(digits.choices(x, bits) for x in (most_a, most_b)))
        ways += [(a, b, a.most, b.most, MOST_IN_DIGITS) for a, b in choices]
    options = []
    for (a, b, end_a, end_b, longest), (name, held) in itertools.product(ways, HELD.items()):
        length = min(terms(end_a, end_b, held), longest, max(1, k))
        # A float holds the factors, too.
        if max(end_a, end_b) <= held and length >= max(1, min(k, LEAST)):
            products = len(digits.pairs(a, b, bits)) if bits else 1
            seconds = products * SECONDS[name] * (1 + ADDING / length)
            options.append((seconds, Cut(name, length, a, b)))
    return min(options, key=lambda option: option[0])[1] if options else None


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
    """Stacks of integers multiplied, as an array that nobody else holds.

    Parameters
    ----------
    xp : module
        NumPy or CuPy.
    left, right : array of integers or bool
        op(A) and op(B), not converted.
    shape : tuple of int
        Of the result; not empty, and neither is k.
    dtype : dtype
        Integers, floats or bool: of the sums that are added up, modulo 2^bits, rounded, or OR.
    """
    (m, n), k, bits = shape[-2:], left.shape[-1], 8 * dtype.itemsize
    found = None
    if m * n * k > SMALL and dtype.kind != "c":
        modular = dtype.kind in "iu" and min(m, n, k) >= SIDE and m * n * k >= SMALL_IN_DIGITS
        found = cut(most(xp, left), most(xp, right), k, bits if modular else 0)
    if found is None:
        left, right = left.astype(dtype, copy=False), right.astype(dtype, copy=False)
        return xp.matmul(left, right).astype(dtype, copy=False)
    total: Array = None
    for start in range(0, k, found.length):
        at = slice(start, start + found.length)
        a = digits.split(left[..., at], found.a, bits, found.format)
        b = digits.split(right[..., at, :], found.b, bits, found.format)
        for i, j, weight in digits.pairs(found.a, found.b, bits):
            total = _sum(xp, total, xp.matmul(a[i], b[j]), dtype, weight)
    return total


def _converted(part: Array, dtype: DType, weight: int = 0) -> Array:
    """Exact floats as `dtype`: what it cannot hold modulo 2^bits, which is undefined for floats.

    As bool, whether they are not zero.
    """
    if dtype.kind in "iu":
        part = part.astype(np.int32 if part.dtype.itemsize == 4 else np.int64)
    part = part.astype(dtype, copy=False)
    return part << weight if weight else part


def _sum(xp: ModuleType, total: Array, part: Array, dtype: DType, weight: int = 0) -> Array:
    """The total, that nobody else holds, with 2^weight times a part added; at first the part."""
    if total is None:
        return _converted(part, dtype, weight)
    if xp is not np:
        total += _converted(part, dtype, weight)
        return total
    to, of = total.reshape(-1), part.reshape(-1)
    for start in range(0, to.size, STRIP):
        at = slice(start, start + STRIP)
        to[at] += _converted(of[at], dtype, weight)
    return total
