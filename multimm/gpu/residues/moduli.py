"""Moduli, and integers that are known by their remainders (the Chinese remainder theorem).

Pure arithmetic: nothing in this module launches anything, and Python's integers are exact.
"""

from __future__ import annotations

import functools
from math import isqrt, log2, prod, sqrt

import numpy as np

from multimm.errors import KernelError

#: Pairwise coprime, the largest that a byte's residues stand for (kernels/common/residues.cuh).
MODULI = (256, 255, 253, 251, 247, 241, 239, 233, 229, 227, 223, 217, 211, 199, 197, 193)
#: Bits of the limbs in which large constants go to a kernel.
LIMB = 42
#: A norm is computed a little too large (`norm_of` there): by so much more than it is, at most.
SPARE_BITS = 2.0**-16


@functools.cache
def product_of(count: int) -> int:
    """The product P of the first moduli: integers between -P / 2 and P / 2 are known.

    >>> [round(log2(product_of(n)), 1) for n in (1, 14, 15, 16)]
    [8.0, 110.2, 117.8, 125.4]
    """
    return prod(MODULI[:count])


def norm_limit(count: int, k: int) -> float:
    """What the norm of a row of length `k` may be before its elements are rounded to integers.

    By Cauchy and Schwarz a product of rows stays below P / 2 if their norms stay below its root.
    Rounding changes a norm by half the root of k at most.

    >>> round(log2(norm_limit(14, 4096)), 1)
    54.6
    """
    largest = float(isqrt(product_of(count) // 2)) * (1 - SPARE_BITS)
    return largest - sqrt(k) / 2


def fewest(bits: int) -> int | None:
    """How many moduli tell integers of so many bits and their negatives apart, None: too many bits.

    >>> fewest(16), fewest(100), fewest(130)
    (3, 13, None)
    """
    known = (n for n in range(1, len(MODULI) + 1) if log2(product_of(n)) - 1 - SPARE_BITS >= bits)
    return next(known, None)


@functools.cache
def weights(count: int) -> tuple[tuple[tuple[float, ...], ...], tuple[float, ...], float]:
    """For each modulus the number that is 1 modulo it and 0 modulo the others; P; and 2^84 / P.

    The numbers and P in three limbs, the largest first, each of 42 bits: doubles hold them.
    """
    whole = product_of(count)
    found = []
    for modulus in MODULI[:count]:
        others = whole // modulus
        weight = others * pow(others, -1, modulus) % whole
        found.append(_limbs(weight - whole if 2 * weight > whole else weight))
    return tuple(found), _limbs(whole), 2.0 ** (2 * LIMB) / whole


def _limbs(number: int) -> tuple[float, ...]:
    """All of the number's sign: the first may be 0, and the second still tell how large it is."""
    high, rest = divmod(abs(number), 1 << 2 * LIMB)
    middle, low = divmod(rest, 1 << LIMB)
    if high >= 1 << LIMB:
        raise KernelError(f"{number} takes more than three limbs of {LIMB} bits: fewer moduli")
    return tuple(float(limb if number >= 0 else -limb) for limb in (high, middle, low))


def residues(integers: np.ndarray, count: int) -> np.ndarray:
    """The residues of an array of Python's integers, nearest to 0: one plane for each modulus."""
    planes = []
    for modulus in MODULI[:count]:
        rest = integers % modulus
        planes.append(np.where(2 * rest > modulus, rest - modulus, rest))
    return np.array(planes, dtype=object)


def joined(planes: np.ndarray) -> np.ndarray:
    """The opposite: integers between -P / 2 and P / 2, from their residues."""
    whole = product_of(len(planes))
    total = 0
    for modulus, plane in zip(MODULI, planes, strict=False):
        others = whole // modulus
        total = total + plane.astype(object) * (others * pow(others, -1, modulus))
    total = total % whole
    return np.where(2 * total > whole, total - whole, total)
