"""How right a product is, whoever made it: rows and columns of it against float64 on the host.

Rows are drawn one from each of equal stripes of the matrix, columns likewise, so that no block of
a blocked product is left out.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from multimm_benchmarks.cases import Case
from multimm_benchmarks.harness import UNITS, Errors, Reference, U

Array = Any

#: Rows, and the fewest columns, that are compared; arbitrary.
ROWS, LEAST_COLUMNS = 16, 16
#: Elements of B that are brought to the host, at most, in full and quick; arbitrary: the work of
#: half a second, and of a tenth.
ELEMENTS, QUICK_ELEMENTS = 2**24, 2**21


class Sample(NamedTuple):
    """Which elements are compared: the rows and columns of a grid, sorted."""

    rows: Array
    columns: Array


def choose(m: int, n: int, k: int, seed: int = 0, elements: int = ELEMENTS) -> Sample:
    """Return rows and columns of an m x n product over k, of B at most so many elements."""
    rng = np.random.default_rng(seed)
    columns = min(n, max(LEAST_COLUMNS, elements // max(1, k)))
    return Sample(_one_per_stripe(rng, m, min(m, ROWS)), _one_per_stripe(rng, n, columns))


def _one_per_stripe(rng: np.random.Generator, size: int, count: int) -> Array:
    edges = np.linspace(0, size, count + 1).astype(np.int64)
    return rng.integers(edges[:-1], edges[1:])


def allowed(promise: str, k: int) -> float:
    """Return how far an element may be off, in units of |A||B|, under a promised precision."""
    if promise == "tf32":
        return 2.0**-9 + 2 * k * U
    return (k + 3) * UNITS.get(promise, U)


def check(left: Array, right: Array, found: Array, promise: str) -> Errors:
    """Compare part of a product with the same in float64, or, if it is that, in long doubles.

    Parameters
    ----------
    left : numpy.ndarray of float32 or float64, shape (rows, k)
        Rows of op(A).
    right : numpy.ndarray of the same, shape (k, columns)
        Columns of op(B).
    found : numpy.ndarray of the same, shape (rows, columns)
        What a system says their product is.
    promise : {"float32", "ieee", "tf32", "float64"}

    Raises
    ------
    WrongResultError
        If an element is farther off than the promise allows; NaN is.
    """
    case = Case(left.shape[0], right.shape[1], left.shape[1])
    reference = Reference(np, case, left, right)
    out = np.empty_like(found)

    def call() -> None:
        out[...] = found

    return reference.check(out, call, allowed(promise, case.k))
