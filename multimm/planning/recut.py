"""What it takes to bring an operand from the blocks that it comes in into others.

Dask cuts a block at the boundaries of the new ones, and joins pieces:

    old   |     0     |     1     |        pieces: the spans between all boundaries
    new   |  0  |    1    |    2  |        here 4: two of each old block; the middle two
    piece |  0  |  1  | 2 |  3    |        are joined to a new one
"""

from __future__ import annotations

from itertools import accumulate, pairwise, starmap
from math import prod
from typing import NamedTuple

from multimm.planning.grid import Blocks, remembered


class Recut(NamedTuple):
    """Operands that are cut into other blocks before a product."""

    nbytes: int  #: that travel for it, at most
    tasks: int  #: that cut blocks, and that join pieces
    pieces: int  #: that are cut or joined, each as often as that is done
    copied: int  #: bytes


def cuts(before: tuple[Blocks, ...], after: tuple[Blocks, ...]) -> tuple[int, int]:
    """Tasks that bring an array into other blocks, and pieces that they make.

    A block that is not cut and a piece that nothing is joined to need no task.

    >>> cuts(((3, 3),), ((1, 3, 2),))
    (5, 4)
    """
    axes = starmap(_along_axis, zip(before, after, strict=True))
    pieces, whole, alone, blocks = (prod(counts) for counts in zip(*axes, strict=True))
    return (pieces - whole) + (blocks - alone), pieces


@remembered
def _along_axis(before: Blocks, after: Blocks) -> tuple[int, int, int, int]:
    """Pieces, those of them that are whole old blocks and whole new ones, and new blocks."""
    old, new = ([0, *accumulate(blocks)] for blocks in (before, after))
    pieces = {*pairwise(sorted({*old, *new}))}
    return len(pieces), len(pieces & {*pairwise(old)}), len(pieces & {*pairwise(new)}), len(after)
