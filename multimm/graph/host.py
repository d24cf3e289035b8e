"""Blocks in the host memory of GPU workers: multiplied on the GPU, and returned as they came.

Whose operands are NumPy arrays gets NumPy arrays, wherever the workers multiply them. So on workers
with GPUs each block of such an operand is brought to the GPU of the worker that has it, or is to
have it (`multimm.graph.uploads`); all that follows is as for blocks that were made there. A task
for each block of the result brings that back, in a layer of its own: a product of the result takes
what is below. What gives its worker's thread up while bytes travel is a task of its own: what
Dask made one with it would run in no thread of the worker's, beside any number of its like, and
what it held could not be spilled.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache
from operator import itemgetter
from typing import Any

import dask.array as da
import numpy as np
from dask._task_spec import Task, TaskRef
from dask.highlevelgraph import HighLevelGraph

from multimm.blocks import plain
from multimm.failures import named
from multimm.gpu.arrays import is_cupy, to_numpy
from multimm.graph.block_task import Block, Key, OwnTask
from multimm.graph.declared import DType, as_declared
from multimm.graph.owners import ProductLayer
from multimm.graph.pieces import Pieces
from multimm.graph.streams import own_stream
from multimm.graph.tasks import finished, stream_for
from multimm.planning.memory import AT_ONCE

#: Tasks of one process that wait for the link, each in a thread, while others run: arbitrary.
_waiting = threading.BoundedSemaphore(32)
_going_up, _coming_back = (threading.BoundedSemaphore(AT_ONCE) for _ in range(2))


class Room:
    """Bytes of blocks that leave the GPU, of all products of this process together."""

    def __init__(self) -> None:
        self._bytes = 0
        self._changed = threading.Condition()

    @contextmanager
    def room(self, nbytes: int, most: int | None) -> Iterator[None]:
        """Wait until a block makes no more than `most` bytes with all others; alone it may.

        Parameters
        ----------
        nbytes : int
            Of the block.
        most : int or None
            None: wait for nothing, but count.
        """
        with self._changed:
            if most is not None:
                self._changed.wait_for(lambda: not self._bytes or self._bytes + nbytes <= most)
            self._bytes += nbytes
        try:
            yield
        finally:
            with self._changed:
                self._bytes -= nbytes
                self._changed.notify_all()


_leaving = Room()


def upload(block: Block, *, dtype: DType = None) -> Block:
    """A block in host memory on this worker's GPU; any other, and without a GPU, as it is.

    Parameters
    ----------
    block : array
    dtype : dtype, optional
        That its array declares.
    """
    return uploaded([as_declared(block, dtype)], itemgetter(0))


def uploaded(blocks: list[Block], made: Callable[[list[Block]], Block]) -> Block:
    """What is made of blocks of the dtypes that their arrays declare, once they are there."""
    if (at := _device()) is None or not any(map(_in_host_memory, blocks)):
        return made(blocks)
    with _beside_other_tasks(), _going_up, own_stream(at):
        return finished(made(_all_there(blocks)))


class DownloadLayer(ProductLayer):
    """The tasks that bring a product's blocks back, and the name of what these are of."""

    def __init__(
        self, tasks: Mapping[Key, Task], below: str, owners: tuple[int, ...], workers: int
    ) -> None:
        super().__init__(tasks, owners, workers)
        self.below = below

    def renamed(
        self, tasks: Mapping[Key, Task], new: Callable[[Key], Key], *, bound: bool
    ) -> ProductLayer:
        """What waits for something else does so here: there is nothing to take from below."""
        if bound:
            return ProductLayer(tasks, self.owners, self.workers)
        return DownloadLayer(tasks, new(self.below), self.owners, self.workers)


@named
def download(block: Block, *, most: int | None = None) -> Block:
    """A block in host memory.

    Parameters
    ----------
    block : array
    most : int, optional
        So many that are on their way, or wait for it, do so beside other tasks. Before one more
        does, the worker's thread waits: what it would multiply meanwhile had no room. Blocks of
        other products count by their bytes.
    """
    if not is_cupy(block):
        return block
    from multimm.gpu.host import to_host

    most_bytes = None if most is None else most * block.nbytes
    with (
        _leaving.room(block.nbytes, most_bytes),
        _beside_other_tasks(),
        _coming_back,
        stream_for(block),
    ):
        return to_host(block)


def on_device(func: Callable[..., Block], *given: Any, **more: Any) -> Block:
    """What a function makes of blocks in host memory, computed on this worker's GPU, back there.

    Without a GPU it is computed where the blocks are. What is no block, and no `Pieces` of some, is
    handed on.
    """
    if (at := _device()) is None:
        return func(*given, **more)
    with own_stream(at):
        there = _all_there([*given, *more.values()])
        named = dict(zip(more, there[len(given) :], strict=True))
        return to_numpy(func(*there[: len(given)], **named))


def downloaded(array: da.Array, name: str, most: int | None) -> da.Array:
    """The lazy array, of a name, of a product's blocks in host memory; `most` as for `download`."""
    made = {
        (name, *index): OwnTask((name, *index), download, TaskRef((array.name, *index)), most=most)
        for index in np.ndindex(*array.numblocks)
    }
    product = array.dask.layers[array.name]
    layer = DownloadLayer(made, array.name, product.owners, product.workers)
    upstream: Any = array
    graph = HighLevelGraph.from_collections(name, layer, dependencies=[upstream])
    return da.Array(graph, name, array.chunks, meta=array._meta)


def below_download(array: da.Array) -> da.Array:
    """What `downloaded` was made of; any other array itself."""
    layer = array.dask.layers.get(array.name)
    if not isinstance(layer, DownloadLayer):
        return array
    name = layer.below
    return da.Array(array.dask.cull_layers([name]), name, array.chunks, meta=array._meta)


def _in_host_memory(block: Block) -> bool:
    """Of NumPy, a file that is mapped into memory included."""
    return isinstance(block, np.ndarray) and not is_cupy(block)


def _all_there(given: Sequence[Any]) -> list[Any]:
    """Blocks, also those in pieces, on the current device; anything else as it is."""
    own = [block for x in given for block in (x.blocks if isinstance(x, Pieces) else [x])]
    sources = {id(block): _native(block) for block in own if _in_host_memory(block)}
    if not sources:
        return [*given]
    from multimm.gpu.host import all_to_device

    there = dict(zip(sources, all_to_device([*sources.values()]), strict=True))
    return [_found(x, there) for x in given]


def _found(x: Any, there: dict[int, Block]) -> Any:
    """What has come there in place of a block, or of those that it comes in.

    (Within its caller it would refer to itself, and to all blocks until garbage is collected.)
    """
    if isinstance(x, Pieces):
        return replace(x, blocks=[_found(block, there) for block in x.blocks])
    return there.get(id(x), x)


def _native(block: Block) -> Block:
    """A block of host memory as CuPy takes it: an ndarray, in the byte order of this machine."""
    return np.asarray(plain(block), block.dtype.newbyteorder("="))


@contextmanager
def _beside_other_tasks() -> Iterator[None]:
    """Let the worker begin another task meanwhile: one that the link to the host is nothing to."""
    from distributed import secede

    if beside := _waiting.acquire(blocking=False):
        # No worker of distributed's; or one that does so already, in the same task.
        with suppress(ValueError, KeyError):
            secede()
    try:
        yield
    finally:
        if beside:
            _waiting.release()


@cache
def _device() -> int | None:
    """This worker's GPU: the current one of a process to which dask-cuda gave it."""
    try:
        import cupy

        return int(cupy.cuda.runtime.getDevice())
    except Exception:  # no CuPy, no driver, no device: a cluster that has lost its GPUs
        return None
