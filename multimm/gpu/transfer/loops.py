"""What a thread does that copies between host memory and a GPU, without the interpreter.

The event loop of a worker that is connected through UCXX never sleeps, and Python has it give the
interpreter to another thread after 5 ms only. Beside a thread that polls like it, lanes that ask
for the interpreter for each piece carried 4 to 14 GB/s of 50; 29, where threads give way after 10
us. So their loops are compiled, by Numba, in a second or two, once in a process: 44.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

_WORD = ctypes.c_size_t  # pointers and handles, too
#: Of threads that want the loops at once, one compiles them.
_compiling = threading.Lock()


class Loops(NamedTuple):
    """Both directions; each returns a CUresult.

    `fetch` takes the addresses of target and source, and the bytes of the array and of a piece.
    `send` takes a table with the same of each array, and the bytes of a row, which are all or
    divide a piece's, and from a row to the next one. What follows is common: which lane this is of
    how many, two pinned pieces, their events, and a stream. Of all pieces, one array's after the
    other's, lanes take one in turn.
    """

    send: Callable[..., int]
    fetch: Callable[..., int]


def loops() -> Loops:
    """Compile them, or wait until another thread has."""
    with _compiling:
        return _compiled()


@cache
def _compiled() -> Loops:
    """Compile them.

    Of two pieces, one is filled or emptied while the other one is on its way; an event says when
    the last copy from or to it is done.
    """
    from numba import njit

    to_device = _driver("cuMemcpyHtoDAsync_v2", 4)
    to_host = _driver("cuMemcpyDtoHAsync_v2", 4)
    record, wait = _driver("cuEventRecord", 2), _driver("cuEventSynchronize", 1)
    copy: Any = ctypes.CDLL(None).memcpy
    copy.argtypes, copy.restype = [_WORD] * 3, _WORD

    def send(arrays, lane, lanes, piece, other, free, done, stream):  # type: ignore[no-untyped-def]
        failed, number = 0, lane
        for i in range(len(arrays)):
            target, source, size = arrays[i, 0], arrays[i, 1], arrays[i, 2]
            step, row, stride = arrays[i, 3], arrays[i, 4], arrays[i, 5]
            pieces = (size + step - 1) // step
            while number < pieces:
                start = number * step
                part = min(step, size - start)
                failed = failed or wait(free)
                for at in range(start, start + part, row):
                    place = source + at // row * stride + at % row
                    copy(piece + at - start, place, min(row, start + part - at))
                failed = failed or to_device(target + start, piece, part, stream)
                failed = failed or record(free, stream)
                piece, other = other, piece
                free, done = done, free
                number += lanes
            number -= pieces
        return failed

    def fetch(target, source, size, step, lane, lanes, piece, other, free, done, stream):  # type: ignore[no-untyped-def]
        failed, apart = 0, lanes * step
        for start in range(lane * step, size + 2 * apart, apart):
            before = start - 2 * apart  # has arrived in this piece
            if before >= 0 and before < size:
                failed = failed or wait(free)
                copy(target + before, piece, min(step, size - before))
            if start < size:
                failed = failed or to_host(piece, source + start, min(step, size - start), stream)
                failed = failed or record(free, stream)
            piece, other = other, piece
            free, done = done, free
        return failed

    def compiled(loop: Callable[..., int], *first: str) -> Callable[..., int]:
        arguments = [*first, *["i8"] * (loop.__code__.co_argcount - len(first))]
        made: Callable[..., int] = njit(f"i8({','.join(arguments)})", nogil=True)(loop)
        return made

    return Loops(compiled(send, "i8[:,::1]"), compiled(fetch))


def _driver(name: str, words: int) -> Any:
    """A function of the CUDA driver."""
    function = getattr(ctypes.CDLL("libcuda.so.1"), name)
    function.argtypes, function.restype = [_WORD] * words, ctypes.c_int
    return function
