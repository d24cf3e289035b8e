"""Which shapes fit together in a product, and what is said of those that do not.

Every layer that takes matrices asks here, whatever kind of arrays they are.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from itertools import zip_longest
from typing import Any

from multimm.errors import OptionError, ShapeError, integer

Shape = tuple[int, ...]


def check_operands(a: Shape, b: Shape, trans_a: bool = False, trans_b: bool = False) -> None:
    """Raise `ShapeError` unless op(A) and op(B) can be multiplied: k is the same, stacks broadcast.

    Shapes are those that were given, of 1 dimension at least: a vector is a row on the left, and a
    column on the right. Raises `OptionError` for flags that are none.
    """
    check_flags(trans_a, trans_b)
    columns = a[-2] if trans_a else a[-1]
    rows = b[-1] if trans_b or len(b) == 1 else b[-2]
    if columns != rows:
        op_a, op_b = ("op(a)" if trans_a else "a"), ("op(b)" if trans_b else "b")
        raise ShapeError(
            f"{_given(a, b, trans_a, trans_b)}: the {columns} columns of {op_a} must equal the "
            f"{rows} rows of {op_b}; transpose one of them or swap them, if that is what is meant"
        )
    for x, y in zip_longest(a[-3::-1], b[-3::-1], fillvalue=1):
        if x != y and 1 not in (x, y):
            raise ShapeError(
                f"{_given(a, b, trans_a, trans_b)}: the dimensions before the last two must "
                "broadcast, each pair from the right equal or with a 1; reshape one so that they do"
            )


def check_flags(trans_a: Any, trans_b: Any) -> None:
    """Raise `OptionError` unless both are True or False, of NumPy or Python, or 1 or 0."""
    for name, flag in (("trans_a", trans_a), ("trans_b", trans_b)):
        # BLAS has 2 for conjugate transposes; "N" would be true. Arrays have no hash, and no truth.
        if not isinstance(flag, Hashable) or flag not in (False, True):
            raise OptionError(
                f"{name}={flag!r}: allowed are True and False; for a conjugate transpose pass True "
                "and the conjugate, x.conj()"
            )


def broadcast(a: Shape, b: Shape) -> Shape:
    """The shape of two stacks that broadcast: as `numpy.broadcast_shapes`, of up to 64 dimensions.

    NumPy's takes 32, where its matmul takes arrays of 64.

    >>> broadcast((5, 1, 3), (2, 1))
    (5, 2, 3)
    """
    if a == b:
        return a
    pairs = zip_longest(a[::-1], b[::-1], fillvalue=1)
    return tuple([y if x == 1 else x for x, y in pairs][::-1])


def _given(a: Shape, b: Shape, trans_a: bool, trans_b: bool) -> str:
    first = f"a has shape {a}{' and is transposed,' * trans_a}"
    return f"{first} and b has shape {b}{' and is transposed' * trans_b}"


def per_axis(chunks: Any, shape: Shape) -> Any:
    """The same chunks, of each axis where a mapping names some of them, as Dask's `rechunk` has it.

    Raises `ValueError` for what Dask would take for something else: True for 1, no text for 1 byte,
    and axes that there are not for nothing.

    >>> per_axis({-1: 5}, (10, 7)), per_axis(8, (10, 7))
    ((None, 5), 8)
    """
    if hasattr(chunks, "tolist"):
        chunks = chunks.tolist()
    if isinstance(chunks, bool) or (isinstance(chunks, str) and not chunks):
        raise ValueError("no size")
    if not isinstance(chunks, dict):
        return chunks
    axes = {axis: axis % len(shape) for axis in range(-len(shape), len(shape))}
    if missing := [axis for axis in chunks if axis not in axes]:
        raise ValueError(f"{missing[0]!r} is no axis")
    sizes = {axes[axis]: size for axis, size in chunks.items()}
    return tuple(map(sizes.get, range(len(shape))))


def auto_of_empty(chunks: Any, shape: Shape) -> Any:
    """Chunks in which "auto" is a whole axis where the array is empty: Dask divides by zero.

    >>> auto_of_empty("auto", (0, 40)), auto_of_empty(("auto", 8), (0, 40))
    ((-1, -1), (-1, 8))
    """
    if 0 not in shape:
        return chunks
    if isinstance(chunks, str) or not isinstance(chunks, tuple | list):
        chunks = (chunks,) * len(shape)
    return tuple(-1 if isinstance(own, str) and own == "auto" else own for own in chunks)


def chunk_count(chunks: Any, shape: Shape) -> int:
    """How many chunks sizes make of a shape, without listing them; other spellings count as one.

    >>> chunk_count((4, "auto"), (10, 7)), chunk_count(2, (10, 7)), chunk_count(2, (10, 0))
    (3, 20, 5)
    """
    each = chunks if isinstance(chunks, tuple | list) else (chunks,) * len(shape)
    lengths = [x if isinstance(x, float) else integer(x) for x in each]
    return math.prod(
        max(1, int(-(-size // length))) if length is not None and length >= 1 else 1
        for size, length in zip(shape, lengths, strict=False)
    )


def check_result(name: str, shape: Shape, result: Shape) -> None:
    """Raise `ShapeError` unless what is added to a product, or takes its result, has its shape."""
    if shape != result:
        raise ShapeError(
            f"{name} has shape {shape}: the result has shape {result}, {name} must have it too"
        )
