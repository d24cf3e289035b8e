"""What a task of a product does, and of which block: for schedulers, errors and traces."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple


class Kind(IntEnum):
    """What a task does; of the tasks of a step, one that prepares comes before those behind it."""

    UPLOAD = 0  #: brings an array's own block to a GPU
    COALESCE = 1  #: cuts out all that a worker has for the others
    CUT = 2  #: cuts out what a worker has of one block
    JOIN = 3  #: makes an operand block of what was cut
    PACK = 4  #: brings it into the form that tensor cores take
    READ = 5  #: reads it from its source, or brings it from host memory when it is needed
    MULTIPLY = 6
    PARTIAL = 7  #: what one worker has of a block of C, where its operand stays
    ADD = 8  #: sums of split-k parts, or partial products of several workers
    FINISH = 9  #: a block of a symmetric product, from its sum
    WAIT = 10  #: a backpressure barrier
    HAND_OUT = 11  #: a chunk of C, where chunks are no blocks
    DOWNLOAD = 12  #: brings a block of C to host memory

    @property
    def prepares(self) -> bool:
        """Whether it makes what a product needs, and is none nor follows one."""
        return self < Kind.MULTIPLY


_SAID = {
    Kind.UPLOAD: "chunk {block} of {matrix} on its way to a GPU",
    Kind.COALESCE: "a coalesced transfer of {matrix}",
    Kind.CUT: "part of block {block} of {matrix}",
    Kind.JOIN: "block {block} of {matrix}, joined",
    Kind.PACK: "packed block {block} of {matrix}",
    Kind.PARTIAL: "partial product of block {block} of {matrix}",
    Kind.WAIT: "the wait",
    Kind.HAND_OUT: "chunk {block} of {matrix}",
    Kind.DOWNLOAD: "block {block} of {matrix} on its way to host memory",
}


class Label(NamedTuple):
    """What one task does.

    >>> str(Label("T", Kind.MULTIPLY, "C", (1, 2), k_tiles=(0, 3)))
    'block (1, 2) of C, k-tiles 0 to 3'
    """

    product: str  #: token of the product
    kind: Kind
    matrix: str = "C"  #: "A", "B" or "C"
    block: tuple[int, ...] = ()  #: indices; empty where it is not one block
    k_tiles: tuple[int, ...] = ()  #: first and last, where there are several
    parts: tuple[int, ...] = ()  #: first and last split-k part that are added

    def __str__(self) -> str:
        """A phrase for messages."""
        block = f"({', '.join(map(str, self.block))})"
        said = _SAID.get(self.kind, "block {block} of {matrix}")
        said = said.format(block=block, matrix=self.matrix)
        return f"{said}{_span('k-tile', self.k_tiles)}{_span('split-k part', self.parts)}"


def _span(name: str, ends: tuple[int, ...]) -> str:
    if not ends:
        return ""
    first, last = ends[0], ends[-1]
    return f", {name} {first}" if first == last else f", {name}s {first} to {last}"
