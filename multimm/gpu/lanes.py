"""What a thread does that copies between host memory and a GPU, without the interpreter.

The event loop of a worker that is connected through UCXX never sleeps, and Python has it give the
interpreter to another thread after 5 ms only. Beside a thread that polls like it, lanes that ask
for the interpreter for each piece carried 4 to 14 GB/s of 50; 29, where threads give way after 10
us. So their loops are compiled, by Numba, in a second or two, once in a process: 44.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

_WORD = ctypes.c_size_t  # pointers and handles, too


class Loops(NamedTuple):
    """Both directions; each returns a CUresult.

    Arguments are: addresses of target and source, bytes; only of `send` those of a row, which are
    all or divide a piece's, and those from a row to the next one; the first byte, those from a
    piece's first byte to that of the next one, those of a piece; two pinned pieces, their events,
    and a stream.
    """

    send: Callable[..., int]
    fetch: Callable[..., int]


@cache
def loops() -> Loops:
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

    def send(  # type: ignore[no-untyped-def]  # all are Numba's int64
        target, source, size, row, stride, first, apart, step, piece, other, free, done, stream
    ):
        failed = 0
        for start in range(first, size, apart):
            part = min(step, size - start)
            failed = failed or wait(free)
            for at in range(start, start + part, row):
                place = source + at // row * stride + at % row
                copy(piece + at - start, place, min(row, start + part - at))
            failed = failed or to_device(target + start, piece, part, stream)
            failed = failed or record(free, stream)
            piece, other = other, piece
            free, done = done, free
        return failed

    def fetch(target, source, size, first, apart, step, piece, other, free, done, stream):  # type: ignore[no-untyped-def]
        failed = 0
        for start in range(first, size + 2 * apart, apart):
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

    def compiled(loop: Callable[..., int]) -> Callable[..., int]:
        arguments = ",".join(["i8"] * loop.__code__.co_argcount)
        made: Callable[..., int] = njit(f"i8({arguments})", nogil=True)(loop)
        return made

    return Loops(compiled(send), compiled(fetch))


def _driver(name: str, words: int) -> Any:
    """A function of the CUDA driver."""
    function = getattr(ctypes.CDLL("libcuda.so.1"), name)
    function.argtypes, function.restype = [_WORD] * words, ctypes.c_int
    return function
