"""Blocks between host memory and a GPU, at the rate of the link between them.

A host array is pageable: CUDA copies it through a small pinned buffer of its own, with one thread,
at 9 GB/s to an H200 and 4 from it into new memory, where the link carries 55. Here several threads
copy through pinned pieces of their own, each while its other piece is on its way: 50 GB/s and 20
with eight (pages that are new are what limits the latter; 42 into pages that are there). Larger
pieces were slower (16 MiB: 35 GB/s), for they do not stay in the processor's caches.

A thread lets go of the interpreter while it copies, and gets it back when another one gives it
away: the event loop of a worker that is connected through UCXX never sleeps, and Python has it give
way after 5 ms only. With such a thread in the process that made 4 GB/s of 50; giving way after 10
us, as here while blocks are copied, 29. (Copying without Python, in a function compiled by Numba,
makes 44, and takes each worker some seconds to compile.)
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import numpy as np

#: Bytes of a piece, and pieces of a lane: one is filled while the other is on its way.
PIECE, PIECES = 2**22, 2
#: Threads that copy, at most: with twelve, 45 GB/s on an H200.
LANES = 8
#: Arrays that are carried at a time: when lanes have done their shares of one, they go on.
ARRAYS = 2
#: Arrays of fewer bytes are left to CUDA: it takes less time than to wake the threads. Arbitrary.
SMALL = PIECE

#: Seconds after which a thread gives the interpreter to another one while blocks are copied.
SWITCH_S = 1e-5

_patience: list[float] = []  #: how long threads took before, once for each road in use
_changing = threading.Lock()


class Lane:
    """A thread's stream and its pinned pieces."""

    def __init__(self, device: int) -> None:
        import cupy

        with cupy.cuda.Device(device):
            self.stream = cupy.cuda.Stream(non_blocking=True)
            pinned = [cupy.cuda.alloc_pinned_memory(PIECE) for _ in range(PIECES)]
            #: The last copy from or to each piece is done.
            self.free = [cupy.cuda.Event(disable_timing=True) for _ in pinned]
        self.pieces = [np.frombuffer(memory, np.uint8, PIECE) for memory in pinned]


Work = Callable[[Lane, range], None]  #: what a lane does with the pieces that begin there


class Road:
    """The lanes between host memory and one device, one way."""

    def __init__(self, device: int, way: str, lanes: int) -> None:
        self.device, self.lanes = device, lanes
        self.turn = threading.BoundedSemaphore(ARRAYS)
        self._own = threading.local()
        self._threads = ThreadPoolExecutor(lanes, f"multimm-{way}", self._begin)

    def _begin(self) -> None:
        self._own.lane = Lane(self.device)

    def carry(self, work: Work, length: int, step: int) -> None:
        """Have lanes do their shares of an array's pieces, and wait for all of it.

        What the current stream was given before is done first.

        Parameters
        ----------
        work : callable
            Of a lane and the beginnings of its pieces.
        length, step : int
            Of the array, and of a piece of it.
        """
        import cupy

        ready = cupy.cuda.Event(disable_timing=True)
        ready.record()

        def run(number: int) -> None:
            lane: Lane = self._own.lane
            with cupy.cuda.Device(self.device):
                lane.stream.wait_event(ready)
                try:
                    work(lane, range(number * step, length, self.lanes * step))
                finally:
                    lane.stream.synchronize()

        shares = min(self.lanes, -(-length // step))
        with _giving_way():
            done = [self._threads.submit(run, number) for number in range(shares)]
            wait(done)  # also where one fails: until then the others use the array
        for future in done:
            future.result()


def to_device(block: np.ndarray[Any, Any]) -> Any:
    """A NumPy array on the current CUDA device.

    Parameters
    ----------
    block : numpy.ndarray
        Of any dtype that CuPy has, in any memory order. Not kept.

    Returns
    -------
    cupy.ndarray
        Of the same shape, dtype and order (C order, if that of `block` is neither C's nor
        Fortran's). Large ones are there when this returns, others in the order of the current
        stream.
    """
    import cupy

    if block.flags.f_contiguous and not block.flags.c_contiguous:
        return to_device(block.T).T
    if block.nbytes < SMALL:
        target = cupy.empty(block.shape, block.dtype)
        target.set(np.ascontiguousarray(block))
        return target
    source, road = _rows(block), _road(cupy.cuda.Device().id, "up")
    with road.turn:  # until then it needs no memory there
        target = cupy.empty(block.shape, block.dtype)
        work = partial(_send, source, target.data.ptr)
        road.carry(work, len(source), _rows_of_a_piece(source))
    return target


def _rows(block: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The same bytes in rows of which a piece holds one at least."""
    if block.flags.c_contiguous or not _rows_of_a_piece(block):
        return np.ascontiguousarray(block).reshape(-1).view(np.uint8)
    return block


def _rows_of_a_piece(block: np.ndarray[Any, Any]) -> int:
    return PIECE * len(block) // block.nbytes


def to_host(block: Any) -> np.ndarray[Any, Any]:
    """A CuPy array in host memory, once the current stream has made it.

    Parameters
    ----------
    block : cupy.ndarray

    Returns
    -------
    numpy.ndarray
        Of the same shape and dtype, in C order.
    """
    import cupy

    block = cupy.ascontiguousarray(block)
    target = np.empty(block.shape, block.dtype)
    if block.nbytes < SMALL:
        block.get(out=target)
        return target
    into, road = target.reshape(-1).view(np.uint8), _road(block.device.id, "down")
    with road.turn:
        road.carry(partial(_fetch, block.data.ptr, into), block.nbytes, PIECE)
    return target


@contextmanager
def _giving_way() -> Iterator[None]:
    """Have all threads of this process give way to each other soon."""
    with _changing:
        _patience.append(sys.getswitchinterval())
        sys.setswitchinterval(SWITCH_S)
    try:
        yield
    finally:
        with _changing:
            if not _patience[1:]:
                sys.setswitchinterval(_patience[0])
            _patience.pop()


def _send(source: np.ndarray[Any, Any], target: int, lane: Lane, starts: range) -> None:
    """Copy rows of an array in host memory to an address on the device."""
    from cupy.cuda import runtime

    step, stride = _rows_of_a_piece(source), source.nbytes // len(source)
    for turn, start in enumerate(starts):
        part = source[start : start + step]
        piece, free = lane.pieces[turn % PIECES][: part.nbytes], lane.free[turn % PIECES]
        free.synchronize()
        np.copyto(piece.view(part.dtype).reshape(part.shape), part)
        to, kind = target + start * stride, runtime.memcpyHostToDevice
        runtime.memcpyAsync(to, piece.ctypes.data, part.nbytes, kind, lane.stream.ptr)
        free.record(lane.stream)


def _fetch(source: int, target: np.ndarray[Any, Any], lane: Lane, starts: range) -> None:
    """Copy pieces from an address on the device into host memory."""
    for turn, piece in enumerate(_arriving(source, target.size, lane, starts)):
        start = starts[turn]
        np.copyto(target[start : start + PIECE], piece)


def _arriving(
    source: int, nbytes: int, lane: Lane, starts: range
) -> Iterator[np.ndarray[Any, Any]]:
    """Each piece once it is there; the next one is on its way meanwhile."""
    from cupy.cuda import runtime

    def order(turn: int) -> np.ndarray[Any, Any]:
        start = starts[turn]
        piece = lane.pieces[turn % PIECES][: min(PIECE, nbytes - start)]
        kind = runtime.memcpyDeviceToHost
        runtime.memcpyAsync(piece.ctypes.data, source + start, piece.size, kind, lane.stream.ptr)
        lane.free[turn % PIECES].record(lane.stream)
        return piece

    ordered = [order(turn) for turn in range(min(PIECES, len(starts)))]
    for turn in range(len(starts)):
        lane.free[turn % PIECES].synchronize()
        yield ordered[turn]
        if turn + PIECES < len(starts):
            ordered.append(order(turn + PIECES))


@cache
def _road(device: int, way: str) -> Road:
    """The lanes to or from a device, made once: pinned memory takes milliseconds to get."""
    from cupy.cuda import runtime

    return Road(device, way, _lanes(runtime.getDeviceCount()))


def _lanes(devices: int) -> int:
    """As many threads as there are cores for each device, which has a process of its own."""
    return max(1, min(LANES, len(os.sched_getaffinity(0)) // devices))
