"""How C is handed out: in chunks that are cut out of the plan's blocks, or joined of them.

What is multiplied at once and what the result comes in are two things. Where every chunk is part of
one block, or all of it, nothing travels: the worker that has the block copies the chunk out of it.
A chunk of several blocks is made by the worker that has most of it, of what the others send:

    blocks of C     |    w0    |    w1    |    w0    |
    chunks          | w0  | w0 |    w1       |   w0  |     one part of w0's block goes to w1
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate, product
from math import prod
from typing import NamedTuple

from multimm.planning.tiling.grid import Blocks, remembered
from multimm.planning.tiling.rechunk import Index, Where, cuts_of, offsets, shape_of, size_of


class Part(NamedTuple):
    """What a chunk has of a block of C."""

    block: Index  #: as stored
    size: Index  #: of the block
    cut: Where  #: of the block
    to: Where  #: of the chunk
    rank: int  #: of the worker with the block


class Chunk(NamedTuple):
    """A chunk of C, and what it is made of."""

    at: Index  #: as stored
    where: Where  #: in C
    owner: int  #: the number of the worker that makes it
    parts: list[Part]


def chunks_of(
    chunks: tuple[Blocks, ...], blocks: tuple[Blocks, ...], owners: Sequence[int]
) -> Iterator[Chunk]:
    """Every chunk of C, in C order, of blocks whose workers have these numbers."""
    of_block = dict(zip(product(*(range(len(x)) for x in blocks)), owners, strict=True))
    numbers, lie = product(*(range(len(x)) for x in chunks)), [*map(offsets, blocks)]
    for index, where in zip(numbers, product(*map(offsets, chunks)), strict=True):
        parts = [
            Part(at, size_of(blocks, at), cut, to, of_block[at])
            for at, cut, to in cuts_of(lie, where)
        ]
        yield Chunk(index, where, _owner(parts), parts)


def _owner(parts: list[Part]) -> int:
    """The worker that has most of a chunk."""
    held: Counter[int] = Counter()
    for part in parts:
        held[part.rank] += prod(shape_of(part.to))
    return max(held, key=held.__getitem__)


def senders(chunk: Chunk) -> list[int]:
    """The workers that cut out what they send: who sends one whole block sends it as it is."""
    found: dict[int, list[Part]] = {}
    for part in chunk.parts:
        found.setdefault(part.rank, []).append(part)
    return [
        rank
        for rank, own in found.items()
        if rank != chunk.owner and not (len(own) == 1 and shape_of(own[0].to) == own[0].size)
    ]


# Layouts that differ in their k-tiles hand out the same.
@remembered
def counted(
    chunks: tuple[Blocks, ...], blocks: tuple[Blocks, ...], owners: Blocks, workers: int
) -> tuple[int, int]:
    """Tasks that hand chunks out, and elements that travel for it between so many workers."""
    tasks = moved = 0
    for chunk in chunks_of(chunks, blocks, owners):
        tasks += 1 + len(senders(chunk))
        owner = chunk.owner % workers
        moved += sum(prod(shape_of(x.to)) for x in chunk.parts if x.rank % workers != owner)
    return tasks, moved


@remembered
def within(chunks: Blocks, blocks: Blocks) -> bool:
    """Whether every chunk is part of one block.

    >>> within((2, 2, 1), (4, 1)), within((3, 2), (4, 1))
    (True, False)
    """
    return {*accumulate(blocks)} <= {*accumulate(chunks)}
