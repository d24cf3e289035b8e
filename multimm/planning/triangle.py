"""A symmetric block: which pieces of it are computed, all below its diagonal and little above."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

#: Pieces of a block on the diagonal are at least so large: an H200 computes one of 1024 x 1024 at
#: nearly its full rate if k is long, for it is cut along k.
LEAST_PIECE = 1024
#: Pieces begin at multiples of this many rows: as the kernels' tiles do, and packed rows.
GRAIN = 256


class Piece(NamedTuple):
    """Part of a block on the diagonal: rows of it, and columns."""

    rows: slice
    columns: slice


@lru_cache(maxsize=256)
def triangle(size: int) -> tuple[Piece, ...]:
    """What of a block on the diagonal is computed: all below the diagonal, and little above it.

    Half of the block is below both halves of its diagonal, which are triangles again. (A
    recursive symmetric rank-k update: Elmroth, Gustavson, Jonsson and Kagstrom, 2004.)

    >>> [(p.rows.start, p.rows.stop, p.columns.start, p.columns.stop) for p in triangle(2048)]
    [(0, 1024, 0, 1024), (1024, 2048, 0, 1024), (1024, 2048, 1024, 2048)]
    """
    return tuple(_pieces(0, size))


def _pieces(start: int, end: int) -> Iterator[Piece]:
    middle = start + -(-(end - start) // (2 * GRAIN)) * GRAIN
    if min(middle - start, end - middle) < LEAST_PIECE:
        yield Piece(slice(start, end), slice(start, end))
        return
    yield from _pieces(start, middle)
    yield Piece(slice(middle, end), slice(start, middle))
    yield from _pieces(middle, end)


def computed(size: int) -> int:
    """Elements of a block on the diagonal that are computed."""
    pieces = triangle(size)
    return sum((p.rows.stop - p.rows.start) * (p.columns.stop - p.columns.start) for p in pieces)
