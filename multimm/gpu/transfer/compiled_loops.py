# mypy: ignore-errors
"""What `loops.loops` hands out: machine code by Numba, compiled as this module is imported.

Numba keeps it beside Python's own bytecode, or in the user's cache where that cannot be written:
the next process takes a few hundredths of a second. So the driver's functions are called by names,
whose addresses `loops` tells first; an address in the code itself would be another one each time.
And whatever the code is made from stands in this file: Numba compiles anew where the file changes.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numba.types import ExternalFunction, int32, int64

#: The columns of a table, each a word: `loops.Part` in its order.
TARGET, SIZE, STEP, WIDTH, FIRST, LAST, OFFSET, LENGTH, SOURCE, STRIDE = range(10)
COLUMNS = 10


def _called(name, words, result=int32):
    return ExternalFunction(f"multimm_{name}", result(*[int64] * words))


to_device, to_host = _called("to_device", 4), _called("to_host", 4)
record, wait = _called("record", 2), _called("wait", 1)
order, finish = _called("order", 3), _called("finish", 1)
pause, post = _called("pause", 1), _called("post", 1)
copy = _called("copy", 3, int64)


def _compiled(*arguments):
    signature = f"i8({','.join(arguments)})"

    def compiled(loop):
        try:
            return njit(signature, nogil=True, cache=True)(loop)
        except Exception:  # nothing can be kept, or what is there is no longer whole
            return njit(signature, nogil=True)(loop)

    return compiled


# Of two pieces, one is filled or emptied while the other one is on its way; an event says when the
# last copy from or to it is done.


@_compiled("i8[:,::1]", *["i8"] * 7)
def send(parts, lane, lanes, piece, other, free, done, stream):
    """Copy to a device."""
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


@_compiled(*["i8"] * 11)
def fetch(target, source, size, step, lane, lanes, piece, other, free, done, stream):
    """Copy from a device."""
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


@_compiled("i8[:,::1]", *["i8"] * 8)
def serve(jobs, own, up, lane, piece, other, free, done, stream):
    """Do one job after another, until one says to stop."""
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
                result[0] = send(rows, lane, lanes, piece, other, free, done, stream)
            elif result[0] == 0:
                target, source = rows[0, TARGET], rows[0, SOURCE]
                size, step = rows[0, SIZE], rows[0, STEP]
                result[0] = fetch(
                    target, source, size, step, lane, lanes, piece, other, free, done, stream
                )
            arrived = finish(stream)
            result[0] = result[0] or arrived
            copy(failed + lane * result.itemsize, result.ctypes.data, result.itemsize)
        post(end)
        number += 1


@_compiled("i8", "i8")
def wait_for(semaphore, posts):
    """Wait for so many posts of a semaphore."""
    for _ in range(posts):
        while pause(semaphore):
            pass
    return 0
