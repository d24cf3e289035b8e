"""A rectangle of a stored matrix in boxes of whole storage chunks, read one after the other.

A library that is asked for many chunks decodes several at a time, each beside the block that is
read: ten chunks of 40 MB took 384 MB for a block of 33 MB. Asked box by box it holds no more than
one chunk, or a few small ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import product

from multimm.files.stored import Where

#: Bytes of small storage chunks that are read at a time: Zarr was as fast in boxes of 8 MB as with
#: chunks of 0.06 to 1 MB all at once.
AT_ONCE = 8_000_000


def boxes(where: Where, unit: Sequence[int], itemsize: int, most: int = AT_ONCE) -> Iterator[Where]:
    """Cut a rectangle at the edges of storage chunks, into boxes that cover it once, in C order.

    `unit` is a storage chunk: what is decoded as a whole; those that a box touches have at most
    `most` bytes, unless one alone has more.

    >>> list(boxes((slice(1, 6),), (2,), 1, 4))
    [(slice(1, 4, None),), (slice(4, 6, None),)]
    """
    unit = [max(1, edge) for edge in unit]
    size, cuts = itemsize * math.prod(unit), []
    # The last axis first: chunks that follow each other in C order are likely to on disk.
    for at, edge in zip(reversed(where), reversed(unit), strict=True):
        first, last = at.start // edge, max(at.start + 1, at.stop - 1) // edge
        count = max(1, min(last - first + 1, most // size))
        size *= count
        starts = range(first * edge, max(at.stop, at.start + 1), count * edge)
        cuts.append([slice(max(at.start, x), min(at.stop, x + count * edge)) for x in starts])
    yield from product(*reversed(cuts))


def within(box: Where, where: Where) -> Where:
    """Where a box lies in the block that is read of a rectangle."""
    return tuple(
        slice(part.start - whole.start, part.stop - whole.start)
        for part, whole in zip(box, where, strict=True)
    )
