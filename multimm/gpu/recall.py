"""Products of a kind that was seen before: launched again without deciding again.

Checks, layouts, the choice of a configuration and its kernel depend on the operands' shapes,
strides, types and alignment, not on where they lie. For small matrices deciding takes longer
than multiplying, so what was decided is kept, and the next product of the same kind costs one
look-up, one allocation and one launch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

Array = Any

#: Takes the addresses of A, B and the result; launches on the current stream.
Run = Callable[[int, int, int], None]

#: Of different kinds; when they are that many, all are forgotten. Arbitrary.
CAPACITY = 1024
#: What an address's last bits say: kernels may copy 16 bytes at a time.
ALIGNMENT_MASK = 15

_FLOAT32 = np.dtype(np.float32)


class _Recipe(NamedTuple):
    shape: tuple[int, ...]
    run: Run


class _Library(NamedTuple):
    """What is needed of CuPy; nothing is imported here before the first product."""

    ndarray: Any
    current_device: Callable[[], int]


_library: _Library | None = None
_recipes: dict[tuple[Any, ...], _Recipe] = {}


def product(a: Any, b: Any, trans_a: bool = False, trans_b: bool = False) -> Array | None:
    """Return op(A) @ op(B) by what was kept for its kind, or None: then decide.

    Parameters
    ----------
    a, b : anything
        Other than CuPy arrays on the current device there is nothing to find.
    trans_a, trans_b : bool

    Returns
    -------
    cupy.ndarray or None
        A new C-contiguous array, ready in the order of the current stream.
    """
    library = _library
    if library is None or type(a) is not library.ndarray or type(b) is not library.ndarray:
        return None
    x, y = a.data, b.data
    recipe = _recipes.get(_kind(a, b, x, y, trans_a, trans_b))
    if recipe is None or library.current_device() != x.device_id:
        return None
    out = library.ndarray(recipe.shape, _FLOAT32)
    recipe.run(x.ptr, y.ptr, out.data.ptr)
    return out


def keep(
    a: Array, b: Array, trans_a: bool, trans_b: bool, shape: tuple[int, ...], run: Run
) -> None:
    """Keep what was decided for a product without alpha, beta, C, P and `out`.

    Parameters
    ----------
    a, b : cupy.ndarray of float32
        Checked, on one device, and read as they are: no copy was made of either.
    trans_a, trans_b : bool
    shape : tuple of int
        Of the result, which is not empty.
    run : callable
        Takes the addresses of A, B and the result, and launches.
    """
    global _library
    if _library is None:
        import cupy

        _library = _Library(cupy.ndarray, cupy.cuda.runtime.getDevice)
    if len(_recipes) >= CAPACITY:
        _recipes.clear()
    _recipes[_kind(a, b, a.data, b.data, trans_a, trans_b)] = _Recipe(shape, run)


def forget() -> None:
    """Forget everything, such as after new winners were found."""
    global _library
    _recipes.clear()
    _library = None


def _kind(a: Array, b: Array, x: Any, y: Any, trans_a: bool, trans_b: bool) -> tuple[Any, ...]:
    """All that decisions depend on; `x` and `y` are the arrays' memory pointers."""
    return (
        a.shape,
        a.strides,
        a.dtype,
        x.ptr & ALIGNMENT_MASK,
        x.device_id,
        b.shape,
        b.strides,
        b.dtype,
        y.ptr & ALIGNMENT_MASK,
        y.device_id,
        trans_a,
        trans_b,
    )
