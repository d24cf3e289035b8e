"""Operands whose chunks a product may make itself, when it needs them.

A chunk of `da.from_zarr`, of an array of xarray, or of what is computed of these chunk by chunk,
needs no other chunk. Dask's own product makes it anew for each block of C. Behind a product of
ours Dask's tasks make each chunk once; but they wait for nothing, and all chunks may be in memory
at once. Where that is too much (`products.Product._made_again`), tasks of the product make them as
others read blocks of a file: when their k-tile is due, and again in the next row panel.

Only what Dask itself would run again may be made again: what it computes chunk by chunk, and
slices. Other tasks, such as those of `da.from_delayed`, it runs once, however many tasks need what
they return, and so do we. It also makes once what both operands are made of: there `unsure` finds
functions that may return something else the next time, and such products are left to Dask.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from math import prod
from typing import Any

import dask.array as da
import numpy as np
from dask._task_spec import Alias, GraphNode, Task, convert_legacy_graph
from dask.array.chunk import astype, getitem
from dask.array.core import getter, getter_inline, getter_nofancy
from dask.blockwise import Blockwise, optimize_blockwise
from dask.core import flatten
from dask.highlevelgraph import HighLevelGraph, Layer

from multimm.gpu.arrays import is_cupy
from multimm.graph.block_task import Block, Key, check_shape
from multimm.graph.tasks.dtype_check import DType, as_declared
from multimm.planning.matrix import Storage
from multimm.planning.tiling.grid import Blocks, is_regular
from multimm.planning.tiling.rechunk import Index, Part, Where, cuts_of, offsets

#: How long it takes to make a chunk nobody knows: plans assume the time to decode one.
_CODEC = "other"
#: Tasks that begin a chunk, needing no other of its tasks, at most: what each returns is in memory
#: at once. Arbitrary: a chunk may be the sum of a few others, but not the mean of a hundred.
_FIRST = 4
#: Functions, besides NumPy's ufuncs, that return the same of the same arguments each time. The list
#: need not be complete: operands made by others are made once.
_SURE = (
    getter, getter_nofancy, getter_inline, getitem, astype, np.transpose,
    operator.add, operator.sub, operator.mul, operator.truediv, operator.neg, operator.getitem,
)  # fmt: skip


@dataclass(frozen=True)
class Maker:
    """Makes any rectangle of an array of its chunks, one after another.

    Parameters
    ----------
    tasks : dict
        By index of a chunk: the tasks that make it and nothing else, in the order in which they
        run. An empty tuple where the chunk is in memory: then it is one of `needs` itself.
    chunks : tuple of Blocks
    dtype : dtype
    name : str
        Of the array.
    """

    tasks: Mapping[Index, tuple[GraphNode, ...]]
    chunks: tuple[Blocks, ...]
    dtype: DType
    name: str

    @property
    def needs(self) -> tuple[Key, ...]:
        """What the tasks are given: a file that is open, say, or a row that is subtracted."""
        return (*dict.fromkeys(key for at in self.tasks for key in self._given(at)),)

    @property
    def storage(self) -> Storage | None:
        """For plans: each chunk is made as a whole, even if a part is needed."""
        if not any(self.tasks.values()):
            return None
        chunk, itemsize = tuple(map(_length, self.chunks)), np.dtype(self.dtype).itemsize
        most = prod(map(max, self.chunks)) * itemsize
        return Storage(chunk, itemsize, 2 * most, codec=_CODEC)

    def part(self, where: Where) -> Maker:
        """The same with no more tasks than that rectangle needs."""
        return replace(self, tasks={at: self.tasks[at] for at, *_ in self._cuts(where)})

    def __call__(self, where: Where, *given: Any) -> Block:
        """Make one rectangle, of the values of `needs`."""
        values = dict(zip(self.needs, given, strict=True))
        cuts = self._cuts(where)
        whole: Block = None
        for at, size, cut, to in cuts:
            try:
                block = as_declared(self._chunk(at, values), self.dtype)
                check_shape(block, size)
            except Exception as error:
                error.add_note(f"chunk {self._key(at)!r} was to be made")
                raise
            if len(cuts) == 1 and block[cut].shape == size:
                return block
            if whole is None:
                whole = np.empty([x.stop - x.start for x in where], block.dtype)
            whole[to] = block[cut]
        return whole

    def _chunk(self, at: Index, values: Mapping[Key, Any]) -> Block:
        """Each value is dropped once it was used: one task alone needs it."""
        made = dict(values)
        tasks = self.tasks[at]
        for task in tasks:
            own = {key: made[key] for key in task.dependencies}
            for key in own.keys() - values.keys():
                del made[key]
            made[task.key] = task(own)
        return made[self._key(at)]

    def _key(self, at: Index) -> Key:
        return (self.name, *at)

    def _given(self, at: Index) -> Iterator[Key]:
        tasks = self.tasks[at]
        made = {task.key for task in tasks}
        if not tasks:
            yield self._key(at)
        for task in tasks:
            yield from sorted(task.dependencies - made, key=str)

    def _cuts(self, where: Where) -> list[Part]:
        return cuts_of(self._offsets, where)

    @cached_property
    def _offsets(self) -> list[list[slice]]:
        return [*map(offsets, self.chunks)]


def maker_of(array: da.Array) -> Maker | None:
    """How tasks can make an array's chunks themselves; None where each needs many others.

    None also where Dask would not run the tasks again, where annotations say how they are to run,
    for a single chunk, and on GPUs.
    """
    annotated = any(layer.annotations for layer in array.dask.layers.values())
    if is_cupy(array._meta) or annotated:
        return None
    keys = [*flatten(array.__dask_keys__())]
    merged = optimize_blockwise(array.dask, keys=[array.name])
    graph = convert_legacy_graph(merged.cull({*keys}))
    users = Counter(key for node in graph.values() for key in node.dependencies)
    tasks = {key[1:]: (*_alone(key, graph, users),) for key in keys}
    if len(keys) == 1 and any(tasks.values()):  # made as a whole again and again
        return None
    repeated = all(_repeated(task, merged) for task in chain.from_iterable(tasks.values()))
    if not repeated or not all(map(_few, tasks.values())):
        return None
    maker = Maker(tasks, array.chunks, array.dtype, array.name)
    return maker if _little(maker, graph, array) else None


def _length(sizes: Blocks) -> int | Blocks:
    """Of chunks along an axis, or all lengths where they differ."""
    return sizes[0] if is_regular(sizes) else sizes


def unsure(array: da.Array) -> set[str]:
    """The layers that an array is made of whose tasks may return something else the next time."""
    return {name for name, layer in array.dask.layers.items() if not all(map(_sure, _funcs(layer)))}


def _funcs(layer: Layer) -> Iterator[Any]:
    """The functions that a layer's tasks call; none of `multimm.io.open_array`: files stay."""
    if hasattr(layer, "reader"):
        return
    if isinstance(layer, Blockwise):
        yield layer.task.func
        return
    for task in layer.values():
        if isinstance(task, Task):
            yield task.func


def _sure(func: Any) -> bool:
    return isinstance(func, np.ufunc) or any(func is known for known in _SURE)


def _alone(key: Key, graph: Mapping[Key, GraphNode], users: Counter[Key]) -> list[GraphNode]:
    """The tasks that make a chunk and nothing else, in the order in which they run."""
    found: list[GraphNode] = []
    left = [key]
    while left:
        node = graph.get(left.pop())  # of what is in memory of a cluster there is none
        if isinstance(node, Task | Alias):
            found.append(node)
            left += [x for x in sorted(node.dependencies, key=str) if users[x] == 1]
    return found[::-1]


def _repeated(task: GraphNode, graph: HighLevelGraph) -> bool:
    """Whether Dask itself would run a task again, or it is a slice or an alias, which is little."""
    layer = graph.layers.get(str(task.key[0] if isinstance(task.key, tuple) else task.key))
    sliced = isinstance(task, Alias) or getattr(task, "func", None) is getitem
    return sliced or isinstance(layer, Blockwise)


def _few(tasks: tuple[GraphNode, ...]) -> bool:
    """Whether a chunk is made of few others."""
    made = {task.key for task in tasks}
    return sum(not task.dependencies & made for task in tasks) <= _FIRST


def _little(maker: Maker, graph: Mapping[Key, GraphNode], array: da.Array) -> bool:
    """Whether what several chunks need of tasks is little: a row of blocks, such as means."""
    shared = [key for key in maker.needs if isinstance(graph.get(key), Task | Alias)]
    names = Counter(key[0] if isinstance(key, tuple) else key for key in shared)
    most = min(max(array.numblocks), array.npartitions - 1)
    return all(count <= most for count in names.values())
