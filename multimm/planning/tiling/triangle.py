"""A symmetric block: how much of it is computed, and in which sub-blocks by a library."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from multimm.planning.tiling.grid import ceil_div

#: Sub-blocks of a block on the diagonal are at least so large: of float32, for which 256 is also
#: the larger edge of our kernels' tiles, and of all else, which a library multiplies on GPUs too,
#: and of which products of 256 x 256 leave most of a GPU idle.
LEAST_SUB_BLOCK = {"float32": 256}
LEAST_OTHER = 1024
#: Sub-blocks begin at multiples of this many rows, on cache lines; otherwise arbitrary.
GRAIN = 64


class SubBlock(NamedTuple):
    """Part of a block on the diagonal: rows of it, and columns."""

    rows: slice
    columns: slice


@lru_cache(maxsize=256)
def triangle(size: int, dtype: str = "float32") -> tuple[SubBlock, ...]:
    """What of a block on the diagonal is computed: all below the diagonal, and little above it.

    Half of the block is below both halves of its diagonal, which are triangles again. (A
    recursive symmetric rank-k update: Elmroth, Gustavson, Jonsson and Kagstrom, 2004.) Our own
    kernels compute whatever tiles reach the diagonal instead, which is about as much.

    >>> [(p.rows.start, p.rows.stop, p.columns.start, p.columns.stop) for p in triangle(512)]
    [(0, 256, 0, 256), (256, 512, 0, 256), (256, 512, 256, 512)]
    """
    return tuple(_sub_blocks(0, size, LEAST_SUB_BLOCK.get(dtype, LEAST_OTHER)))


def _sub_blocks(start: int, end: int, least: int) -> Iterator[SubBlock]:
    middle = start + ceil_div(end - start, 2 * GRAIN) * GRAIN
    if min(middle - start, end - middle) < least:
        yield SubBlock(slice(start, end), slice(start, end))
        return
    yield from _sub_blocks(start, middle, least)
    yield SubBlock(slice(middle, end), slice(start, middle))
    yield from _sub_blocks(middle, end, least)


@lru_cache(maxsize=1024)
def computed(size: int, dtype: str = "float32") -> int:
    """Elements of a block on the diagonal that are computed."""
    sub_blocks = triangle(size, dtype)
    return sum(
        (p.rows.stop - p.rows.start) * (p.columns.stop - p.columns.start) for p in sub_blocks
    )


@lru_cache(maxsize=1024)
def on_diagonal(size: int, dtype: str = "float32") -> int:
    """Of these, elements of sub-blocks that reach the diagonal: of one array on both sides."""
    return sum(
        (p.rows.stop - p.rows.start) ** 2 for p in triangle(size, dtype) if p.rows == p.columns
    )
