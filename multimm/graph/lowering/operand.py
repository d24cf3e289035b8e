"""An operand and the plan's blocks: where they are stored, and its own ones, which may be others.

One that comes from a file or a generator is read from there in exactly the plan's blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import product
from typing import Any, NamedTuple

import dask.array as da
from dask._task_spec import Task, TaskRef
from dask.base import get_annotations

from multimm.graph.block_task import Block, Inputs, Key, Sizes
from multimm.graph.made_again import Maker, maker_of
from multimm.graph.tasks.host_offload import upload
from multimm.planning.matrix import Storage
from multimm.planning.schedule import Schedule
from multimm.planning.tiling.grid import Blocks, Coordinate, number_of
from multimm.planning.tiling.rechunk import Index, Part, Where, cuts_of, offsets

Reader = Callable[[tuple[slice, ...]], Block]


def reader_of(array: Any) -> Reader | None:
    """How to read any rectangle of the array from its source, if its layer can tell.

    `multimm.io.open_array` makes such layers: a `reader` attribute holds a picklable function
    from a tuple of slices to a block. Its method ``part``, if it has one, gives the reader that a
    task for such a tuple is sent; its attribute ``storage``, the file's storage chunks. None where
    annotations say how the layer is to run, and the product is not to run like that.
    """
    layer = array.dask.layers.get(array.name)
    reader: Reader | None = getattr(layer, "reader", None)
    own = getattr(layer, "annotations", None)
    return None if own and own != get_annotations() else reader


def storage_of(array: Any) -> Storage | None:
    """Storage chunks of the file that the array's blocks are read from, if its reader tells."""
    storage: Storage | None = getattr(reader_of(array), "storage", None)
    return storage


class Argument(NamedTuple):
    """An operand block, as a task is given it."""

    ref: TaskRef | Task  #: to the block, or what makes it of others
    inputs: Inputs  #: those blocks, by where they are kept
    sizes: Sizes = ()  #: of those that are an array's own and used as they are


@dataclass(frozen=True)
class Operand:
    """A or B of one product, or the C that is added, in the plan's blocks.

    Parameters
    ----------
    role : str
        ``"a"``, ``"b"`` or ``"c"``.
    array : dask.array.Array
        As stored, in its own blocks.
    layout : Schedule
    transposed : bool
        Stored transposed: block (r, c) of op(X) is block (c, r) of the array.
    uploaded : str
        Its blocks lie in host memory, and are brought to GPUs: under keys that begin with this.
    """

    role: str
    array: da.Array
    layout: Schedule
    transposed: bool
    uploaded: str = ""

    @cached_property
    def reader(self) -> Reader | None:
        """How to read any rectangle of the array from its source, if that can be.

        Or how to make it, where the plan is one of an array that is made again. C is read as it
        comes: nobody holds its reads back until they are needed.
        """
        return None if self.role == "c" else reader_of(self.array) or self._maker

    @cached_property
    def _maker(self) -> Maker | None:
        problem = self.layout.problem
        again = problem.rereadable["ab".index(self.role)] and not problem.from_host
        return maker_of(self.array) if again else None

    @property
    def needed(self) -> bool:
        """Whether tasks need something of the array's graph, be it what its reader is given."""
        return self.reader is None or bool(getattr(self.reader, "needs", ()))

    def reader_at(self, where: Where) -> Reader:
        """The reader for one rectangle: with no more than that needs, where it can tell."""
        whole: Any = self.reader
        found: Reader = whole.part(where) if hasattr(whole, "part") else whole
        return partial(_read_and_upload, found) if self.uploaded else found

    @property
    def from_host(self) -> bool:
        """Whether the plan's blocks go to GPUs from host memory each time that they are needed."""
        return self.layout.problem.from_host and self.role != "c" and self.reader is None

    @cached_property
    def in_sub_blocks(self) -> bool:
        """Whether it comes in other blocks than the plan's."""
        return self.reader is None and self.own_chunks != self.chunks

    @cached_property
    def own_chunks(self) -> tuple[Blocks, ...]:
        """The array's own blocks, in the plan's order."""
        chunks = list(self.array.chunks)
        for axis, order in self._orders.items():
            chunks[axis] = tuple(chunks[axis][i] for i in order)
        return tuple(chunks)

    @cached_property
    def _orders(self) -> dict[int, Index]:
        """By axis that the plan takes in another order than it is stored in: that order."""
        order, along_a = self.layout.k_order, -2 if self.transposed else -1
        axis = {"a": along_a, "b": -3 - along_a}.get(self.role)
        return {axis: order} if axis and order else {}

    @cached_property
    def chunks(self) -> tuple[Blocks, ...]:
        """The plan's blocks, in stored order."""
        *batch, rows, cols = self.layout.operand_chunks(self.role)
        return (*batch, cols, rows) if self.transposed else (*batch, rows, cols)

    def index(self, batch: Index, row: int, col: int) -> Index:
        """Where block (row, col) of op(X), for a batch block of C, is stored."""
        own = self.array.ndim - 2
        local = batch[len(batch) - own :] if own else ()
        local = tuple(
            0 if size == 1 else at for size, at in zip(self.array.shape, local, strict=False)
        )
        return (*local, col, row) if self.transposed else (*local, row, col)

    def first_user(self, index: Index) -> Index:
        """The first batch block of C that uses a stored block."""
        own = self.array.ndim - 2
        skipped = len(self.layout.batch_blocks) - own
        return (*(0,) * skipped, *index[:own])

    def key(self, index: Index) -> Key:
        """The key of one of the array's own blocks, in the plan's order, as tasks take it."""
        return self._keys[index]

    @cached_property
    def _keys(self) -> dict[Index, Key]:
        """`key` of all blocks: of hundreds, each asked for several times."""
        name, counts = self.uploaded or self.array.name, self.array.numblocks
        # Of what another product reads: see `multimm.graph.shared_reads`.
        targets = getattr(self.array.dask.layers.get(self.array.name), "targets", {})
        axes = [self._orders.get(n - len(counts), range(count)) for n, count in enumerate(counts)]
        blocks = zip(product(*map(range, counts)), product(*axes), strict=True)
        return {at: targets.get(stored) or (name, *stored) for at, stored in blocks}

    def source(self, index: Index) -> Key:
        """The array's own key of one of its blocks, in the plan's order."""
        return (self.array.name, *self.key(index)[1:])

    def located(self, index: Index) -> Coordinate | None:
        """The worker with one of the array's own blocks, in the grid; None if nobody knows one."""
        owners, grid = self.layout.spec(self.role).owners, self.layout.grid
        if not owners:
            return None
        at, blocks = list(index), list(self.array.numblocks)
        if self.transposed:
            at[-2:], blocks[-2:] = at[:-3:-1], blocks[:-3:-1]
        rank = owners[number_of(at, blocks)]
        return grid.place(rank) if rank < grid.workers else None

    def where(self, index: Index) -> Where:
        """The rectangle of the array that a stored block covers."""
        return tuple(offsets[at] for offsets, at in zip(self._offsets, index, strict=True))

    def sub_blocks(self, where: Where, key: Callable[[Index], Key]) -> list[Part]:
        """What the array's own blocks, which have such keys, have of a rectangle of it."""
        return [part._replace(of=key(part.of)) for part in self.cuts(where)]

    def cuts(self, where: Where) -> list[Part]:
        """The same by the indices of these blocks."""
        return cuts_of(self._own_offsets, where)

    @cached_property
    def _own_offsets(self) -> list[list[slice]]:
        return [*map(offsets, self.own_chunks)]

    @cached_property
    def _offsets(self) -> tuple[list[slice], ...]:
        return tuple(offsets(blocks) for blocks in self.chunks)


def _read_and_upload(reader: Reader, where: Where) -> Block:
    """A rectangle of an array, on this worker's GPU."""
    return upload(reader(where))
