"""A symmetric block: which pieces of it are computed, all below its diagonal and little above."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

#: Pieces of a block on the diagonal are at least so large, by the precision that it is packed for.
#: By what kernels are predicted to take on an H200, blocks of 8192 and 16384 with long k take 0.59
#: and 0.56 of a full product in such pieces, packed for float32, 0.57 and 0.55 with FP32
#: multiply-adds, and 0.63 and 0.58 for TF32, of which a product of 1024 x 1024 fills half the GPU.
LEAST_PIECE = {"": 1024, "ieee": 1024, "float32": 1024, "tf32": 2048}
#: Pieces begin at multiples of this many rows: as the kernels' tiles do, and packed rows.
GRAIN = 256


class Piece(NamedTuple):
    """Part of a block on the diagonal: rows of it, and columns."""

    rows: slice
    columns: slice


@lru_cache(maxsize=256)
def triangle(size: int, scheme: str = "") -> tuple[Piece, ...]:
    """What of a block on the diagonal is computed: all below the diagonal, and little above it.

    Half of the block is below both halves of its diagonal, which are triangles again. (A
    recursive symmetric rank-k update: Elmroth, Gustavson, Jonsson and Kagstrom, 2004.)

    >>> [(p.rows.start, p.rows.stop, p.columns.start, p.columns.stop) for p in triangle(2048)]
    [(0, 1024, 0, 1024), (1024, 2048, 0, 1024), (1024, 2048, 1024, 2048)]
    """
    return tuple(_pieces(0, size, LEAST_PIECE[scheme]))


def _pieces(start: int, end: int, least: int) -> Iterator[Piece]:
    middle = start + -(-(end - start) // (2 * GRAIN)) * GRAIN
    if min(middle - start, end - middle) < least:
        yield Piece(slice(start, end), slice(start, end))
        return
    yield from _pieces(start, middle, least)
    yield Piece(slice(middle, end), slice(start, middle))
    yield from _pieces(middle, end, least)


def computed(size: int, scheme: str = "") -> int:
    """Elements of a block on the diagonal that are computed."""
    pieces = triangle(size, scheme)
    return sum((p.rows.stop - p.rows.start) * (p.columns.stop - p.columns.start) for p in pieces)
