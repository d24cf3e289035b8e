"""Chunks of a local Zarr array, decoded by the thread that wants them.

Zarr reads a chunk in steps of several threads, into memory that is new each time. In a worker of
Dask's, whose nanny has free memory given back at once (`MALLOC_TRIM_THRESHOLD_`), new memory costs
more than decoding. Noise in chunks of 4 MB, in the page cache, GB per second of a core:

| | uncompressed | Blosc, LZ4 | zstd | gzip |
|---|---|---|---|---|
| by Zarr 3.1, chunk by chunk | 0.92 | 0.61 | 0.43 | 0.16 |
| here | 4.8 | 1.9 | 0.98 | 0.20 |

Beside an event loop that polls, as UCXX's does, each step waits for the interpreter as well.

Codecs are numcodecs', as Zarr's are. Whatever is out of the ordinary is left to Zarr: other codecs,
a chunk that is missing or of another size. So are messages, but for what Blosc would not notice.
"""

from __future__ import annotations

import math
import os
from importlib import import_module
from typing import Any, Self

import numpy as np

from multimm.files.scratch import SCRATCH, Bytes
from multimm.files.stored import StoredMatrix, Where
from multimm.files.zarr_metadata import CODECS, written

#: In the last byte before a chunk is decoded: still there, it may have been a shorter one.
UNTOUCHED = 0xA5
#: Bytes, of which the last four are the size of what it begins.
BLOSC_HEADER = 16


class WholeChunks:
    """Reads boxes that lie in one chunk each: see `of`."""

    def __init__(self, folder: str, array: Any, dtype: np.dtype[Any], codec: Any) -> None:
        self.folder, self.array, self.dtype, self.codec = folder, array, dtype, codec

    @classmethod
    def of(cls, matrix: StoredMatrix, folder: str, array: Any) -> Self | None:
        """For an array whose chunks are decoded here; None if Zarr has to."""
        encoding = None if matrix.place.remote else written(folder)
        if encoding is None or encoding.chunk != array.chunks:
            return None
        dtype, codec = encoding.dtype, None
        if dtype != array.dtype.newbyteorder(dtype.byteorder):
            return None
        if encoding.codec is not None:
            try:
                codec = import_module("numcodecs").get_codec({"id": encoding.codec})
            except (ImportError, ValueError):  # built without it
                return None
        return cls(folder, array, dtype, codec)

    @property
    def speed(self) -> str:
        """What `planning.cost.reading` calls the speed of decoding."""
        return "" if self.codec is None else CODECS[self.codec.codec_id]

    def read(self, target: np.ndarray[Any, Any], box: Where) -> None:
        """Read a box of the array that lies in one chunk into an array of its shape."""
        chunk = self.array.chunks
        at = tuple(side.start // edge for side, edge in zip(box, chunk, strict=True))
        inside = tuple(
            slice(side.start - n * edge, side.stop - n * edge)
            for side, n, edge in zip(box, at, chunk, strict=True)
        )
        path = f"{self.folder}/{self.array.metadata.encode_chunk_key(at)}"
        if target.shape == chunk and target.flags.c_contiguous and target.dtype == self.dtype:
            if not self._decode(path, target.reshape(-1).view(np.uint8)):
                target[...] = self.array[box]
            return
        with SCRATCH.lent(math.prod(chunk) * self.dtype.itemsize) as decoded:
            if self._decode(path, decoded):
                target[...] = decoded.view(self.dtype).reshape(chunk)[inside]
                return
        target[...] = self.array[box]

    def _decode(self, path: str, decoded: Bytes) -> bool:
        """Read a chunk's file, and decode it; whether it is a chunk of that size."""
        try:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            size = os.fstat(file).st_size
            if self.codec is None:
                return size == decoded.size and os.readv(file, [decoded.data]) == size
            with SCRATCH.lent(size) as encoded:
                if os.readv(file, [encoded.data]) != size:
                    return False
                return self._decoded(path, encoded, decoded)
        finally:
            os.close(file)

    def _decoded(self, path: str, encoded: Bytes, decoded: Bytes) -> bool:
        if self.codec.codec_id == "blosc" and encoded.size < _told_by_blosc(encoded):
            raise ValueError(f"{path} is cut short")
        decoded[-1] = UNTOUCHED
        try:
            self.codec.decode(encoded, out=decoded)
        except Exception:  # Zarr says what it is
            return False
        return bool(decoded[-1] != UNTOUCHED)


def _told_by_blosc(encoded: Bytes) -> int:
    """Bytes that a Blosc buffer has by its header: its decoder believes that, and reads on."""
    header = encoded[:BLOSC_HEADER].tobytes()
    return int.from_bytes(header[-4:], "little") if len(header) == BLOSC_HEADER else BLOSC_HEADER
