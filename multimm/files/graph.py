"""Stored matrices as Dask graphs: one root task per block read, one task per block written."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import dask.array as da
import numpy as np
from dask._task_spec import Task, TaskRef
from dask.array.core import normalize_chunks, slices_from_chunks
from dask.base import tokenize
from dask.highlevelgraph import HighLevelGraph

from multimm.errors import (
    FileFormatError,
    MultimmError,
    OptionError,
    ShapeError,
    how_to_install_for_gpus,
)
from multimm.failures import current_worker, named
from multimm.files import FORMATS, raw
from multimm.files.identity import check
from multimm.files.output.unfinished import remove
from multimm.files.stored import StoredMatrix, Where, causes_stay, reason
from multimm.gpu.arrays import by_dask_cuda, to_numpy
from multimm.gpu.transfer.pinned_copy import threads_beside_a_gpu, to_device
from multimm.graph.block_task import check_shape
from multimm.graph.layers import TaskLayer
from multimm.graph.tasks.dtype_check import as_declared
from multimm.graph.tasks.worker_thread import beside_other_tasks
from multimm.planning.cost.reading import READERS
from multimm.planning.matrix import Storage
from multimm.settings import auto, chunk_bytes
from multimm.shapes import auto_of_empty, chunk_count, per_axis

Chunks = tuple[tuple[int, ...], ...]
#: Largest storage chunk of a Zarr output. A thread writes one: a block of 320 MB took 0.15 s in
#: chunks of 40 MB, and 0.49 in two of 160 (16 cores beside an H100, to memory).
ZARR_CHUNK_BYTES = 64 * 2**20
#: Tasks of one graph, arbitrary: Dask takes minutes for as many.
MOST_BLOCKS = 10**6
#: Blocks of few chunks that are read beside the one that a worker's thread reads; arbitrary.
BESIDE = 2
_beside = threading.BoundedSemaphore(BESIDE)
#: Of what errors call blocks that are written.
WRITTEN = "what is written"


@named
@causes_stay
def read_block(matrix: StoredMatrix, index: Where, gpu: bool = False) -> Any:
    """One block of a stored matrix, as a NumPy (or CuPy) array of its own."""
    try:
        block = FORMATS[matrix.place.suffix].read(matrix, index, _threads(gpu))
    except (FileFormatError, MemoryError):
        raise
    except Exception as error:  # parsers raise anything
        raise _unreadable(matrix, error) from error
    block = _native(np.asarray(block, dtype=matrix.dtype))
    return to_device(block) if gpu else block


def _threads(gpu: bool) -> int:
    """How many a task may use: CPU workers are as many as cores, which wait for a GPU's worker."""
    worker = current_worker()
    beside = gpu or (worker is not None and by_dask_cuda(worker))
    return threads_beside_a_gpu(READERS) if beside else 1


def _beside_other_tasks(matrix: StoredMatrix, threads: int) -> AbstractContextManager[None]:
    """Let the worker begin another task meanwhile, where a block has few chunks for its threads.

    Else cores are idle: a block has 4 to 6 chunks, say, and there are 16 threads for it.
    """
    few = 0 < len(matrix.states or ()) <= threads // 2
    return beside_other_tasks(_beside) if few else nullcontext()


def _unreadable(matrix: StoredMatrix, error: Exception) -> FileFormatError:
    """Why a block cannot be read: what was opened is gone or another, or what was raised."""
    try:
        check(matrix.sources)
    except FileFormatError as changed:
        return changed
    except Exception:  # the server is gone, say, as the first error has it
        pass
    return FileFormatError(f"{matrix.place}: cannot be read ({reason(error)})")


def _native(block: Any) -> Any:
    """A block that nobody else has, in this machine's byte order: not beside the other one."""
    native = block.dtype.newbyteorder("=")
    if block.dtype == native or not (block.flags.owndata and block.flags.writeable):
        return block.astype(native, copy=False)
    return block.byteswap(inplace=True).view(native)


class Writer(NamedTuple):
    """Who began an output, for the tasks that write it."""

    #: What is written, for messages.
    target: str
    #: Who syncs all that is written there at the end: tasks elsewhere sync their own blocks.
    machine: str
    #: A file with a byte for each block, which is 1 once the block is written. It goes first where
    #: the output is given up: whoever misses it removes what came too late to be removed.
    marks: str

    def is_gone(self) -> bool:
        """Whether the output was given up; not so where its folder is not seen."""
        return not os.path.exists(self.marks) and os.path.isdir(os.path.dirname(self.marks))


@named
def write_block(
    matrix: StoredMatrix, index: Where, block: Any, writer: Writer, number: int
) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Write one block; a single true element in as many dimensions as the block has.

    What is not as its array declares it would be cast, or repeated, without a word.
    """
    block = as_declared(to_numpy(block), matrix.dtype, WRITTEN, rounded=False)
    check_shape(block, tuple(at.stop - at.start for at in index), of=WRITTEN)
    form = FORMATS[matrix.place.suffix]
    try:
        form.write(matrix, index, block, _threads(gpu=False))
        if writer.machine != raw.machine(matrix.path):
            form.sync(matrix, index)
        with open(writer.marks, "r+b", buffering=0) as marks:
            marks.seek(number)
            marks.write(b"\1")
    except Exception as error:
        if writer.is_gone():
            remove(Path(matrix.path))  # Zarr makes folders again that are gone
            raise FileFormatError(
                f"{writer.target}: the output was given up before all blocks were written; compute "
                "what the last store() gives, before its `with` ends"
            ) from error
        if not isinstance(error, OSError):
            raise
        raise FileFormatError(
            f"{writer.target}: a block cannot be written ({reason(error)}); nothing was put there: "
            "make room, or write elsewhere"
        ) from error
    return np.ones((1,) * len(index), dtype=bool)


@dataclass(frozen=True, slots=True)
class Reader:
    """The function that reads any rectangle of a stored matrix, by a tuple of slices."""

    matrix: StoredMatrix
    gpu: bool  #: blocks are CuPy arrays

    @property
    def storage(self) -> Storage | None:
        """Storage chunks that are decoded as a whole, for plans."""
        return self.matrix.storage

    def __call__(self, index: Where) -> Any:
        """Read one rectangle: in a task of a product, with which nothing is fused."""
        with _beside_other_tasks(self.matrix, _threads(self.gpu)):
            return read_block(self.matrix, index, self.gpu)

    def part(self, index: Where) -> Reader:
        """The same with no more than that rectangle needs, for the task that reads it."""
        return Reader(FORMATS[self.matrix.place.suffix].part(self.matrix, index), self.gpu)


class ReadLayer(TaskLayer):
    """The reading tasks, with the function that reads any other rectangle as well.

    With that a product takes its own blocks straight from the file.
    """

    def __init__(self, tasks: Mapping[Any, Task], reader: Callable[[Where], Any]) -> None:
        super().__init__(tasks)
        self.reader = reader

    def clone(self, *args: Any, **kwargs: Any) -> tuple[TaskLayer, bool]:
        """Copies that wait for something else are not to be read in another way, which does not."""
        layer, bound = super().clone(*args, **kwargs)
        return (TaskLayer(layer.mapping, layer.annotations) if bound else layer), bound


def lazy(matrix: StoredMatrix, chunks: Chunks, gpu: bool) -> da.Array:
    """The array whose blocks are read when they are needed."""
    meta = np.empty((0,) * len(matrix.shape), matrix.dtype.newbyteorder("="))
    if gpu:
        try:
            import cupy
        except ImportError as error:
            raise OptionError(
                f"blocks of gpu=True are CuPy arrays, but CuPy cannot be imported ({error}): "
                f"install the GPU packages: {how_to_install_for_gpus()}"
            ) from None
        meta = cupy.asarray(meta)
    states = sorted(matrix.states.items()) if matrix.states is not None else None
    told = str(matrix.place), matrix.shape, matrix.dtype, matrix.inside, matrix.sources
    name = f"read-{tokenize(repr(told), repr(states), chunks, gpu)}"
    part = FORMATS[matrix.place.suffix].part
    layer: dict[Any, Task] = {
        (name, *position): Task((name, *position), read_block, part(matrix, index), index, gpu)
        for position, index in _indices(chunks)
    }
    graph = HighLevelGraph.from_collections(name, ReadLayer(layer, Reader(matrix, gpu)))
    return da.Array(graph, name, chunks, meta=meta)


def writes(matrix: StoredMatrix, array: da.Array, writer: Writer) -> da.Array:
    """The array of flags that, block by block, writes `array` into `matrix`."""
    name = f"write-{tokenize(matrix, array.name)}"
    layer: dict[Any, Task] = {
        (name, *position): Task(
            (name, *position),
            write_block,
            matrix,
            index,
            TaskRef((array.name, *position)),
            writer,
            number,
        )
        for number, (position, index) in enumerate(_indices(array.chunks))
    }
    upstream: Any = array
    graph = HighLevelGraph.from_collections(name, TaskLayer(layer), dependencies=[upstream])
    ones = tuple((1,) * len(sizes) for sizes in array.chunks)
    return da.Array(graph, name, ones, meta=np.empty((0,) * array.ndim, dtype=bool))


def _indices(chunks: Chunks) -> Iterator[tuple[tuple[int, ...], Where]]:
    """Position in the grid of blocks and slices into the matrix, for every block."""
    return zip(np.ndindex(*map(len, chunks)), slices_from_chunks(chunks), strict=True)


def blocks(matrix: StoredMatrix, chunks: Any) -> Chunks:
    """Block sizes per dimension, as Dask writes them."""
    if chunks is None or (isinstance(chunks, str) and chunks == "auto"):
        chunks = _grouped(matrix) if matrix.chunks else "auto"
    try:
        given = per_axis(chunks, matrix.shape)
        _check_count(matrix, auto(matrix.shape, matrix.dtype.itemsize, given))
        blocks = normalize_chunks(
            auto_of_empty(given, matrix.shape), matrix.shape, dtype=matrix.dtype
        )
        if any(size < 0 for sizes in blocks for size in sizes):
            raise ValueError("a size below 0")
        return tuple(tuple(map(int, sizes)) for sizes in blocks)
    except MultimmError:
        raise
    except (ValueError, TypeError, ZeroDivisionError) as error:
        raise ShapeError(
            f"{matrix.place}: chunks={chunks!r} do not fit shape {matrix.shape} ({reason(error)}); "
            'give a size above 0 for all axes, one for each, or "auto"'
        ) from error


def _check_count(matrix: StoredMatrix, chunks: Any) -> None:
    """Raise for more blocks than a graph can have tasks, before they are listed."""
    count = chunk_count(chunks, matrix.shape)
    if count > MOST_BLOCKS:
        raise ShapeError(
            f"{matrix.place}: shape {matrix.shape} in chunks={chunks!r} makes {count:,} blocks; at "
            f"most {MOST_BLOCKS:,} are allowed: give larger chunks"
        )


def _grouped(matrix: StoredMatrix) -> tuple[int, ...]:
    """Storage chunks, doubled along the shorter side while they stay under Dask's limit.

    Never less than one storage chunk: part of one costs as much to read as all of it.
    """
    limit = chunk_bytes()
    block = [
        max(1, min(chunk, size))
        for chunk, size in zip(matrix.chunks or (), matrix.shape, strict=True)
    ]
    while True:
        open_axes = [axis for axis, size in enumerate(matrix.shape) if block[axis] < size]
        if not open_axes or 2 * math.prod(block) * matrix.dtype.itemsize > limit:
            return tuple(block)
        axis = min(open_axes, key=lambda candidate: block[candidate])
        block[axis] = min(2 * block[axis], matrix.shape[axis])


def storage_chunks(array: da.Array) -> tuple[int, ...]:
    """Zarr chunks that divide the blocks evenly: a block, or halves of it where it is large."""
    chunk = [max(1, sizes[0]) for sizes in array.chunks]
    while math.prod(chunk) * array.dtype.itemsize > ZARR_CHUNK_BYTES:
        even = [axis for axis, size in enumerate(chunk) if size % 2 == 0]
        if not even:
            break
        axis = max(even, key=lambda candidate: chunk[candidate])
        chunk[axis] //= 2
    return tuple(chunk)
