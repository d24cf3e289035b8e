"""The data that accuracy is measured on: operands by name, drawn on the host or on a GPU."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

Array = Any
#: Draws A, m x k, and B, k x n, of float32: (module of arrays, generator, m, n, k).
Draw = Callable[[Any, Any, int, int, int], tuple[Array, Array]]

#: One row of A and one column of B in so many is special, in the data with special rows.
EVERY = 4
#: Integers reach from minus this to this: their products sum up exactly over 2^18 elements of k.
LARGEST_INTEGER = 8
#: What the split kernel holds at every k, in units of u |A||B|.
SPLIT_UNITS = 24


def draw(xp: Any, name: str, m: int, n: int, k: int, seed: int = 0) -> tuple[Array, Array]:
    """Return A and B of a distribution.

    Parameters
    ----------
    xp : module
        numpy or cupy.
    name : str
        One of `DISTRIBUTIONS`.
    m, n, k : int
    seed : int, optional

    Returns
    -------
    tuple of two arrays of float32, shapes (m, k) and (k, n)
        C-contiguous.
    """
    return DISTRIBUTIONS[name](xp, xp.random.default_rng(seed), m, n, k)


def draw_double(xp: Any, name: str, m: int, n: int, k: int, seed: int = 0) -> tuple[Array, Array]:
    """Return A and B of a distribution as float64, with numbers of 53 bits.

    Those of float32 get further bits at random, but for integers, which stay what they are.
    """
    rng = xp.random.default_rng(seed + 1)
    found = []
    for x in draw(xp, name, m, n, k, seed):
        wide = x.astype(xp.float64)
        if name != "integers":
            wide *= 1 + 2.0**-23 * (rng.random(x.shape, dtype=xp.float64) - 0.5)
        found.append(wide)
    return found[0], found[1]


def _alike(fill: Callable[[Any, Any, tuple[int, int]], Array]) -> Draw:
    """Both operands of the same kind."""
    return lambda xp, rng, m, n, k: (fill(xp, rng, (m, k)), fill(xp, rng, (k, n)))


def _normal(xp: Any, rng: Any, shape: tuple[int, int]) -> Array:
    return rng.standard_normal(shape, dtype=xp.float32)


def _uniform(xp: Any, rng: Any, shape: tuple[int, int]) -> Array:
    return rng.random(shape, dtype=xp.float32)


def _half_zeros(xp: Any, rng: Any, shape: tuple[int, int]) -> Array:
    kept = (_uniform(xp, rng, shape) < 0.5).astype(xp.float32)
    return _normal(xp, rng, shape) * kept


def _integers(xp: Any, rng: Any, shape: tuple[int, int]) -> Array:
    count = 2 * LARGEST_INTEGER + 1
    drawn = xp.floor(_uniform(xp, rng, shape) * count)
    return xp.minimum(drawn, count - 1) - LARGEST_INTEGER  # CuPy's numbers reach 1


def _lognormal(xp: Any, rng: Any, shape: tuple[int, int], spread: float) -> Array:
    """(U - 1/2) exp(spread N), by which emulated products are commonly judged."""
    return (_uniform(xp, rng, shape) - 0.5) * xp.exp(spread * _normal(xp, rng, shape))


def _exponents(xp: Any, rng: Any, shape: tuple[int, int], reach: int) -> Array:
    """Normal, times powers of two from 2^-reach to 2^reach."""
    powers = xp.floor(_uniform(xp, rng, shape) * (2 * reach + 1)) - reach
    return (_normal(xp, rng, shape) * 2.0**powers).astype(xp.float32)


def _grades(xp: Any, count: int, decades: int) -> Array:
    """From 10^-decades to 10^decades."""
    return xp.asarray((10.0 ** np.linspace(-decades, decades, count)).astype(np.float32))


def _graded_rows(xp: Any, rng: Any, m: int, n: int, k: int, decades: int) -> tuple[Array, Array]:
    """Rows of A and columns of B of sizes of their own."""
    a, b = _normal(xp, rng, (m, k)), _normal(xp, rng, (k, n))
    return a * _grades(xp, m, decades)[:, None], b * _grades(xp, n, decades)


def _graded_columns(xp: Any, rng: Any, m: int, n: int, k: int, decades: int) -> tuple[Array, Array]:
    """A G and the inverse of G times B: what grows along k in one operand, shrinks in the other."""
    a, b = _normal(xp, rng, (m, k)), _normal(xp, rng, (k, n))
    grades = _grades(xp, k, decades)
    return a * grades, b / grades[:, None]


def _zero_rows(xp: Any, rng: Any, m: int, n: int, k: int) -> tuple[Array, Array]:
    a, b = _normal(xp, rng, (m, k)), _normal(xp, rng, (k, n))
    a[::EVERY] = 0
    b[:, ::EVERY] = 0
    return a, b


def _subnormal_rows(xp: Any, rng: Any, m: int, n: int, k: int) -> tuple[Array, Array]:
    """Some rows of A are subnormal. Made of bits: CuPy's arithmetic has zeros for such numbers."""
    a, b = _normal(xp, rng, (m, k)), _normal(xp, rng, (k, n))
    rows = a[::EVERY]
    fractions = 1 + (_uniform(xp, rng, rows.shape) * (2**23 - 2)).astype(xp.uint32)
    signs = (_uniform(xp, rng, rows.shape) < 0.5).astype(xp.uint32)
    a.view(xp.uint32)[::EVERY] = fractions | (signs << 31)
    return a, b


#: By name; those of OVER_K are also measured for other k.
DISTRIBUTIONS: dict[str, Draw] = {
    "normal": _alike(_normal),
    "uniform": _alike(_uniform),
    "half zeros": _alike(_half_zeros),
    "integers": _alike(_integers),
    **{f"lognormal {spread:g}": _alike(functools.partial(_lognormal, spread=spread))
       for spread in (0.5, 1.0, 2.0, 4.0)},
    **{f"graded rows 10^{decades}": functools.partial(_graded_rows, decades=decades)
       for decades in (2, 4, 6, 8)},
    **{f"graded columns 10^{decades}": functools.partial(_graded_columns, decades=decades)
       for decades in (2, 4, 6, 8)},
    "exponents 2^40": _alike(functools.partial(_exponents, reach=40)),
    "zero rows": _zero_rows,
    "subnormal rows": _subnormal_rows,
}  # fmt: skip
OVER_K = ("normal", "uniform")
#: What the tensor cores must carry.
CARRIED = ("normal", "uniform", "half zeros", "integers", "lognormal 0.5", "lognormal 1")
