"""Whether a product by residues keeps the error bound of a dot product, from its rows alone.

Row i of A becomes integers a', of norm |a'|, and column j of B becomes b'. Each is rounded by half
of one at most, so in units of the integers

    |error of C'_ij|  <=  |b'|_1 / 2  +  |a'|_1 / 2  +  k / 4

where a term is 0 if nothing is rounded. What is promised is (k + 2) u (|A||B|)_ij. Two u of it are
for the rounding of the result, and for norms, which are right to 2^-19. If a share f of a row's
elements is at least x of the root of its mean square, and a share g of a column's at least y, then
of all pairs f + g - 1 are both, and

    (|A'||B'|)_ij  >=  (f + g - 1) x y |a'| |b'|

So the promise is kept for all elements if it is for the smallest norms, the largest |a'|_1 / |a'|
and the smallest shares of all rows and columns.

Each part of a complex product is a sum of 2 k real products, Re A Re B - Im A Im B or Re A Im B +
Im A Re B. The same holds for these, if shares are the smaller one of a row's two parts: for each of
the two terms there are f + g - 1 of k.
"""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

#: What shares of elements are counted against, of the root of a row's mean square.
LEVELS = (0.5, 0.25, 0.125)


class Rows(NamedTuple):
    """What is known of all rows of an operand's integers."""

    rounded: bool
    norm: float  #: the smallest of a rounded row
    sum: float  #: the largest |a|_1 / |a| of a row
    #: The smallest of any part of a row that is not 0, for each of `LEVELS`.
    shares: tuple[float, ...]

    def scaled(self, factor: float) -> Rows:
        """The same for integers that are so many times as large."""
        return self._replace(norm=self.norm * factor)


def keeps_bound(a: Rows, b: Rows, k: int, unit: float) -> bool:
    """Whether no real number of the product errs by more than (k + 2) u |A||B|, of k products."""
    of_a = b.sum / (2 * a.norm) if a.rounded else 0.0
    of_b = a.sum / (2 * b.norm) if b.rounded else 0.0
    of_both = k / (4 * a.norm * b.norm) if a.rounded and b.rounded else 0.0
    levels = product(zip(LEVELS, a.shares, strict=True), zip(LEVELS, b.shares, strict=True))
    least = max(x * y * (f + g - 1) for (x, f), (y, g) in levels)
    return of_a + of_b + of_both <= k * unit * least
