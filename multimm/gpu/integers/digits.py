"""Integers too large for exact float products, cut into digits whose products are exact.

x = d0 + 2^s d1 + 4^s d2, each digit between -2^(s-1) and 2^(s-1). A product of two numbers is the
sum of the products of their digits. A result of so many bits is a number modulo 2^bits, so products
whose weight is 2^bits and more are left out: six of nine are needed for int64 in digits of 22 bits.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = Any

#: Digits of a number, at most: three of 22 bits make 64.
MOST = 3


@dataclass(frozen=True, slots=True)
class Digits:
    """How the numbers of an operand are cut: into `count` digits of so many `bits`."""

    bits: int
    count: int

    @property
    def most(self) -> int:
        """The largest absolute value of a digit."""
        return 1 << self.bits - 1


#: A number that stays as it is.
WHOLE = Digits(0, 1)


def choices(most: int, bits: int) -> list[Digits]:
    """The ways to cut numbers up to `most`, as far as they count modulo 2^bits.

    >>> choices(2**31, 32)
    [Digits(bits=32, count=1), Digits(bits=16, count=2), Digits(bits=11, count=3)]
    """
    own = min(bits, most.bit_length() + 1)
    return [Digits(-(-own // count), count) for count in range(1, MOST + 1)]


def pairs(a: Digits, b: Digits, bits: int) -> list[tuple[int, int, int]]:
    """Digits of A and of B whose products count modulo 2^bits, and by which power of two.

    >>> pairs(Digits(32, 1), Digits(16, 2), 32)
    [(0, 0, 0), (0, 1, 16)]
    """
    both = itertools.product(range(a.count), range(b.count))
    weighed = ((i, j, i * a.bits + j * b.bits) for i, j in both)
    return [pair for pair in weighed if pair[-1] < bits]


def split(x: Array, digits: Digits, bits: int, format: str) -> list[Array]:
    """The digits of integers as floats of a format, lowest first; modulo 2^bits, if not whole."""
    if digits == WHOLE:
        return [x.astype(format)]
    x = x.astype(np.dtype(f"int{bits}"), copy=digits.count > 1)
    made, base = [], 1 << digits.bits
    for _ in range(digits.count - 1):
        low = x + base // 2  # what wraps around is a multiple of 2^bits
        low &= base - 1
        low -= base // 2
        made.append(low.astype(format))
        x -= low
        x >>= digits.bits
    return [*made, x.astype(format)]
