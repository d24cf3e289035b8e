"""How packed operands are laid out, and how kernels/split_pack.cu cuts one into tasks: integers.

Figures of the latter are what was fastest on an H200.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

from multimm.gpu.arch import RESERVED_BYTES, ArchLimits

SLAB = 64  #: of k; tiles are as high as they are wide
ROW_ALIGN = 128  #: rows are padded to a multiple
#: How many FP16 numbers stand for a float32, by precision.
PARTS = {"float32": 2, "tf32": 1}
PANEL = 64  #: rows
#: Residuals that a block may have; with more it keeps its source instead. Normal data has a handful
#: in 16384 x 16384, lognormal data of sigma 1 some 100. Arbitrary, but so many still cost little
#: beside the product: they are one of at most 1024 rows and 1024 terms.
RESIDUAL_CAP = 1024
#: Thread blocks that share a multiprocessor, and the float32 tiles that each may hold: more blocks
#: of fewer tiles are slower.
BLOCKS, MOST_HELD = 2, 6
#: Shared memory for a tile, and for all else, in bytes.
_TILE_BYTES, _OTHER_BYTES = 4 * SLAB * SLAB, 4 * 9 * SLAB
#: Times that a block looks for the others' maxima, about 1 ms, before it finds them alone, which
#: takes 0.2 ms by an estimate. Of large squares 95 of 100 blocks wait for 8 us or less (H200).
PATIENCE = 2**10


def held_on(limits: ArchLimits) -> int:
    """How many tiles a block holds on a GPU."""
    room = limits.shared_bytes // BLOCKS - RESERVED_BYTES - _OTHER_BYTES
    return max(1, min(MOST_HELD, room // _TILE_BYTES))


def pack_shared_bytes(held: int) -> int:
    """Dynamic shared memory of a block that holds so many tiles."""
    return held * _TILE_BYTES + _OTHER_BYTES


def pack_defines(parts: int, held: int) -> tuple[tuple[str, int], ...]:
    """The compile-time parameters of kernels/split_pack.cu."""
    return (("PARTS", parts), ("BLOCKS", BLOCKS), ("HELD", held), ("CAP", RESIDUAL_CAP))


def residual_defines(parts: int) -> tuple[tuple[str, int], ...]:
    """The compile-time parameters of kernels/split_residuals.cu."""
    return (("PARTS", parts), ("CAP", RESIDUAL_CAP))


def tiles_for(rows: int, k: int) -> tuple[int, int]:
    """Panels of 64 rows, padded to pairs, and slabs of 64 k."""
    return -(-rows // ROW_ALIGN) * (ROW_ALIGN // PANEL), -(-k // SLAB)


class Cut(NamedTuple):
    """How kernels/split_pack.cu cuts an operand into tasks."""

    run: int  #: slabs that one block packs
    tasks: int
    at_once: bool  #: whether the blocks of a panel run at one time: no launch has to find maxima


@functools.lru_cache(maxsize=1024)
def cut_for(rows: int, k: int, held: int, multiprocessors: int) -> Cut:
    """Return how an operand of that size is cut on a GPU.

    Every multiprocessor has something to do if that is possible. Half of the blocks that run at one
    time may share a panel: the others copy or write while these wait.
    """
    panels, slabs = tiles_for(rows, k)
    if not panels or not slabs:
        return Cut(1, 0, True)
    places = multiprocessors * BLOCKS
    run = max(1, min(held, -(-panels * slabs // places)))
    blocks = -(-slabs // run)
    return Cut(run, panels * blocks, blocks <= places // 2)
