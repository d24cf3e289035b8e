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
from collections.abc import Sequence
from functools import cache
from math import prod
from queue import SimpleQueue
from typing import Any

import numpy as np

from multimm.gpu.transfer.loops import Job, Part, Semaphore, loops

Where = tuple[slice, ...]

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


#: Copies that lanes have to do, at most: who has one more waits.
JOBS = 16


class Road:
    """The lanes between host memory and one device, one way, for one array after another.

    Lanes do all jobs in the same order, each its share, and none waits for the others.
    """

    def __init__(self, device: int, way: str, lanes: int) -> None:
        self.lanes = [Lane(device) for _ in range(lanes)]
        self._loops = loops()
        self._jobs = np.zeros((JOBS, len(Job._fields)), np.int64)
        self._given, self._turn, self._room = 0, threading.Lock(), threading.BoundedSemaphore(JOBS)
        self._go = [Semaphore() for _ in self.lanes]

        begun = SimpleQueue[BaseException | None]()

        def run(number: int) -> None:
            import cupy

            lane, go = self.lanes[number], self._go[number].address
            try:
                with cupy.cuda.Device(device):
                    lane.stream.synchronize()  # from now on the driver knows this thread's device
                    begun.put(None)
                    self._loops.serve(self._jobs, go, way == "send", number, *lane.handles)
            except BaseException as error:
                begun.put(error)

        try:
            for number in range(lanes):
                name = f"multimm-{way}-{number}"
                threading.Thread(target=run, args=(number,), name=name, daemon=True).start()
                if error := begun.get():
                    raise error
        except BaseException:  # no such thread: the others would wait for ever
            self.stop()
            raise

    def carry(self, pieces: int, table: np.ndarray[Any, Any]) -> None:
        """Have lanes do their shares of so many pieces, and wait for all of them.

        What the current stream was given before is done first.

        Parameters
        ----------
        pieces : int
        table : numpy.ndarray
            Of the arrays' parts: see `loops.Loops`.

        Raises
        ------
        cupy.cuda.driver.CUDADriverError
        """
        import cupy

        ready = cupy.cuda.Event(disable_timing=True)
        ready.record()
        failed, done = np.zeros(len(self.lanes), np.int64), Semaphore()
        shares = min(len(self.lanes), pieces)
        own = table.ctypes.data, len(table), failed.ctypes.data, done.address
        with self._room:
            self._give(Job(shares, ready.ptr, *own))
            self._loops.wait_for(done.address, len(self.lanes))
        if failed.any():
            raise cupy.cuda.driver.CUDADriverError(int(failed.max()))

    def stop(self) -> None:
        """End the lanes' threads, behind all that they have to do."""
        self._give(Job(0))

    def _give(self, job: Job) -> None:
        """Add a job. Lanes are through with that of `JOBS` before: they do them in order."""
        with self._turn:
            self._jobs[self._given % JOBS] = job
            self._given += 1
            for go in self._go:
                go.post()


def to_device(block: np.ndarray[Any, Any]) -> Any:
    """A NumPy array on the current CUDA device: see `all_to_device`."""
    (there,) = all_to_device([block])
    return there


def all_to_device(blocks: Sequence[np.ndarray[Any, Any]]) -> list[Any]:
    """NumPy arrays on the current CUDA device, brought there together.

    To have the threads begin, and to wait for them, takes about a millisecond beside a busy
    interpreter: once for all arrays, however many there are.

    Parameters
    ----------
    blocks : sequence of numpy.ndarray
        Of any dtypes that CuPy has, in any memory order. Not kept.

    Returns
    -------
    list of cupy.ndarray
        Of the same shapes, dtypes and orders (C order, where that of a block is neither C's nor
        Fortran's). Many bytes are there when this returns, few in the order of the current stream.
    """
    import cupy

    turned = [_turned(block) for block in blocks]
    rows = [
        _in_rows(block.T if turn else block) for block, turn in zip(blocks, turned, strict=True)
    ]
    targets = [cupy.empty(block.shape, block.dtype) for block in rows]
    if sum(block.nbytes for block in rows) < SMALL_UP:
        for target, block in zip(targets, rows, strict=True):
            target.set(np.ascontiguousarray(block))
    else:
        _send([_all_of(*x) for x in zip(targets, rows, strict=True)])
    return [target.T if turn else target for target, turn in zip(targets, turned, strict=True)]


def joined_on_device(
    blocks: Sequence[np.ndarray[Any, Any]], places: Sequence[Where], shape: tuple[int, ...]
) -> Any:
    """A matrix or vector on the current CUDA device, made of NumPy arrays on their way there.

    Pieces of the whole are put together in pinned memory. So no kernel joins them, which would wait
    for the products that run, 8 to 15 ms on an H200.

    Parameters
    ----------
    blocks : sequence of numpy.ndarray
        Of one dtype, in any memory order; together they are all of it. Not kept.
    places : sequence of tuple of slice
        Where each goes.
    shape : tuple of int
        Of the whole.

    Returns
    -------
    cupy.ndarray
        In Fortran order, if that is the first block's. There as `all_to_device` says.
    """
    import cupy

    if turned := _turned(blocks[0]):
        blocks, shape = [block.T for block in blocks], shape[::-1]
        places = [place[::-1] for place in places]
    target = cupy.empty(shape, blocks[0].dtype)
    if target.nbytes < SMALL_UP:
        whole = np.empty(shape, blocks[0].dtype)
        for block, place in zip(blocks, places, strict=True):
            whole[place] = block
        target.set(whole)
    else:
        rows = [_in_rows(block) for block in blocks]
        _send([_part_of(target, *x) for x in zip(rows, places, strict=True)])
    return target.T if turned else target


def _send(parts: Sequence[Part]) -> None:
    """Have the lanes to the current device fill the arrays that consist of these."""
    import cupy

    arrays = {part.target: part for part in parts}.values()
    pieces = sum(-(-part.size // part.step) for part in arrays)
    _road(cupy.cuda.Device().id, "send").carry(pieces, np.array(parts, np.int64))


def _all_of(target: Any, block: np.ndarray[Any, Any]) -> Part:
    """An array that is made of a block alone."""
    if not block.flags.c_contiguous:
        return _part_of(target, block, (slice(0, None),) * 2)
    start, size = block.ctypes.data, block.nbytes
    return Part(target.data.ptr, size, PIECE, max(1, size), 0, 1, 0, size, start, 0)


def _part_of(target: Any, block: np.ndarray[Any, Any], place: Where) -> Part:
    """A block in its place in a matrix or vector."""
    columns, rows = block.shape[-1], prod(block.shape[:-1])
    width, length = (count * block.itemsize for count in (target.shape[-1], columns))
    first = place[0].start if block.ndim > 1 else 0
    offset, stride = place[-1].start * block.itemsize, block.strides[0]
    return Part(
        target.data.ptr, target.nbytes, PIECE, width, first, first + rows, offset, length,
        block.ctypes.data, stride,
    )  # fmt: skip


def _turned(block: np.ndarray[Any, Any]) -> bool:
    """Whether neighbours along the first axis, and no others, are neighbours in memory."""
    near = [stride == block.itemsize for stride in block.strides]
    return near[1:] != [] and not block.flags.c_contiguous and near[0] and not near[-1]


def _in_rows(block: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The same array, in C order but for what lies between the rows of a matrix."""
    if block.ndim == 2 and block.strides[1] == block.itemsize:
        return block
    return np.ascontiguousarray(block)


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
    size = target.nbytes
    whole = Part(target.ctypes.data, size, PIECE, size, 0, 1, 0, size, block.data.ptr, 0)
    _road(block.device.id, "fetch").carry(-(-size // PIECE), np.array([whole], np.int64))
    return target


@cache
def _road(device: int, way: str) -> Road:
    """The lanes to or from a device, made once: pinned memory takes milliseconds to get."""
    return Road(device, way, threads_beside_a_gpu(LANES))


#: A fork has none of its parent's threads.
os.register_at_fork(after_in_child=_road.cache_clear)


def threads_beside_a_gpu(most: int) -> int:
    """As many threads as there are cores for each device, which has a process of its own."""
    from cupy.cuda import runtime

    devices: int = runtime.getDeviceCount()
    return max(1, min(most, len(os.sched_getaffinity(0)) // devices))
