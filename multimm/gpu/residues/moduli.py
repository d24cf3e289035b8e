"""Moduli, and integers that are known by their remainders (the Chinese remainder theorem).

Pure arithmetic: nothing in this module launches anything, and Python's integers are exact.
"""

from __future__ import annotations

import functools
from math import isqrt, log2, prod, sqrt
from typing import NamedTuple

from multimm.errors import KernelError


class System(NamedTuple):
    """A residue number system: of real integers, or of complex ones.

    Moduli are pairwise coprime, 256 at most, since a byte's residues stand for them
    (kernels/common/residues.cuh). With a root i of -1 for each, x + iy and x - iy are two residues
    of a complex number, and products of these those of the product.

    Source of the latter: Caday, arXiv:2609.05419 (2026).
    """

    moduli: tuple[int, ...]
    roots: tuple[int, ...] = ()

    @property
    def parts(self) -> int:
        """Real numbers in one, and planes of residues for each modulus."""
        return 2 if self.roots else 1


def _root(modulus: int) -> int:
    """The smallest root of -1."""
    return next(x for x in range(modulus) if (x * x + 1) % modulus == 0)


REAL = System((256, 255, 253, 251, 247, 241, 239, 233, 229, 227, 223, 217, 211, 199, 197, 193))
#: All prime factors of these are 1 modulo 4: others have no root of -1.
_WITH_ROOTS = (241, 233, 229, 221, 205, 197, 193, 181, 173, 157, 149, 137, 113, 109, 101, 97)
COMPLEX = System(_WITH_ROOTS, tuple(map(_root, _WITH_ROOTS)))
#: Moduli of a system.
MOST = len(REAL.moduli)
#: Bits of the limbs in which large constants go to a kernel.
LIMB = 42
#: A norm is computed a little too large (`norm_of` there): by so much more than it is, at most.
SPARE_BITS = 2.0**-16


@functools.cache
def product_of(system: System, count: int) -> int:
    """The product P of the first moduli: integers between -P / 2 and P / 2 are known.

    >>> [round(log2(product_of(REAL, n)), 1) for n in (1, 14, 15, 16)]
    [8.0, 110.2, 117.8, 125.4]
    >>> [round(log2(product_of(COMPLEX, n)), 1) for n in (7, 15, 16)]
    [54.3, 111.1, 117.7]
    """
    return prod(system.moduli[:count])


def norm_limit(system: System, count: int, k: int) -> float:
    """What the norm of a row of length `k` may be before its elements are rounded to integers.

    By Cauchy and Schwarz a product of rows stays below P / 2 if their norms stay below its root.
    Rounding changes a norm by half the root of its real numbers at most.

    >>> round(log2(norm_limit(REAL, 14, 4096)), 1)
    54.6
    """
    largest = float(isqrt(product_of(system, count) // 2)) * (1 - SPARE_BITS)
    return largest - sqrt(k * system.parts) / 2


def fewest(system: System, bits: int) -> int | None:
    """How many moduli tell integers of so many bits and their negatives apart, None: too many bits.

    >>> fewest(REAL, 16), fewest(REAL, 100), fewest(REAL, 130)
    (3, 13, None)
    """
    known = (n for n in range(1, MOST + 1) if log2(product_of(system, n)) - 1 - SPARE_BITS >= bits)
    return next(known, None)


Limbs = tuple[float, ...]


@functools.cache
def weights(system: System, count: int) -> tuple[tuple[tuple[Limbs, ...], ...], Limbs, float]:
    """What joins residues: weights of each part's moduli; P; and 2^84 / P.

    A weight is 0 modulo all other moduli. Of a real number it is 1 modulo its own; of a complex
    one, whose parts are known by the sum and the difference of two residues, 1/2 and 1/2i.
    Weights and P come in three limbs of 42 bits, the largest first: doubles hold them.
    """
    whole = product_of(system, count)
    parts = []
    for part in range(system.parts):
        found = []
        for at in range(count):
            weight = _weight(system, whole, part, at) % whole
            found.append(_limbs(weight - whole if 2 * weight > whole else weight))
        parts.append(tuple(found))
    return tuple(parts), _limbs(whole), 2.0 ** (2 * LIMB) / whole


def _weight(system: System, whole: int, part: int, at: int) -> int:
    """What a modulus's residue of a part is multiplied by, modulo P."""
    modulus = system.moduli[at]
    divisor = others = whole // modulus
    if system.roots:
        divisor *= 2 * (system.roots[at] if part else 1)
    return others * pow(divisor, -1, modulus)


def _limbs(number: int) -> Limbs:
    """Lower ones at most half of their place: a sum of 2^12 times them is exact."""
    found = []
    for _ in range(2):
        limb = (number + (1 << LIMB - 1)) % (1 << LIMB) - (1 << LIMB - 1)
        found.append(limb)
        number = number - limb >> LIMB
    if abs(number) >= 1 << LIMB:
        raise KernelError(f"a number takes more than three limbs of {LIMB} bits: fewer moduli")
    return tuple(map(float, (number, *reversed(found))))
