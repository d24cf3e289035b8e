"""What it takes to bring an operand from the blocks that it comes in into others.

Blocks are cut at the boundaries of the new ones, where they lie, and pieces joined where they are
needed (`multimm.graph.recut`):

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
    tasks: int  #: that cut blocks, at most, and that join pieces
    pieces: int  #: that are cut or joined, each as often as that is done
    copied: int  #: bytes


class Cuts(NamedTuple):
    """Of one array: each piece that is not a whole block is cut, each new block is joined."""

    pieces: int
    cut: int  #: pieces
    joined: int  #: blocks


def cuts(before: tuple[Blocks, ...], after: tuple[Blocks, ...]) -> Cuts:
    """What brings an array into other blocks.

    >>> cuts(((3, 3),), ((1, 2, 3),))
    Cuts(pieces=3, cut=2, joined=2)
    """
    axes = starmap(_along_axis, zip(before, after, strict=True))
    pieces, whole, same, blocks = (prod(counts) for counts in zip(*axes, strict=True))
    return Cuts(pieces, pieces - whole, blocks - same)


@remembered
def _along_axis(before: Blocks, after: Blocks) -> tuple[int, int, int, int]:
    """Pieces, those of them that are whole old blocks, and new ones too, and new blocks."""
    old, new = ([0, *accumulate(blocks)] for blocks in (before, after))
    pieces = {*pairwise(sorted({*old, *new}))}
    whole = pieces & {*pairwise(old)}
    return len(pieces), len(whole), len(whole & {*pairwise(new)}), len(after)
