"""How a matrix lies in a file: storage chunks, each of which is decoded as a whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod

from multimm.planning.tiling.grid import Blocks, remembered


@dataclass(frozen=True)
class Storage:
    """Storage chunks of a matrix, and what the reading of any block of it takes.

    Parameters
    ----------
    chunk : tuple of int
        Shape of a storage chunk. A read that touches it decodes all of it.
    itemsize : int
        Bytes of an element.
    decoding : int
        Bytes that a read holds while it decodes: the chunk as it is stored, decoded, and between.
    copied : int
        Bytes of decoded elements that are copied into the block at a time, at most.
    left : int
        Bytes of the chunk before that may not be free by then.
    codec : str
        What the speed of decoding depends on: a key of `multimm.planning.cost.reading.RATES`.
    """

    chunk: tuple[int, ...]
    itemsize: int
    decoding: int
    copied: int = 0
    left: int = 0
    codec: str = ""

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a decoded chunk."""
        return prod(self.chunk) * self.itemsize

    @property
    def T(self) -> Storage:
        """The same of the transposed matrix."""
        return replace(self, chunk=(*self.chunk[:-2], self.chunk[-1], self.chunk[-2]))

    def held(self, block: int) -> int:
        """Bytes that the reading of a block of so many bytes takes beside those in flight.

        The block itself is among them: reads take long, and of unequal time on different workers,
        so what one has done with is still held for another that is behind.
        """
        return self.decoding + self.left + min(self.copied, block) + block

    def decoded(self, blocks: Sequence[Blocks]) -> int:
        """How many chunks are decoded when each of these blocks is read once."""
        return prod(map(_touched, blocks, self.chunk))


@remembered
def _touched(blocks: Blocks, chunk: int) -> int:
    """Chunks that blocks along an axis touch, one that two of them touch counted twice.

    >>> _touched((4, 4), 4), _touched((3, 5), 4), _touched((2, 2, 2, 2), 8)
    (2, 3, 4)
    """
    ends = [*accumulate(blocks)]
    spans = zip([0, *ends], ends, strict=False)
    return sum((end - 1) // chunk - start // chunk + 1 for start, end in spans if end > start)
