"""How far a right element may be from the exact one: the numerical contract as numbers.

    |C - exact|[i, j] <= e[i, j] = |alpha| (k + 8) u (|A| |B|)[i, j] + 2 u_0 |beta C0| + u_out |C|

u belongs to the format that sums are kept in (FP32 for float16, bfloat16 and float32, else FP64);
of products at "tf32", where that precision counts, (k + 8) u is 2^-9 + 2 (k + 8) u instead. u_out
belongs to the result's dtype, u_0 is u or, where A B is integers, that of C0's dtype. What is wider
than A B for other reasons than alpha and C0 was computed in its own dtype. Integers have no e: C is
right in the ring of integers modulo 2^bits, as NumPy's wrap around. Neither have sums of narrow
integers that a C of floats holds (`whole`): these are exact. Source: N. Higham,
"Accuracy and Stability of Numerical Algorithms", 2nd ed., sections 3.1-3.6. Knows numbers only,
no arrays.
"""

from __future__ import annotations

import cmath
import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from multimm.errors import DTypeError, OptionError
from multimm.gpu.dtypes import result_dtype
from multimm.gpu.kernel_selection import Precision

#: Chance that a right product is called wrong.
FALSE_ALARM = 1e-12
#: The sharp bound in units of sqrt(k + 8) u |A| ||B||. Right products of random data stay below
#: a third of it, and a false suspicion costs only a second look (arbitrary).
SHARP = 4.0
#: Unit roundoff of float64, in which the check computes.
U64 = 2.0**-53
#: What rounding both operands to 11 bits may cost a product of float32 at "tf32".
TF32 = 2.0**-9
#: Dtypes whose products are summed in FP32 numbers, and stay so.
SINGLE = ("float32", "complex64")
#: Smallest subnormal of float32, in which float16, bfloat16 and float32 are summed.
TINY32 = 2.0**-149
#: Unit roundoff, smallest subnormal and largest value of bfloat16, which numpy.finfo lacks.
BFLOAT16 = (2.0**-8, 2.0**-133, (2 - 2.0**-7) * 2.0**127)


#: Integers that agree modulo 2**bits and not modulo this have wrapped around: 2**20 - 3, so that
#: 2**24 products of residues have room in 64 bits. One row in a million goes unnoticed.
PRIME = np.uint64(1048573)
#: A power of two: of operands times this, sums and bounds are finite in float64 whatever they hold,
#: and what underflows is nothing beside sums that are not finite otherwise.
SHRINK = 2.0**-530


@dataclass(frozen=True)
class Rule:
    """What the block tasks must know; plain numbers, so that it travels and tokenizes."""

    kind: str  #: "bool", "int", "float" or "complex"
    alpha: Any
    beta: Any
    rounds: int
    k: int
    n: int
    rows: int  #: of all matrices of C together
    u: float = 0.0  #: of each of k + 8 terms
    u_out: float = 0.0
    u_added: float = 0.0  #: of beta C0
    tiny: float = 0.0  #: what underflow may cost one element
    largest: float = 0.0  #: beyond it an infinity is the right answer
    summed: float = math.inf  #: beyond it sums of A B are infinite, however wide C is
    partial: float = math.inf  #: where partial sums may have become infinite on the way
    product_largest: float = math.inf  #: beyond it A B is, before alpha
    bits: int = 64
    whole: bool = False  #: C of floats holds sums of narrow integers, exact as far as it can
    product: str = ""  #: dtype of A B, where it wraps around, or is an OR, before C's is applied

    @property
    def dtype(self) -> Any:
        """The dtype that the check computes in."""
        if self.product:
            return np.uint64
        return {"int": np.uint64, "complex": np.complex128}.get(self.kind, np.float64)

    @property
    def shrunk(self) -> bool:
        """Whether rows are recomputed once more, for sums that overflow in float64 as well."""
        return self.kind in ("float", "complex") and not self.product

    @property
    def factor(self) -> float:
        """A complex dot product is two real ones of twice the length: sqrt(2) 2k <= 3k."""
        return 3.0 if self.kind == "complex" else 1.0

    @property
    def sigmas(self) -> float:
        """t of Hoeffding's inequality, so that no row of any round gives a false alarm."""
        return math.sqrt(2 * math.log(2 * self.rows * self.rounds / FALSE_ALARM))

    def exact(self, sizes: Any, c: Any) -> Any:
        """Whether C has to be A B exactly, from |A||B| and |C|: all sums are whole numbers.

        An exact sum that is rounded to a number below 1 / u_out is that number. Up to 2^53 the
        check rounds nothing either.
        """
        return self.whole & (sizes <= 1 / U64) & (c < 1 / self.u_out)

    def allowed(self, growth: float, product: Any, c0: Any, c: Any, count: int = 1) -> Any:
        """The bound e from |A||B|, |C0| and |C|, or its norm over `count` elements from theirs."""
        terms = abs(self.alpha) * self.factor * growth * self.u * product
        terms = terms + 2 * self.u_added * abs(self.beta) * c0 + 1.01 * self.u_out * c
        return terms + self.tiny * math.sqrt(count)


def rank(dtype: np.dtype[Any], name: str) -> int:
    """0 for bool, 1 for integers, 2 for floats, 3 for complex numbers."""
    if dtype.name == "bfloat16":
        return 2
    if dtype.kind not in "biufc":
        raise DTypeError(
            f"{name} has dtype {dtype}: bool, integers, floats and complex numbers can be checked;"
            f" convert with {name}.astype"
        )
    return {"b": 0, "i": 1, "u": 1, "f": 2, "c": 3}[str(dtype.kind)]


def wider(dtype: np.dtype[Any], than: np.dtype[Any]) -> bool:
    """Whether the one shows what was lost in the other: by rounding, or by wrapping around."""
    if min(rank(dtype, "c"), rank(than, "a @ b")) < 2:
        return dtype.name != than.name and np.promote_types(dtype, than) == dtype
    return _format(dtype)[0] < _format(than)[0]


def make_rule(
    operands: list[np.dtype[Any]],
    dtype: np.dtype[Any],
    scale: tuple[complex, complex],
    sizes: tuple[int, int, int],
    rounds: int,
    kept: np.dtype[Any] | None = None,
    precision: Precision = "float32",
    exact: bool = False,
) -> Rule:
    """The rule for a C of `dtype`; `sizes` are its rows, its columns n, and k.

    `scale` are alpha and beta, Python's own numbers; `operands` are the dtypes of A, B and, where
    there is one, C0; `kept` is what A B is summed in, where alpha and C0 explain C's dtype;
    `precision` is what was promised of it, and `exact` that no sum of A B is rounded.
    """
    rows, n, k = sizes
    height = rank(dtype, "c")
    if height < max(rank(operand, "operand") for operand in operands):
        given = " and ".join(map(str, operands))
        raise DTypeError(
            f"c has dtype {dtype}, which cannot hold products of {given}: pass it as it was made"
        )
    kind = ("bool", "int", "float", "complex")[height]
    alpha, beta = scalar(scale[0], "alpha", kind), scalar(scale[1], "beta", kind)
    rule = Rule(kind, alpha, beta, rounds, k, n, rows)
    if height < 2:
        return replace(rule, bits=8 * dtype.itemsize)
    u_out, smallest, largest = _format(dtype)
    u = U64 if exact else max(U64, min(u_out, 2.0**-24))
    if kept is not None and kept.name in SINGLE:
        u, _, summed = _format(kept)
        rule = replace(rule, summed=summed)
    tiny = smallest + (k + 1) * max(1.0, abs(alpha)) * (smallest if u == U64 else TINY32)
    added = operands[2:] if kept is not None and kept.kind in "biu" else []
    u_added = max([u, *(_format(c0)[0] for c0 in added if rank(c0, "c0") > 1)])
    u_out = max(u_out, U64)
    if precision == "tf32" and kept is not None and kept.name == dtype.name in SINGLE:
        u = TF32 / (k + 8) + 2 * u  # errors of both kinds mostly cancel, as `SHARP` has it
    ends = largest if u == U64 else _format(np.dtype("float32"))[2]
    partial = math.inf if kept is not None and kept.kind in "biu" else ends
    beyond = _largest_product(operands[:2])
    whole = exact and (alpha, beta) == (1, 0)
    rule = replace(rule, partial=partial, product_largest=beyond, whole=whole)
    return replace(rule, u=u, u_out=u_out, u_added=u_added, tiny=tiny, largest=largest)


def _largest_product(operands: list[np.dtype[Any]]) -> float:
    """The largest number of NumPy's dtype for A B; infinite for integers, which wrap around."""
    product = result_dtype(*operands)
    return _format(product)[2] if rank(product, "a @ b") > 1 else math.inf


def row_rule(
    rule: Rule, kept: np.dtype[Any] | None, dtype: np.dtype[Any], scale: tuple[complex, complex]
) -> Rule:
    """The rule of recomputed rows: another one where A B wraps around before alpha or C0 widens it.

    Of `scale` those numbers that are ints do not widen.
    """
    if kept is None or kept.kind not in "biu" or kept.name == dtype.name:
        return rule
    return replace(rule, product=kept.name, alpha=scale[0], beta=scale[1], u=rule.u_out)


def _format(dtype: np.dtype[Any]) -> tuple[float, float, float]:
    if dtype.name == "bfloat16":
        return BFLOAT16
    info, used = np.finfo(dtype), np.finfo(np.float64)  # the check computes in these
    smallest = float(max(info.smallest_subnormal, used.smallest_subnormal))
    return float(info.eps) / 2, smallest, float(min(info.max, used.max))


def scalar(value: complex, name: str, kind: str) -> Any:
    """A Python number as one of the type that C's kind is multiplied by."""
    try:
        finite = cmath.isfinite(value)
    except OverflowError:  # an integer beyond float64
        finite = kind in ("bool", "int")
    if not finite:
        raise OptionError(f"{name}={value!r}: the check needs a finite number")
    if kind != "complex" and np.imag(value) != 0:
        raise OptionError(f"{name}={value!r} with a real c: give a real number")
    if kind == "complex":
        return complex(value)
    value = value.real
    if kind == "float":
        return float(value)
    if value != int(value):
        raise OptionError(f"{name}={value!r} with an integer c: give an integer")
    if kind == "bool" and value not in (0, 1):
        raise OptionError(f"{name}={value!r} with a bool c: 0 and 1 are allowed")
    return int(value)
