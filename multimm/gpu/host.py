"""Blocks between host memory and a GPU, at the rate of the link between them.

A host array is pageable: CUDA copies it through a small pinned buffer of its own, with one thread,
at 9 GB/s to an H200 and 4 from it into new memory, where the link carries 55. Here several threads
copy through pinned pieces of their own, each while its other piece is on its way: 50 GB/s and 20
with eight (pages that are new are what limits the latter; 42 into pages that are there). Larger
pieces were slower (16 MiB: 35 GB/s), for they do not stay in the processor's caches.
"""

from __future__ import annotations

import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache
from typing import Any

import numpy as np

from multimm.gpu.lanes import loops

#: Bytes of a piece, and pieces of a lane: one is filled while the other is on its way.
PIECE, PIECES = 2**22, 2
#: Threads that copy, at most: with twelve, 45 GB/s on an H200.
LANES = 8
#: Arrays of fewer bytes are left to CUDA, which takes less time than it takes to wake the threads:
#: 4 MiB go to an H200 in 0.5 ms so, and in 1.3 by threads; 8 MiB in 1.0 and 1.2; back in as long
#: (2.4), and in 2.9 and 1.8.
SMALL_UP, SMALL = 2 * PIECE, PIECE


class Lane:
    """A thread's stream, its pinned pieces, and events: their last copies are done."""

    def __init__(self, device: int) -> None:
        import cupy

        with cupy.cuda.Device(device):
            self.stream = cupy.cuda.Stream(non_blocking=True)
            self.pieces = [cupy.cuda.alloc_pinned_memory(PIECE) for _ in range(PIECES)]
            self.free = [cupy.cuda.Event(disable_timing=True) for _ in range(PIECES)]

    @property
    def handles(self) -> list[int]:
        """What a loop takes at its end."""
        return [x.ptr for x in (*self.pieces, *self.free, self.stream)]


class Road:
    """The lanes between host memory and one device, one way, for one array after another."""

    def __init__(self, device: int, way: str, lanes: int) -> None:
        self.device, self.lanes = device, lanes
        self._loop = getattr(loops(), way)
        self._own = threading.local()
        self._threads = ThreadPoolExecutor(lanes, f"multimm-{way}")

    def _lane(self) -> Lane:
        """This thread's own, made when it is first needed.

        Not as the thread begins: where that fails, for lack of memory, no thread of a pool ever
        works again, and nobody is told why.
        """
        if not hasattr(self._own, "lane"):
            self._own.lane = Lane(self.device)
        lane: Lane = self._own.lane
        return lane

    def carry(self, size: int, step: int, *args: int) -> None:
        """Have lanes do their shares of an array's pieces, and wait for all of it.

        What the current stream was given before is done first.

        Parameters
        ----------
        size, step : int
            Bytes of the array, and of a piece.
        *args : int
            What the loop takes before the first byte that a lane begins with.

        Raises
        ------
        cupy.cuda.driver.CUDADriverError
        """
        import cupy

        ready = cupy.cuda.Event(disable_timing=True)
        ready.record()

        def run(number: int) -> int:
            lane = self._lane()
            with cupy.cuda.Device(self.device):
                lane.stream.wait_event(ready)
                first, apart = number * step, self.lanes * step
                failed: int = self._loop(*args, first, apart, step, *lane.handles)
                lane.stream.synchronize()
            return failed

        shares = min(self.lanes, -(-size // step))
        done: list[Future[int]] = []
        try:
            for number in range(shares):
                done.append(self._threads.submit(run, number))
        finally:  # also where one fails, or cannot be begun: until then the others use the array
            wait(done)
        if failed := max(future.result() for future in done):
            raise cupy.cuda.driver.CUDADriverError(failed)


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

    if _turned(block):
        return to_device(block.T).T
    if block.nbytes < SMALL_UP:
        target = cupy.empty(block.shape, block.dtype)
        target.set(np.ascontiguousarray(block))
        return target
    block, row = _in_rows(block)
    target, size = cupy.empty(block.shape, block.dtype), block.nbytes
    step, stride = (PIECE, size) if row == size else (PIECE // row * row, block.strides[0])
    road = _road(target.device.id, "send")
    road.carry(size, step, target.data.ptr, block.ctypes.data, size, row, stride)
    return target


def _turned(block: np.ndarray[Any, Any]) -> bool:
    """Whether neighbours along the first axis, and no others, are neighbours in memory."""
    near = [stride == block.itemsize for stride in block.strides]
    return near[1:] != [] and not block.flags.c_contiguous and near[0] and not near[-1]


def _in_rows(block: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], int]:
    """The same array, and bytes of the rows that it consists of: all, or less than a piece."""
    if block.ndim == 2 and not block.flags.c_contiguous:
        row = block.shape[1] * block.itemsize
        if block.strides[1] == block.itemsize and block.strides[0] > 0 and row <= PIECE:
            return block, row
    block = np.ascontiguousarray(block)
    return block, block.nbytes


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
    size, road = target.nbytes, _road(block.device.id, "fetch")
    road.carry(size, PIECE, target.ctypes.data, block.data.ptr, size)
    return target


@cache
def _road(device: int, way: str) -> Road:
    """The lanes to or from a device, made once: pinned memory takes milliseconds to get."""
    from cupy.cuda import runtime

    return Road(device, way, _lanes(runtime.getDeviceCount()))


def _lanes(devices: int) -> int:
    """As many threads as there are cores for each device, which has a process of its own."""
    return max(1, min(LANES, len(os.sched_getaffinity(0)) // devices))
