"""Operands whose chunks a product may make itself, when it needs them.

A chunk of `da.from_zarr`, of an array of xarray, or of what is computed of these chunk by chunk,
comes of no other chunk. Dask's own product makes it anew for each block of C. Behind a product of
ours Dask's tasks make each chunk once; but they wait for nothing, and all chunks may be in memory
at once. Where that is too much, tasks of the product make them as others read blocks of a file:
when they are due, and again in the next row panel.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any

import dask.array as da
import numpy as np
from dask._task_spec import Task
from dask.blockwise import Blockwise, optimize_blockwise

from multimm.gpu.arrays import is_cupy
from multimm.graph.block_task import Block, Key, check_shape
from multimm.graph.tasks.dtype_check import DType, as_declared
from multimm.planning.matrix import Storage
from multimm.planning.tiling.grid import Blocks
from multimm.planning.tiling.rechunk import Index, Where, cuts_of, offsets, size_of

#: Of what makes a chunk nobody knows how long it takes: as long as to decode one.
_CODEC = "other"


@dataclass(frozen=True)
class Maker:
    """Makes any rectangle of an array of its chunks, one after another.

    Parameters
    ----------
    tasks : dict
        That make chunks, by index.
    needs : tuple of Key
        What each of the tasks is given: a file that is open, say.
    chunks : tuple of Blocks
    dtype : dtype
    """

    tasks: Mapping[Index, Task]
    needs: tuple[Key, ...]
    chunks: tuple[Blocks, ...]
    dtype: DType

    @property
    def storage(self) -> Storage:
        """For plans: each chunk is made as a whole, even if a part is needed."""
        chunk, itemsize = tuple(map(max, self.chunks)), np.dtype(self.dtype).itemsize
        return Storage(chunk, itemsize, 2 * prod(chunk) * itemsize, codec=_CODEC)

    def part(self, where: Where) -> Maker:
        """The same with no more tasks than that rectangle needs."""
        return replace(self, tasks={at: self.tasks[at] for at, *_ in self._cuts(where)})

    def __call__(self, where: Where, *given: Any) -> Block:
        """Make one rectangle, of the values of `needs`."""
        values = dict(zip(self.needs, given, strict=True))
        cuts = self._cuts(where)
        whole: Block = None
        for at, cut, to in cuts:
            size = size_of(self.chunks, at)
            block = as_declared(self.tasks[at](values), self.dtype)
            check_shape(block, size, self.tasks[at].key)
            if len(cuts) == 1 and block[cut].shape == size:
                return block
            if whole is None:
                whole = np.empty([x.stop - x.start for x in where], block.dtype)
            whole[to] = block[cut]
        return whole

    def _cuts(self, where: Where) -> list[tuple[Index, Where, Where]]:
        return list(cuts_of(self._offsets, where))

    @cached_property
    def _offsets(self) -> list[list[slice]]:
        return [*map(offsets, self.chunks)]


def maker_of(array: da.Array) -> Maker | None:
    """How tasks can make an array's chunks themselves; None where these come of other chunks.

    Also where annotations say how they are to be made, where they are not of one size, and on GPUs.
    """
    regular = all(size == sizes[0] for sizes in array.chunks for size in sizes[:-1])
    regular = regular and all(sizes[-1] <= sizes[0] for sizes in array.chunks if sizes)
    if is_cupy(array._meta) or not regular or array.npartitions == 1:
        return None
    layer = optimize_blockwise(array.dask, keys=[array.name]).layers[array.name]
    if not isinstance(layer, Blockwise) or layer.annotations:
        return None
    tasks = {at: layer[(array.name, *at)] for at in np.ndindex(*array.numblocks)}
    needs = {task.dependencies for task in tasks.values()}
    if len(needs) > 1:  # some of other chunks than others
        return None
    return Maker(tasks, tuple(*needs), array.chunks, array.dtype)
