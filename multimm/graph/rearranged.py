"""Axes of an array transposed, grouped or split, block by block: nothing leaves its worker.

`flattened` makes one axis of several: of each block by itself, so that rows come in the order of
the blocks, and not in the order of the array. Products allow that, as long as whoever takes them
apart again (`split`), or pairs them with others, goes by the same blocks:

    x (4, 6) in chunks of (2, 3)        flattened ((0, 1),): (24,) in chunks of 6
    [ 0  1  2 |  3  4  5]
    [ 6  7  8 |  9 10 11]               [0 1 2 6 7 8 | 3 4 5 9 10 11 | 12 ... ]
    [12 13 14 | 15 16 17]
    [18 19 20 | 21 22 23]

Each block is made of one block, which may be cut into several. So it is known where the new blocks
lie: where those lie that they are made of (`multimm.graph.data_location`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise, product
from math import prod
from typing import Any, NamedTuple

import dask.array as da
import numpy as np
from dask._task_spec import Task, TaskRef
from dask.highlevelgraph import HighLevelGraph
from dask.tokenize import tokenize

from multimm.blocks import plain
from multimm.failures import named
from multimm.graph.block_task import Block, Key, check_shape
from multimm.graph.layers import TaskLayer
from multimm.graph.tasks.multiply import finished, stream_for
from multimm.planning.tiling.grid import Blocks, number_of
from multimm.planning.tiling.rechunk import Index, Where
from multimm.shapes import Shape

Chunks = tuple[Blocks, ...]


class RearrangedLayer(TaskLayer):
    """Tasks each of which makes a block of one block of another array.

    Parameters
    ----------
    tasks : dict
        By key.
    source : str
        The other array's name.
    blocks : tuple of int
        The other array's numbers of blocks.
    numbers : tuple of int
        By block, in C order: the number, in C order, of the block that it is made of.
    """

    def __init__(
        self, tasks: Mapping[Key, Task], source: str, blocks: Index, numbers: tuple[int, ...]
    ) -> None:
        super().__init__(tasks)
        self.source, self.blocks, self.numbers = source, blocks, numbers


class _Change(NamedTuple):
    """What becomes of a block: a part of it, reshaped, transposed, reshaped."""

    planned: Shape  #: as the array's chunks say
    where: Where | None
    split: Shape
    axes: Index
    shape: Shape

    @property
    def views(self) -> bool:
        """Whether nothing of a block in C order is copied."""
        return self.axes == tuple(range(len(self.axes)))


@named
def rearrange(block: Block, change: _Change) -> Block:
    """A view of a block, or a copy where there is none."""
    block = plain(np.asarray(block) if isinstance(block, np.generic) else block)
    check_shape(block, change.planned)
    with stream_for(block):
        part = block if change.where is None else block[change.where]
        made = finished(part.reshape(change.split).transpose(change.axes).reshape(change.shape))
    return made if made.ndim else made[()]  # NumPy's scalar, as Dask's sums have it


def grouped_chunks(chunks: Sequence[Blocks], groups: Sequence[int]) -> Chunks:
    """Chunks of axes that are flattened: of so many each, one after the other.

    >>> grouped_chunks([(2, 1), (3, 4), (5,)], [2, 0, 1])
    ((6, 8, 3, 4), (1,), (5,))
    """
    rest = iter(chunks)
    each = [[next(rest) for _ in range(count)] for count in groups]
    return tuple(tuple(map(prod, product(*own))) for own in each)


def flattened(array: da.Array, order: Index, groups: Sequence[int], chunks: Chunks) -> da.Array:
    """Axes in another order, and those of a group as one, block by block.

    Parameters
    ----------
    array : dask.array.Array
    order : tuple of int
        Which of its axes is first, and so on.
    groups : sequence of int
        How many of them, in that order, become each axis. One of none is new, and of length 1.
    chunks : tuple of Blocks
        That each axis is cut into before, in the array's order: its own, or parts of these.
    """
    final = grouped_chunks([chunks[axis] for axis in order], groups)
    token = tokenize("flattened", array.name, order, tuple(groups), chunks)
    name = f"multimm-flattened-{token}"
    parts = [_parts(own, new) for own, new in zip(array.chunks, chunks, strict=True)]
    counts = [range(len(axis)) for axis in final]
    tasks: dict[Key, Task] = {}
    numbers = []
    # In C order both go through the same blocks.
    for at, index in zip(product(*counts), _indices(parts, order), strict=True):
        found = [parts[axis][n] for axis, n in enumerate(index)]
        source = tuple(part.block for part in found)
        planned = tuple(own[n] for own, n in zip(array.chunks, source, strict=True))
        where = None if all(p.whole for p in found) else tuple(p.where for p in found)
        split = tuple(own[n] for own, n in zip(chunks, index, strict=True))
        shape = tuple(axis[n] for axis, n in zip(final, at, strict=True))
        change = _Change(planned, where, split, order, shape)
        key = (name, *at)
        tasks[key] = Task(key, rearrange, TaskRef((array.name, *source)), change)
        numbers.append(number_of(source, array.numblocks))
    return _array(array, tasks, name, final, numbers)


def split(array: da.Array, chunks: Chunks, groups: Sequence[int], order: Index) -> da.Array:
    """The opposite: each axis taken apart into those of a group, and then another order of axes.

    Parameters
    ----------
    array : dask.array.Array
        In chunks that are `grouped_chunks(chunks, groups)`.
    chunks : tuple of Blocks
        Of the axes that are made, before they are put into their order.
    groups : sequence of int
        How many axes each axis becomes; one that becomes none is of length 1.
    order : tuple of int
        Which of these is first, and so on.
    """
    name = f"multimm-split-{tokenize(array.name, chunks, tuple(groups), order)}"
    final = tuple(chunks[axis] for axis in order)
    counts = tuple(map(len, chunks))
    spans = [slice(*ends) for ends in pairwise(accumulate(groups, initial=0))]
    tasks: dict[Key, Task] = {}
    numbers = []
    for at in product(*(range(len(axis)) for axis in final)):
        index = tuple(at[order.index(axis)] for axis in range(len(order)))
        source = tuple(number_of(index[own], counts[own]) for own in spans)
        planned = tuple(own[n] for own, n in zip(array.chunks, source, strict=True))
        parts = tuple(own[n] for own, n in zip(chunks, index, strict=True))
        shape = tuple(own[n] for own, n in zip(final, at, strict=True))
        key, change = (name, *at), _Change(planned, None, parts, order, shape)
        tasks[key] = Task(key, rearrange, TaskRef((array.name, *source)), change)
        numbers.append(number_of(source, array.numblocks))
    return _array(array, tasks, name, final, numbers)


class _Part(NamedTuple):
    """Of an axis: the chunk that a new one is cut out of."""

    block: int
    whole: bool
    where: slice


def _parts(own: Blocks, new: Blocks) -> list[_Part]:
    """Of each new chunk; the old ones' boundaries are among the new ones'."""
    if own == new:
        return [_Part(n, True, slice(None)) for n in range(len(own))]
    ends = [*accumulate(own, initial=0)]
    found, block = [], 0
    for start, stop in pairwise(accumulate(new, initial=0)):
        while stop > ends[block + 1]:
            block += 1
        first = ends[block]
        whole = (start, stop) == (first, ends[block + 1])
        found.append(_Part(block, whole, slice(start - first, stop - first)))
    return found


def _indices(parts: list[list[_Part]], order: Index) -> Iterator[Index]:
    """Of the new chunks, in the array's order of axes, as a loop in the other order finds them."""
    places = [order.index(axis) for axis in range(len(order))]
    for at in product(*(range(len(parts[axis])) for axis in order)):
        yield tuple(at[place] for place in places)


def _array(
    array: da.Array, tasks: dict[Key, Task], name: str, chunks: Chunks, numbers: list[int]
) -> da.Array:
    layer = RearrangedLayer(tasks, array.name, array.numblocks, tuple(numbers))
    sources: list[Any] = [array]
    graph = HighLevelGraph.from_collections(name, layer, dependencies=sources)
    meta: Any = np.empty_like(array._meta, shape=(0,) * len(chunks))
    return da.Array(graph, name, chunks, meta=meta)
