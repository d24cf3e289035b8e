"""What a thread does that copies between host memory and a GPU, without the interpreter.

The event loop of a worker that is connected through UCXX never sleeps, and Python has it give the
interpreter to another thread after 5 ms only. Beside a thread that polls like it, lanes that ask
for the interpreter for each piece carried 4 to 14 GB/s of 50; 29, where threads give way after 10
us. So their loops are compiled, by Numba, in a second or two, once in a process: 44.

Nor does a lane ask for the interpreter between arrays: it waits for the next one at a semaphore.
Who has an array to copy posts that, and asks for the interpreter once, when all lanes are done.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np

_WORD = ctypes.c_size_t  # pointers and handles, too
#: Of threads that want the loops at once, one compiles them.
_compiling = threading.Lock()


class Loops(NamedTuple):
    """Both directions; each returns a CUresult.

    `fetch` takes the addresses of target and source, and the bytes of the array and of a piece.
    `send` takes a table, each row of which is a `Part`; those of an array follow each other. What
    follows is common: which lane this is of how many, two pinned pieces, their events, and a
    stream. Of all pieces, one array's after the other's, lanes take one in turn.

    `serve` is what a lane does until it is told to stop: one job after another, as `Job` says, of
    an array of them that begins anew after its last one. It takes that, the address of the lane's
    semaphore, whether bytes go up, and which lane this is, with what is its own, as above.
    `wait_for` waits for so many posts of a semaphore, without the interpreter.
    """

    send: Callable[..., int]
    fetch: Callable[..., int]
    serve: Callable[..., int]
    wait_for: Callable[..., int]


class Part(NamedTuple):
    """What goes to an array from one place in host memory: addresses, numbers of rows, bytes."""

    target: int  #: the array on the device
    size: int  #: of it
    step: int  #: of a piece
    width: int  #: of a row of it, or of all where it is none but this part
    first: int  #: of its rows, the part's first one
    last: int  #: and the one behind its last one
    offset: int  #: of a row, where the part begins
    length: int  #: and how much is its own
    source: int
    stride: int  #: from a row of the source to the next one


class Job(NamedTuple):
    """What lanes are told of a copy: addresses, and counts.

    Parameters
    ----------
    lanes : int
        That take part; 0: lanes are to stop.
    ready : int
        A CUDA event that comes before the copy.
    table, parts : int
        As `send` takes it, of so many parts; of `fetch`, what that takes, as one.
    failed : int
        Where each lane writes its CUresult.
    done : int
        A semaphore that each lane posts.
    """

    lanes: int
    ready: int = 0
    table: int = 0
    parts: int = 0
    failed: int = 0
    done: int = 0


#: The columns of a table, each a word.
TARGET, SIZE, STEP, WIDTH, FIRST, LAST, OFFSET, LENGTH, SOURCE, STRIDE = range(len(Part._fields))
COLUMNS = len(Part._fields)
#: Bytes of a semaphore, at least: it has 32 in glibc and in musl.
SEMAPHORE_BYTES = 64


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
    order, finish = _driver("cuStreamWaitEvent", 3), _driver("cuStreamSynchronize", 1)
    pause, post = _library("sem_wait", 1), _library("sem_post", 1)
    copy: Any = ctypes.CDLL(None).memcpy
    copy.argtypes, copy.restype = [_WORD] * 3, _WORD

    def send(parts, lane, lanes, piece, other, free, done, stream):  # type: ignore[no-untyped-def]
        failed, number, begin = 0, lane, 0
        while begin < len(parts):
            target, size, step = parts[begin, TARGET], parts[begin, SIZE], parts[begin, STEP]
            end = begin + 1
            while end < len(parts) and parts[end, TARGET] == target:
                end += 1
            pieces = (size + step - 1) // step
            while number < pieces:
                start = number * step
                stop = min(size, start + step)
                failed = failed or wait(free)
                for i in range(begin, end):
                    width, first = parts[i, WIDTH], parts[i, FIRST]
                    behind = min(parts[i, LAST], (stop + width - 1) // width)
                    for row in range(max(first, start // width), behind):
                        at = row * width + parts[i, OFFSET]
                        low, high = max(start, at), min(stop, at + parts[i, LENGTH])
                        if low < high:
                            source = parts[i, SOURCE] + (row - first) * parts[i, STRIDE]
                            copy(piece + low - start, source + low - at, high - low)
                failed = failed or to_device(target + start, piece, stop - start, stream)
                failed = failed or record(free, stream)
                piece, other = other, piece
                free, done = done, free
                number += lanes
            number -= pieces
            begin = end
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

    send_all, fetch_one = compiled(send, "i8[:,::1]"), compiled(fetch)

    def serve(jobs, own, up, lane, piece, other, free, done, stream):  # type: ignore[no-untyped-def]
        number, result = 0, np.zeros(1, np.int64)
        while True:
            while pause(own):  # a signal has come
                pass
            lanes, ready, table, parts, failed, end = jobs[number % len(jobs)]
            if lanes == 0:
                return number
            if lane < lanes:
                rows = np.empty((parts, COLUMNS), np.int64)
                copy(rows.ctypes.data, table, rows.nbytes)
                result[0] = order(stream, ready, 0)
                if result[0] == 0 and up:
                    result[0] = send_all(rows, lane, lanes, piece, other, free, done, stream)
                elif result[0] == 0:
                    target, source = rows[0, TARGET], rows[0, SOURCE]
                    size, step = rows[0, SIZE], rows[0, STEP]
                    result[0] = fetch_one(
                        target, source, size, step, lane, lanes, piece, other, free, done, stream
                    )
                arrived = finish(stream)
                result[0] = result[0] or arrived
                copy(failed + lane * result.itemsize, result.ctypes.data, result.itemsize)
            post(end)
            number += 1

    def wait_for(semaphore, posts):  # type: ignore[no-untyped-def]
        for _ in range(posts):
            while pause(semaphore):
                pass
        return 0

    return Loops(send_all, fetch_one, compiled(serve, "i8[:,::1]"), compiled(wait_for))


class Semaphore:
    """One of the C library's, which compiled loops wait for and post."""

    def __init__(self) -> None:
        self._memory = np.zeros(SEMAPHORE_BYTES, np.uint8)
        self.address = self._memory.ctypes.data
        if _library("sem_init", 3)(self.address, 0, 0):
            raise OSError("the C library has no semaphores between threads")

    def post(self) -> None:
        """Let one go on who waits; this takes no time, so that the interpreter is kept."""
        _library("sem_post", 1)(self.address)


@cache
def _library(name: str, words: int) -> Any:
    """A function of the C library."""
    function = getattr(ctypes.PyDLL(None), name)
    function.argtypes, function.restype = [_WORD] * words, ctypes.c_int
    return function


def _driver(name: str, words: int) -> Any:
    """A function of the CUDA driver."""
    function = getattr(ctypes.CDLL("libcuda.so.1"), name)
    function.argtypes, function.restype = [_WORD] * words, ctypes.c_int
    return function
