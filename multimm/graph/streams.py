"""The stream that a task's kernels run on, and where its memory comes from.

Dask moves blocks while tasks compute. The stock transport makes that safe by waiting for the whole
device before each transfer, so a transfer waits for every kernel that runs. `multimm.cluster` has
it wait for stream 0 alone (see `multimm.cluster.plugins.ucxx_overlap`), which is safe because of
three rules. They are kept here, for every task on a GPU, whatever transport is in use.

*Kernels run on a stream S of their own*, one per worker thread and device, which does not
synchronise with stream 0.

*All memory is taken from the pool in the order of stream 0*, never in the order of S. RMM's pool
keeps free memory by the stream that it was freed on. Memory freed on S would be handed to a
receiving transport only behind an event on S, that is after the kernels that run there now: it
would wait again. CuPy takes memory in the order of the current stream, so in a task it gets an
allocator that goes to stream 0 for each array, result and temporary alike.

*S waits for stream 0 before it touches anything, and is synchronised before anything goes back*:

- When a task begins, S waits for what is on stream 0: other libraries' tasks may have returned
  while their kernels, on stream 0, still write an operand.
- After every allocation S waits for stream 0 once more: memory that was freed in the order of
  stream 0 may still be in use there.
- What a task drops is kept until S has been synchronised: it goes back in the order of stream 0,
  where anybody may take it at once, while a kernel on S may still use it. The task itself may take
  it again at once, for what it launches comes after that on S: so many k-tiles in one task take no
  more than one. If the pool runs dry within a task, S is synchronised at once, and what was dropped
  until then goes back.
- S is synchronised before the task returns, or raises: its result is complete, and its operands,
  which Dask refers to until then, are no longer read.

So of free memory, and of blocks that Dask knows, at any time: whatever still reads or writes it is
on stream 0. Who waits for stream 0 may send the one and write to the other.

Where the current stream is not stream 0, somebody has chosen it: the task runs there, as if it had
been called directly.

*Tasks that compute take turns*: of a process's threads one at a time has one on a GPU. It fills the
GPU, and another would have memory of its own there. Tasks that only copy do not wait for them.
Products of host blocks hold their turn only while they launch (`in_order`).
"""

from __future__ import annotations

import os
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

_local = threading.local()  # streams: device -> stream and event
_turns: defaultdict[int, threading.Lock]  # of devices
_launched: dict[int, Any]  # device -> event behind what was launched `in_order`

#: What is taken again may be so many times as large as what is asked for: arbitrary.
SPARE = 2


def _begin() -> None:
    """With nobody computing: a fork has none of its parent's threads."""
    global _turns, _launched
    _turns, _launched = defaultdict(threading.Lock), {}


_begin()
os.register_at_fork(after_in_child=_begin)


@contextmanager
def computing(device: int) -> Iterator[None]:
    """`own_stream` of a task that computes: it waits for its turn."""
    import cupy

    with cupy.cuda.Device(device):
        chosen = bool(cupy.cuda.get_current_stream().ptr)  # by somebody, or by this task before
    turn = nullcontext() if chosen else _turns[device]
    with turn, own_stream(device):
        yield


@contextmanager
def in_order(device: int) -> Iterator[None]:
    """Launch what is inside on the current stream, behind all that was launched so before.

    The turn ends with the launch. So the next task is launched while this one runs, and the GPU
    begins with it when this one is over, without waiting for a thread.
    """
    import cupy

    stream = cupy.cuda.get_current_stream()
    with _turns[device]:
        if device in _launched:
            stream.wait_event(_launched[device])
        yield
        _launched[device] = event = cupy.cuda.Event(disable_timing=True)
        event.record(stream)


@contextmanager
def own_stream(device: int) -> Iterator[None]:
    """Run what is inside on this thread's stream of a device, by the rules above.

    Parameters
    ----------
    device : int
        CUDA device of the operands.
    """
    import cupy

    with cupy.cuda.Device(device):
        if cupy.cuda.get_current_stream().ptr:
            yield
            return
        task = _Task(device)
        with cupy.cuda.using_allocator(task.allocate), task.stream:
            task.follow_stream_0()
            try:
                yield
            finally:
                task.close()


class _SubBlock(NamedTuple):
    """Memory from the pool."""

    size: int
    pointer: Any


class _Task:
    """Memory of one task."""

    def __init__(self, device: int) -> None:
        import cupy

        self._device = device
        self._allocate = cupy.cuda.get_allocator()
        self._zero = cupy.cuda.Stream.null
        self.stream, self._event = _stream_of(device)
        self.running = True
        self.dropped: list[_SubBlock] = []  # kernels on the stream may still use it

    def allocate(self, size: int) -> Any:
        """Memory that is ready for this task's stream: its own of before, or the pool's."""
        import cupy

        sub_block = self._dropped_before(size) or self._from_pool(size)
        if not sub_block.pointer.ptr:
            return sub_block.pointer
        memory = cupy.cuda.UnownedMemory(
            sub_block.pointer.ptr, size, _Lent(sub_block, self), self._device
        )
        return cupy.cuda.MemoryPointer(memory, 0)

    def close(self) -> None:
        """Wait for the stream; from now on what is dropped goes back to the pool at once."""
        self._reclaim()
        self.running = False

    def _dropped_before(self, size: int) -> _SubBlock | None:
        """The smallest sub-block that this task has dropped and that is large enough."""
        sizes = [sub_block.size for sub_block in self.dropped]
        fitting = [found for found in sizes if size <= found <= SPARE * size]
        return self.dropped.pop(sizes.index(min(fitting))) if fitting else None

    def _from_pool(self, size: int) -> _SubBlock:
        """New memory, in the order of stream 0."""
        try:
            pointer = self._from_stream_0(size)
        except MemoryError:
            self._reclaim()
            pointer = self._from_stream_0(size)
        if pointer.ptr:
            self.follow_stream_0()
        return _SubBlock(size, pointer)

    def _from_stream_0(self, size: int) -> Any:
        with self._zero:
            return self._allocate(size)

    def follow_stream_0(self) -> None:
        """Whatever is launched next comes after all that is on stream 0."""
        self._event.record(self._zero)
        self.stream.wait_event(self._event)

    def _reclaim(self) -> None:
        self.stream.synchronize()
        self.dropped.clear()


class _Lent:
    """What an array holds in place of its memory: it notices when the last array is gone."""

    __slots__ = ("_sub_block", "_task")

    def __init__(self, sub_block: _SubBlock, task: _Task) -> None:
        self._sub_block, self._task = sub_block, task

    def __del__(self) -> None:
        if self._task.running:
            self._task.dropped.append(self._sub_block)


def _stream_of(device: int) -> tuple[Any, Any]:
    """This thread's stream, and an event that is recorded anew for each time it waits."""
    import cupy

    streams = _local.__dict__.setdefault("streams", {})
    if device not in streams:
        event = cupy.cuda.Event(block=False, disable_timing=True)
        streams[device] = cupy.cuda.Stream(non_blocking=True), event
    stream, event = streams[device]
    return stream, event
