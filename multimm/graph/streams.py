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
  which Dask refers to until then, are no longer read. Of short tasks of a worker stream 0 waits for
  S instead: the GPU has their kernels to do while Dask goes on to the next task.

So of free memory, and of blocks that Dask knows, at any time: whatever still reads or writes it is
on stream 0, or what stream 0 waits for. Who waits for stream 0 may send the one and write to the
other.

Where the current stream is not stream 0, somebody has chosen it: the task runs there, as if it had
been called directly.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from multimm.gpu.runtime.driver_launch import follow, kept

_local = threading.local()  # streams: device -> _Own

#: What is taken again may be so many times as large as what is asked for: arbitrary.
SPARE = 2
#: Tasks that take longer are waited for. What is sent waits for up to two that are not, and Dask
#: goes from one task to the next in 0.5 ms (two H100s): little of a task beyond this.
SHORT_S = 3e-3
#: Kinds of tasks whose seconds are known; when they are that many, all are forgotten. Arbitrary.
KINDS = 1024

_seconds: dict[Hashable, float] = {}  #: of tasks that were waited for, by their kind
_early = False


def return_early(allowed: bool) -> None:
    """Let short tasks of this process return before their kernels have run, or no longer.

    For workers, where nobody uses a task's result who does not wait for stream 0.
    """
    global _early
    _early = allowed


@contextmanager
def own_stream(device: int, kind: Hashable = None) -> Iterator[None]:
    """Run what is inside on this thread's stream of a device, by the rules above.

    Parameters
    ----------
    device : int
        CUDA device of the operands.
    kind : hashable, optional
        Tasks of one kind take about as long. Where one was done within `SHORT_S`, and that is
        allowed, the next ones return early: they wait for the kernels of the task before, not for
        their own. Their results are ready in the order of stream 0. None: never early.
    """
    import cupy

    with cupy.cuda.Device(device):
        if (chosen := cupy.cuda.get_current_stream()).ptr:
            yield
            chosen.synchronize()
            return
        task = _Task(device)
        with cupy.cuda.using_allocator(task.allocate), task.stream, kept():
            task.follow_stream_0()
            try:
                yield
                task.leave(kind)
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
        self._own = _own_of(device)
        self.stream, self._event = self._own.stream, self._own.event
        self._begun = time.perf_counter()
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

    def leave(self, kind: Hashable) -> None:
        """Wait for the stream, or have stream 0 wait for it if the task is short."""
        if kind is None or not _early:
            self.close()
        elif _seconds.get(kind, SHORT_S) < SHORT_S:
            self._own.handed_over(kind, self._zero)
            self.dropped.clear()
            self.running = False
        else:
            self.close()
            if len(_seconds) >= KINDS:
                _seconds.clear()
            _seconds[kind] = time.perf_counter() - self._begun

    def close(self) -> None:
        """Wait for the stream; from now on what is dropped goes back to the pool at once."""
        if self.running:
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
        follow(self.stream, self._zero, self._event)

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


class _Own:
    """A thread's stream on the current device."""

    def __init__(self) -> None:
        import cupy

        self.stream = cupy.cuda.Stream(non_blocking=True)
        self.event = cupy.cuda.Event(block=False, disable_timing=True)  # for each time it waits
        self._last: tuple[Any, Hashable] | None = None  #: passed when a short task is done

    def handed_over(self, kind: Hashable, zero: Any) -> None:
        """Have stream 0 wait for a task of this kind; wait for the short one before it."""
        import cupy

        done = cupy.cuda.Event(block=False, disable_timing=True)
        follow(zero, self.stream, done)
        before, self._last = self._last, (done, kind)
        if before is None:
            return
        event, kind = before
        begun = time.perf_counter()
        event.synchronize()
        if time.perf_counter() - begun > SHORT_S:  # other data, or others use the GPU as well
            _seconds.pop(kind, None)


def _own_of(device: int) -> _Own:
    """This thread's stream on a device, which is the current one."""
    streams: dict[int, _Own] = _local.__dict__.setdefault("streams", {})
    if device not in streams:
        streams[device] = _Own()
    return streams[device]
