"""Blocks in the host memory of GPU workers: multiplied on the GPU, and returned as they came.

Operands of NumPy give results of NumPy. On workers with GPUs each block of such an operand goes up
to a GPU by a task of its own (`multimm.graph.lowering.host_uploads`), and each block of the result
comes back by the task that makes it, or by another (`multimm.graph.lowering.host_downloads`). Dask
fuses nothing with these: they give up their worker's thread while bytes travel, and what it fused
would run in no thread of the worker's, beside any number of its like, and could not be spilled.

Products in between give it up as well (`multiply_beside`), so that it is free for the next copy.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from operator import itemgetter
from typing import Any

import numpy as np

from multimm.blocks import plain
from multimm.failures import named, note
from multimm.gpu.arrays import is_cupy, to_numpy
from multimm.graph.block_task import Block
from multimm.graph.label import Label
from multimm.graph.streams import computing, in_order, own_stream
from multimm.graph.tasks.dtype_check import DType, as_declared
from multimm.graph.tasks.multiply import finished, launch, multiply, stream_for
from multimm.graph.tasks.sub_blocks import SubBlocks
from multimm.graph.tasks.worker_thread import beside_other_tasks, give_up_thread
from multimm.planning.cost.memory import AT_ONCE, IN_FLIGHT
from multimm.planning.tiling.rechunk import Where
from multimm.shapes import Shape


@dataclass(eq=False)
class _Leaving:
    """A block that leaves the GPU, and the limit of its product, in bytes."""

    nbytes: int
    limit: int
    inside: bool = False  #: on its way; else it waits


class Room:
    """Blocks that leave the GPU, of all products of this process: first in, first out.

    Attributes
    ----------
    blocks : list of _Leaving
        As they came: those inside, then those that wait.
    """

    def __init__(self) -> None:
        self.blocks: list[_Leaving] = []
        self._changed = threading.Condition()

    @contextmanager
    def room(self, nbytes: int, limit: int | None) -> Iterator[None]:
        """Wait for a block's turn, and let the next ones in when it is through.

        The first of those that wait enters when nothing is inside, or when all together stay within
        the smallest of their limits. Who is inside waits for nobody who is not: so there is no
        deadlock, however many of a worker's threads wait here.

        Parameters
        ----------
        nbytes : int
            Of the block.
        limit : int or None
            Bytes. None: the block waits for none, and none for it.
        """
        if limit is None:
            yield
            return
        own = _Leaving(nbytes, limit)
        try:
            with self._changed:
                self.blocks.append(own)
                self._admit()
                self._changed.wait_for(lambda: own.inside)
            yield
        finally:  # also of one that was interrupted while it waited
            with self._changed:
                self.blocks = [block for block in self.blocks if block is not own]
                self._admit()

    def wait_for_room(self) -> None:
        """Until no block waits."""
        with self._changed:
            self._changed.wait_for(lambda: all(block.inside for block in self.blocks))

    def _admit(self) -> None:
        together = [block for block in self.blocks if block.inside]
        for block in self.blocks[len(together) :]:
            together.append(block)
            total = sum(each.nbytes for each in together)
            if len(together) > 1 and total > min(each.limit for each in together):
                break
            block.inside = True
        self._changed.notify_all()


#: Tasks of one process that wait for the link, each in a thread, while others run.
_waiting: threading.BoundedSemaphore
_going_up: threading.BoundedSemaphore
_coming_back: threading.BoundedSemaphore
_leaving: Room
#: Products that have given up their worker's thread, and the threads that launch them: these stay,
#: and so do their streams and what libraries keep for a thread.
_multiplying: threading.BoundedSemaphore
_launching: ThreadPoolExecutor


def _begin() -> None:
    """With nobody waiting: a fork has none of its parent's threads."""
    global _waiting, _going_up, _coming_back, _leaving, _multiplying, _launching
    _waiting = threading.BoundedSemaphore(32)  # arbitrary
    _going_up, _coming_back = (threading.BoundedSemaphore(AT_ONCE) for _ in range(2))
    _leaving = Room()
    _multiplying = threading.BoundedSemaphore(64)  # arbitrary
    _launching = ThreadPoolExecutor(IN_FLIGHT, "multimm-multiply")


_begin()
os.register_at_fork(after_in_child=_begin)


def upload(block: Block, *, dtype: DType = None) -> Block:
    """A block in host memory on this worker's GPU; any other, and without a GPU, as it is.

    Parameters
    ----------
    block : array
    dtype : dtype, optional
        That its array declares.
    """
    return uploaded([as_declared(block, dtype)], itemgetter(0))


def uploaded(
    blocks: list[Block],
    made: Callable[[list[Block]], Block],
    whole: tuple[Sequence[Where], Shape] | None = None,
) -> Block:
    """What is made of blocks of the dtypes that their arrays declare, once they are there.

    If that is a matrix, `whole` says where in it each goes, and its shape: it may be joined on its
    way.
    """
    if (at := _device()) is None or not any(map(_in_host_memory, blocks)):
        return made(blocks)
    alike = all(map(_in_host_memory, blocks)) and len({block.dtype for block in blocks}) == 1
    with beside_other_tasks(_waiting), _going_up, own_stream(at):
        if whole is None or not alike:
            return finished(made(_all_there(blocks)))
        from multimm.gpu.transfer.pinned_copy import joined_on_device

        return finished(joined_on_device([*map(_native, blocks)], *whole))


@named
def download(block: Block, *, limit: int | None = None) -> Block:
    """A block in host memory.

    Parameters
    ----------
    block : array
    limit : int, optional
        Bytes of blocks, of all products with a limit, that may be on their way beside other tasks.
        Before more are, the worker's thread waits, and no product begins: it would have no room.
    """
    return _fetched(block, limit)


def bring_back(
    back: Label, limit: int | None, func: Callable[..., Block], *args: Any, **more: Any
) -> Block:
    """`download` of what a function makes, in the same task; errors on the way back say so."""
    block = func(*args, **more)
    try:
        return _fetched(block, limit)
    except Exception as error:
        note(error, str(back))
        raise


def _fetched(block: Block, limit: int | None) -> Block:
    """`download`, whose errors name no task."""
    if not is_cupy(block):
        return block
    from multimm.gpu.transfer.pinned_copy import to_host

    with (
        _leaving.room(block.nbytes, limit),
        beside_other_tasks(_waiting),
        _coming_back,
        stream_for(block, computes=False),
    ):
        return to_host(block)


def multiply_beside(*last: Block, **more: Any) -> Block:
    """`multiply`, without the worker's thread: that copies, or begins the next product.

    Products are launched in the order in which they come, the next one while one runs.
    """
    if (at := _device()) is None:
        return multiply(*last, **more)
    with _multiplying:  # the thread waits with one of too many
        give_up_thread()
        return _launching.submit(_multiply_next, at, *last, **more).result()


def _multiply_next(device: int, *last: Block, **more: Any) -> Block:
    _leaving.wait_for_room()
    with own_stream(device):
        with in_order(device):
            block = launch(*last, **more)
        return finished(block)


def on_device(func: Callable[..., Block], *given: Any, **more: Any) -> Block:
    """What a function makes of blocks in host memory, computed on this worker's GPU, back there.

    Without a GPU it is computed where the blocks are. What is no block, and no `SubBlocks` of some,
    is handed on.
    """
    if (at := _device()) is None:
        return func(*given, **more)
    with computing(at):
        there = _all_there([*given, *more.values()])
        named = dict(zip(more, there[len(given) :], strict=True))
        return to_numpy(func(*there[: len(given)], **named))


def _in_host_memory(block: Block) -> bool:
    """Of NumPy, a file that is mapped into memory included."""
    return isinstance(block, np.ndarray) and not is_cupy(block)


def _all_there(given: Sequence[Any]) -> list[Any]:
    """Blocks, also those in sub-blocks, on the current device; anything else as it is."""
    own = [block for x in given for block in (x.blocks if isinstance(x, SubBlocks) else [x])]
    sources = {id(block): _native(block) for block in own if _in_host_memory(block)}
    if not sources:
        return [*given]
    from multimm.gpu.transfer.pinned_copy import all_to_device

    there = dict(zip(sources, all_to_device([*sources.values()]), strict=True))
    return [_found(x, there) for x in given]


def _found(x: Any, there: dict[int, Block]) -> Any:
    """What has come there in place of a block, or of those that it comes in.

    (Within its caller it would refer to itself, and to all blocks until garbage is collected.)
    """
    if isinstance(x, SubBlocks):
        return replace(x, blocks=[_found(block, there) for block in x.blocks])
    return there.get(id(x), x)


def _native(block: Block) -> Block:
    """A block of host memory as CuPy takes it: an ndarray, in the byte order of this machine."""
    return np.asarray(plain(block), block.dtype.newbyteorder("="))


@cache
def _device() -> int | None:
    """This worker's GPU: the current one of a process to which dask-cuda gave it."""
    try:
        import cupy

        return int(cupy.cuda.runtime.getDevice())
    except Exception:  # no CuPy, no driver, no device: a cluster that has lost its GPUs
        return None
