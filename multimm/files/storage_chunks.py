"""Storage chunks, which are decoded as a whole: read box by box, and what that takes.

A library that is asked for many chunks decodes several at a time, each beside the block that is
read: ten chunks of 40 MB took 384 MB for a block of 33 MB. Asked box by box it holds no more than
one chunk, or a few small ones. Plans are told what that is, by what was measured: the peak of the
process's resident memory beside a thin block of one chunk of 80 MB, by Zarr 3.1 and h5py 3.16 (HDF5
2.0), with `MALLOC_TRIM_THRESHOLD_` as Dask's nannies set it; in brackets what the chunk is stored
in, MB:

- Zarr: 80 uncompressed, in any order of bytes or axes; zstd 154 (74), Blosc 150 (69), gzip 208
  (24), which Python joins of pieces.
- HDF5: 0.6 without filters, 80 with checksums alone, LZF 118 (38), gzip 128 (24), gzip behind
  shuffle 160 (17).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from math import prod
from typing import Any

from multimm.files.stored import Where
from multimm.planning.matrix import Storage

#: Bytes of small storage chunks that are read at a time: Zarr was as fast in boxes of 8 MB as with
#: chunks of 0.06 to 1 MB all at once.
AT_ONCE = 8_000_000
#: Codecs that write into memory of the decoded size at once.
DIRECT = {"zstd", "blosc", "lz4"}
#: Those of zlib's speed, or slower.
SLOW = {"gzip", "zlib", "bz2", "lzma"}
#: Those that give a view of what they are given, or none at all.
FREE = {"transpose", "bitround", "crc32c"}
#: HDF5's own filters, by number: deflate, shuffle, and checksums, which are cut off.
DEFLATE, CHECKSUM = 1, 3
#: Of chunks that are more, nobody asks HDF5 how large each is stored: arbitrary, some milliseconds.
ASKED = 1000


def boxes(where: Where, unit: Sequence[int], itemsize: int) -> Iterator[Where]:
    """Cut a rectangle at the edges of storage chunks, into boxes that cover it once, in C order.

    `unit` is a storage chunk: what is decoded as a whole; those that a box touches have at most
    `AT_ONCE` bytes, unless one alone has more.

    >>> list(boxes((slice(1, 6),), (2,), AT_ONCE // 4))
    [(slice(1, 4, None),), (slice(4, 6, None),)]
    """
    unit = [max(1, edge) for edge in unit]
    size, cuts = itemsize * prod(unit), []
    # The last axis first: chunks that follow each other in C order are likely to on disk.
    for at, edge in zip(reversed(where), reversed(unit), strict=True):
        first, last = at.start // edge, max(at.start + 1, at.stop - 1) // edge
        count = max(1, min(last - first + 1, AT_ONCE // size))
        size *= count
        starts = range(first * edge, max(at.stop, at.start + 1), count * edge)
        cuts.append([slice(max(at.start, x), min(at.stop, x + count * edge)) for x in starts])
    yield from product(*reversed(cuts))


def box_by_box(
    block: Any,
    where: Where,
    parts: Sequence[Where],
    do: Callable[[Any, Where], None],
    threads: int,
) -> None:
    """Do it with each of some boxes and with the block's part that it is, so many at a time."""

    def one(box: Where) -> None:
        sides = zip(box, where, strict=True)
        do(block[tuple(slice(a.start - b.start, a.stop - b.start) for a, b in sides)], box)

    if min(threads, len(parts)) < 2:
        for part in parts:
            one(part)
        return
    with ThreadPoolExecutor(min(threads, len(parts))) as pool:
        for _ in pool.map(one, parts):
            pass


def of_zarr(array: Any, stored: int | None) -> Storage:
    """Storage of a Zarr array whose largest file has so many bytes, None where nobody knows."""
    chunk = tuple(max(1, int(edge)) for edge in array.chunks)
    itemsize, shape = array.dtype.itemsize, array.shape
    one = prod(chunk) * itemsize
    count = prod(max(1, -(-size // edge)) for size, edge in zip(shape, chunk, strict=True))
    at_once = max(1, min(count, AT_ONCE // max(1, one)))  # see `boxes`
    decoded = at_once * one
    encoded = decoded if stored is None else min(decoded, at_once * stored)
    names = [_name_of(codec) for codec in (*(array.filters or ()), *(array.compressors or ()))]
    names = [name for name in names if name not in FREE]
    held = encoded if names else decoded
    # Zarr's threads let go of a chunk when they run again: the next one is read meanwhile.
    left = decoded + encoded * bool(names)
    if names:  # each is given what the one before returns
        held += decoded * (1 + (len(names) > 1 or names[0] not in DIRECT))
    if "gzip" in names:
        held += encoded
    return Storage(chunk, itemsize, held, decoded, left, _speed(names))


def _name_of(codec: Any) -> str:
    """A codec as Zarr's specification calls it: of version 2 by its id, of 3 by its class."""
    found = getattr(codec, "codec_id", None) or type(codec).__name__.removesuffix("Codec")
    return str(found).lower().removeprefix("numcodecs.")


def _speed(names: list[str]) -> str:
    if not names:
        return ""
    return "slow" if SLOW & set(names) else "other"


def of_hdf5(dataset: Any) -> Storage | None:
    """Storage of an HDF5 dataset; None where what is wanted is read without the rest of a chunk."""
    if dataset.chunks is None:
        return None
    properties = dataset.id.get_create_plist()
    filters = {properties.get_filter(i)[0] for i in range(properties.get_nfilters())}
    if not filters:
        return None
    itemsize = dataset.dtype.itemsize
    one = prod(dataset.chunks) * itemsize
    if filters == {CHECKSUM}:
        return Storage(dataset.chunks, itemsize, one, codec="other")
    return Storage(
        dataset.chunks,
        itemsize,
        min(one, _largest(dataset, one)) + 2 * one,
        codec="slow" if DEFLATE in filters else "other",
    )


def _largest(dataset: Any, most: int) -> int:
    """Bytes of the largest chunk as it is stored; `most` where there are many."""
    count = dataset.id.get_num_chunks()
    if count > ASKED:
        return most
    return max((dataset.id.get_chunk_info(i).size for i in range(count)), default=0)
