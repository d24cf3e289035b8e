"""Memory for what is decoded, used again for the next block.

New memory costs more than decoding, where free memory is given back at once, as in Dask's workers:
a chunk of 64 MB of noise, zstd, took 0.19 s of a core with new memory for what is read and decoded,
and 0.055 with that of the chunk before (an x86 server, huge pages).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

#: Seconds for which memory is kept that nobody uses; arbitrary: longer than a block's product.
KEPT = 1.0
#: Bytes that sizes are multiples of: chunks are stored in nearly as many, seldom in as many.
UNIT = 2**21


class Scratch:
    """Memory that is lent to one thread after another.

    No more is kept than was lent at a time, and nothing once nobody has used it for `kept` seconds.
    """

    def __init__(self, kept: float = KEPT) -> None:
        self._kept = kept
        self._free: list[Bytes] = []
        self._lent = 0
        self._used = 0.0  # when something was given back
        self._watched = False
        self._lock = threading.Lock()

    @contextmanager
    def lent(self, nbytes: int) -> Iterator[Bytes]:
        """So many bytes, which hold anything."""
        memory = self._take(nbytes)
        try:
            yield memory[:nbytes]
        finally:
            self._give_back(memory)

    def _take(self, nbytes: int) -> Bytes:
        with self._lock:
            self._lent += 1
            enough = [at for at, memory in enumerate(self._free) if memory.size >= nbytes]
            if enough:
                return self._free.pop(min(enough, key=lambda at: self._free[at].size))
            if self._free:  # in place of one that is too small
                self._free.pop()
        return np.empty(-(-nbytes // UNIT) * UNIT, np.uint8)

    def _give_back(self, memory: Bytes) -> None:
        with self._lock:
            self._lent -= 1
            self._free.append(memory)
            self._used = time.monotonic()
            if not self._watched:
                self._watched = True
                self._look_in(self._kept)

    def _look_in(self, seconds: float) -> None:
        timer = threading.Timer(seconds, self._let_go)
        timer.daemon = True
        timer.start()

    def _let_go(self) -> None:
        with self._lock:
            left = self._used + self._kept - time.monotonic()
            if self._lent or left > 0:
                self._look_in(max(left, self._kept / 2))
                return
            self._free.clear()
            self._watched = False


#: This process's.
SCRATCH = Scratch()
