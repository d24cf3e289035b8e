"""How C is handed out: in chunks that are cut out of the plan's blocks, or joined of them.

What is multiplied at once and what the result comes in are two things. Where every chunk is part of
one block, or all of it, nothing travels: the worker that has the block copies the chunk out of it.
A chunk of several blocks is made by the worker that has most of it, of what the others send:

    blocks of C     |    w0    |    w1    |    w0    |
    chunks          | w0  | w0 |    w1       |   w0  |     one part of w0's block goes to w1
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, product
from math import prod
from typing import NamedTuple

from multimm.planning.tiling.grid import Blocks, remembered
from multimm.planning.tiling.rechunk import Index, Part, Where, along, cuts_of, offsets


class Chunk(NamedTuple):
    """A chunk of C, or of what else is made of other blocks, and what it is made of."""

    at: Index  #: as stored
    where: Where  #: in C
    owner: int  #: the number of the worker that makes it: who has most of it
    parts: dict[int, list[Part]]  #: by the number of the worker with the blocks


def chunks_of(
    chunks: tuple[Blocks, ...], blocks: tuple[Blocks, ...], owners: Sequence[int]
) -> Iterator[Chunk]:
    """Every chunk of an array, in C order, of blocks whose workers have these numbers."""
    of_block = dict(zip(product(*(range(len(x)) for x in blocks)), owners, strict=True))
    numbers, lie = product(*(range(len(x)) for x in chunks)), [*map(offsets, blocks)]
    for index, where in zip(numbers, product(*map(offsets, chunks)), strict=True):
        parts: dict[int, list[Part]] = {}
        for part in cuts_of(lie, where):
            parts.setdefault(of_block[part.of], []).append(part)
        held = {rank: sum(prod(part.shape) for part in own) for rank, own in parts.items()}
        yield Chunk(index, where, max(held, key=held.__getitem__), parts)


def senders(parts: Mapping[int, Sequence[Part]], owner: int) -> list[int]:
    """The workers that cut out what they send: who sends one whole block sends it as it is."""
    return [
        rank
        for rank, own in parts.items()
        if rank != owner and not (len(own) == 1 and own[0].whole)
    ]


# Layouts that differ in their k-tiles hand out the same.
@remembered
def counted(
    chunks: tuple[Blocks, ...], blocks: tuple[Blocks, ...], owners: Blocks, workers: int
) -> tuple[int, int]:
    """Tasks that hand chunks out, and elements that travel for it between so many workers.

    Of the chunks that `chunks_of` makes, none of which is made for it.
    """
    axes, step = [], 1
    for own, lie in zip(reversed(chunks), reversed(blocks), strict=True):
        axes.append(_parts_along(own, lie, step))
        step *= len(lie)
    tasks, moved = prod(map(len, chunks)), 0
    for places in product(*reversed(axes)):
        if all(len(parts) == 1 for parts in places):
            continue
        held: dict[int, int] = {}
        whole: dict[int, bool] = {}  # of a worker: all that it has is one block
        for part in product(*places):
            numbers, lengths, sizes = zip(*part, strict=True)
            rank = owners[sum(numbers)]
            whole[rank] = rank not in held and lengths == sizes
            held[rank] = held.get(rank, 0) + prod(lengths)
        owner = max(held, key=held.__getitem__)
        tasks += sum(rank != owner and not whole[rank] for rank in held)
        moved += sum(size for rank, size in held.items() if (rank - owner) % workers)
    return tasks, moved


def _parts_along(chunks: Blocks, blocks: Blocks, step: int) -> list[list[tuple[int, int, int]]]:
    """By chunk, of each block that it has a part of: `step` times its number, the part, and all."""
    lie = offsets(blocks)
    return [
        [(number * step, cut.stop - cut.start, size) for number, size, cut, _ in along(lie, at)]
        for at in offsets(chunks)
    ]


@remembered
def within(chunks: Blocks, blocks: Blocks) -> bool:
    """Whether every chunk is part of one block.

    >>> within((2, 2, 1), (4, 1)), within((3, 2), (4, 1))
    (True, False)
    """
    return {*accumulate(blocks)} <= {*accumulate(chunks)}
