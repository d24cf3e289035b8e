"""What it takes to bring an operand, or the C that is added, into other blocks than it comes in.

Blocks are cut at the boundaries of the new ones, where they lie, and sub-blocks joined where they
are needed (`multimm.graph.lowering.rechunk`):

    old        |     0     |     1     |   sub-blocks: the spans between all boundaries
    new        |  0  |    1    |    2  |   here 4: two of each old block; the middle two
    sub-block  |  0  |  1  | 2 |  3    |   are joined to a new one

What one worker has of a new block travels in one coalesced transfer.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from itertools import accumulate, pairwise, product, starmap
from math import ceil, prod
from operator import attrgetter
from typing import Any, NamedTuple

from multimm.planning.matrix import MatrixSpec
from multimm.planning.tiling.grid import Blocks, remembered, spans

Where = tuple[slice, ...]
Index = tuple[int, ...]


class Rechunk(NamedTuple):
    """Operands that are cut into other blocks: what is expected of blocks that lie anywhere.

    Of those in the order in which they lie it is known what travels: see `Distribution.away`.
    """

    nbytes: int  #: that travel for it
    tasks: int  #: that coalesce what travels, and that join sub-blocks
    fetched: int  #: coalesced transfers, and sub-blocks that travel alone
    sub_blocks: int  #: that are copied, each as often as that is done
    copied: int  #: bytes

    @classmethod
    def of_all(cls, each: Iterable[Rechunk]) -> Rechunk:
        """The sums."""
        return cls(*map(sum, zip(cls(0, 0, 0, 0, 0), *each, strict=True)))


class Cuts(NamedTuple):
    """Of one array: each sub-block that is not a whole block is cut, each new block is joined."""

    sub_blocks: int  #: but those that are blocks before and after
    cut: int  #: sub-blocks
    joined: int  #: blocks


def once(
    spec: MatrixSpec,
    blocks: tuple[Blocks, ...],
    workers: int,
    *,
    beyond: bool,
    away: float | None = None,
) -> Rechunk:
    """What tasks of their own do that bring a matrix into other blocks.

    A sub-block is rarely where it will be needed, unless there is one worker, or unless it is known
    which share of all is `away`. What lies `beyond` the grid is sent to a worker of it, to be cut,
    and on from there.
    """
    found, away = cuts(spec.chunks, blocks), 1 - 1 / workers if away is None else away
    arriving, sources = found.sub_blocks * away, found.joined * (workers - 1)
    # Where several come from each worker; else what need not be cut travels as it is.
    coalesced, coalesced_transfers = (
        (arriving, sources) if arriving > sources else (2 * [found.cut * away])
    )
    copied = spec.nbytes * (1 + coalesced / max(1, found.sub_blocks))
    fetched = min(arriving, sources) + found.sub_blocks * beyond
    return Rechunk(
        int(spec.nbytes * (away + beyond)),
        found.joined + ceil(coalesced_transfers),
        ceil(fetched),
        found.sub_blocks + ceil(coalesced),
        int(copied),
    )


@remembered
def away(before: Blocks, lie: Blocks, after: Blocks, owners: Blocks) -> float:
    """The share of an axis that does not lie with those who keep its new blocks.

    >>> away((4, 4), (0, 1), (2, 6), (0, 1))
    0.25
    """
    ends, new, start, near = [*accumulate(after)], 0, 0, 0
    for size, at in zip(before, lie, strict=True):
        end = start + size
        while start < end:
            stop = min(end, ends[new])
            near += (stop - start) * (owners[new] == at)
            new, start = new + (stop == ends[new]), stop
    return 1 - near / max(1, start)


def within(spec: MatrixSpec, blocks: tuple[Blocks, ...], uses: int, *, beyond: bool) -> Rechunk:
    """What the products of one worker do that cut and join what they need, each for itself."""
    sub_blocks = cuts(spec.chunks, blocks).sub_blocks * uses
    return Rechunk(spec.nbytes * beyond, 0, sub_blocks * beyond, sub_blocks, spec.nbytes * uses)


def added(spec: MatrixSpec, blocks: tuple[Blocks, ...], workers: int, *, beyond: bool) -> Rechunk:
    """The same as `once` for what is used once: its users join it, and need no tasks for that."""
    found = once(spec, blocks, workers, beyond=beyond)
    return found._replace(tasks=found.tasks - cuts(spec.chunks, blocks).joined)


def cuts(before: tuple[Blocks, ...], after: tuple[Blocks, ...]) -> Cuts:
    """What brings an array into other blocks.

    >>> cuts(((3, 3),), ((1, 2, 3),))
    Cuts(sub_blocks=2, cut=2, joined=2)
    """
    axes = starmap(_along_axis, zip(before, after, strict=True))
    sub_blocks, whole, same, blocks = (prod(counts) for counts in zip(*axes, strict=True))
    return Cuts(sub_blocks - same, sub_blocks - whole, blocks - same)


@remembered
def _along_axis(before: Blocks, after: Blocks) -> tuple[int, int, int, int]:
    """Sub-blocks, those of them that are whole old blocks, and new ones too, and new blocks."""
    old, new = ([0, *accumulate(blocks)] for blocks in (before, after))
    sub_blocks = {*pairwise(sorted({*old, *new}))}
    whole = sub_blocks & {*pairwise(old)}
    return len(sub_blocks), len(whole), len(whole & {*pairwise(new)}), len(after)


class Part(NamedTuple):
    """A sub-block: what a rectangle of an array has of one of its blocks."""

    of: Any  #: the index of the block, or the key of what has it
    size: Index  #: of what has it
    cut: Where  #: which part of that it is
    to: Where  #: where in the rectangle it goes

    @property
    def shape(self) -> Index:
        """Its own."""
        return shape_of(self.to)

    @property
    def whole(self) -> bool:
        """Whether it is all of that."""
        return self.shape == self.size


def cuts_of(lie: Iterable[list[slice]], where: Where) -> list[Part]:
    """Of each block that a rectangle has a part of.

    Parameters
    ----------
    lie : iterable of list of slice
        Along each axis the `offsets` of blocks: found once for all rectangles of an array.
    where : tuple of slice
    """
    axes = starmap(along, zip(lie, where, strict=True))
    return [Part(*zip(*parts, strict=True)) for parts in product(*axes)]


def along(lie: list[slice], at: slice) -> list[tuple[int, int, slice, slice]]:
    """Of each block that a stretch has a part of: its number and size, which part, and where to.

    >>> along(offsets((4, 4, 4)), slice(2, 8))
    [(0, 4, slice(2, 4, None), slice(0, 2, None)), (1, 4, slice(0, 4, None), slice(2, 6, None))]
    """
    if at.start == at.stop:  # of something without elements
        return [(0, lie[0].stop, slice(0, 0), slice(0, 0))]
    found = []
    for number in range(bisect_right(lie, at.start, key=attrgetter("stop")), len(lie)):
        own = lie[number]
        if own.start >= at.stop:
            break
        start, stop = max(own.start, at.start), min(own.stop, at.stop)
        cut = slice(start - own.start, stop - own.start)
        to = slice(start - at.start, stop - at.start)
        found.append((number, own.stop - own.start, cut, to))
    return found


def offsets(blocks: Blocks) -> list[slice]:
    """Where each block lies along its dimension.

    >>> offsets((4, 2))
    [slice(0, 4, None), slice(4, 6, None)]
    """
    return [slice(*span) for span in spans(blocks)]


def shape_of(where: Where) -> tuple[int, ...]:
    """The shape of a rectangle.

    >>> shape_of((slice(2, 8), slice(0, 3)))
    (6, 3)
    """
    return tuple(at.stop - at.start for at in where)


def size_of(chunks: tuple[Blocks, ...], at: Index) -> tuple[int, ...]:
    """The shape of a block.

    >>> size_of(((4, 2), (3,)), (1, 0))
    (2, 3)
    """
    return tuple(blocks[i] for blocks, i in zip(chunks, at, strict=True))
