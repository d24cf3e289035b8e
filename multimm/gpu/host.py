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
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import numpy as np

#: Bytes of a piece, and pieces of a lane: one is filled while the other is on its way.
PIECE, PIECES = 2**22, 2
#: Threads that copy, at most: with twelve, 45 GB/s on an H200.
LANES = 8
#: Arrays of fewer bytes are left to CUDA: it takes less time than to wake the threads. Arbitrary.
SMALL = PIECE

#: Seconds after which a thread gives the interpreter to another one while blocks are copied.
SWITCH_S = 1e-5

_turn = threading.Lock()  # all lanes carry one array at a time: the link is what they share


@dataclass(frozen=True)
class Lane:
    """A thread's stream and its pinned pieces."""

    stream: Any
    pieces: list[np.ndarray[Any, Any]]
    free: list[Any]  #: events: the last copy from or to the piece is done


@dataclass(frozen=True)
class Road:
    """The lanes between host memory and one device."""

    device: int
    lanes: list[Lane]
    threads: ThreadPoolExecutor = field(compare=False)

    def carry(self, work: Callable[[Lane, range], None], nbytes: int) -> None:
        """Have each lane do its share of the pieces of so many bytes, and wait for all of it.

        What the current stream was given before is done first.
        """
        import cupy

        ready = cupy.cuda.Event(disable_timing=True)
        ready.record()

        def run(number: int) -> None:
            with cupy.cuda.Device(self.device):
                lane = self.lanes[number]
                lane.stream.wait_event(ready)
                try:
                    work(lane, range(number * PIECE, nbytes, len(self.lanes) * PIECE))
                finally:
                    lane.stream.synchronize()

        with _turn, _giving_way():
            done = [self.threads.submit(run, number) for number in range(len(self.lanes))]
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
    block = np.ascontiguousarray(block)
    target = cupy.empty(block.shape, block.dtype)
    if block.nbytes < SMALL:
        target.set(block)
        return target
    source, pointer = block.reshape(-1).view(np.uint8), target.data.ptr
    _road(target.device.id).carry(partial(_send, source, pointer), block.nbytes)
    return target


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
    into, pointer = target.reshape(-1).view(np.uint8), block.data.ptr
    _road(block.device.id).carry(partial(_fetch, pointer, into), block.nbytes)
    return target


@contextmanager
def _giving_way() -> Iterator[None]:
    """Have all threads of this process give way to each other soon."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_S)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def _send(source: np.ndarray[Any, Any], target: int, lane: Lane, starts: range) -> None:
    """Copy pieces of host memory to an address on the device."""
    from cupy.cuda import runtime

    for turn, start in enumerate(starts):
        part = source[start : start + PIECE]
        piece, free = lane.pieces[turn % PIECES][: part.size], lane.free[turn % PIECES]
        free.synchronize()
        np.copyto(piece, part)
        to, kind = target + start, runtime.memcpyHostToDevice
        runtime.memcpyAsync(to, piece.ctypes.data, part.size, kind, lane.stream.ptr)
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
def _road(device: int) -> Road:
    """The lanes to a device, made once: pinned memory takes milliseconds to get."""
    import cupy

    with cupy.cuda.Device(device):
        lanes = [_lane() for _ in range(_lanes(cupy.cuda.runtime.getDeviceCount()))]
    return Road(device, lanes, ThreadPoolExecutor(len(lanes), "multimm-host"))


def _lane() -> Lane:
    import cupy

    memory = [cupy.cuda.alloc_pinned_memory(PIECE) for _ in range(PIECES)]
    return Lane(
        cupy.cuda.Stream(non_blocking=True),
        [np.frombuffer(pinned, np.uint8, PIECE) for pinned in memory],
        [cupy.cuda.Event(disable_timing=True) for _ in memory],
    )


def _lanes(devices: int) -> int:
    """As many threads as there are cores for each device, which has a process of its own."""
    return max(1, min(LANES, len(os.sched_getaffinity(0)) // devices))
