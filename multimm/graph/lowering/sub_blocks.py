"""Sub-blocks of what has other blocks than are needed, and the part of a task that joins them.

Each product may cut and join them for itself, or tasks of their own do so once
(`multimm.graph.lowering.rechunk`).
"""

from __future__ import annotations

from itertools import accumulate, pairwise
from math import prod
from typing import NamedTuple

from dask._task_spec import List, Task, TaskRef

from multimm.graph.block_task import Key
from multimm.graph.tasks.dtype_check import DType
from multimm.graph.tasks.sub_blocks import SubBlocks
from multimm.planning.tiling.rechunk import Where, shape_of
from multimm.shapes import Shape


class SubBlock(NamedTuple):
    """A part of one of the plan's blocks."""

    key: Key  #: of what has it
    size: Shape  #: of what has it
    cut: Where  #: which part of that it is
    to: Where  #: where in the block it goes

    @property
    def shape(self) -> Shape:
        """Its own."""
        return shape_of(self.to)

    @property
    def whole(self) -> bool:
        """Whether it is all of that."""
        return self.shape == self.size


def task_of(sub_blocks: list[SubBlock], where: Where, dtype: DType) -> Task:
    """A part of a task that makes `SubBlocks` of a rectangle, of an array of a declared dtype."""
    keys, sizes, *cuts = zip(*sub_blocks, strict=True)
    pairs, shape = tuple(zip(*cuts, strict=True)), shape_of(where)
    blocks = List(*map(TaskRef, keys))
    return Task(None, SubBlocks, blocks, cuts=pairs, sizes=sizes, shape=shape, dtype=dtype)


def coalesced(sub_blocks: list[SubBlock], key: Key) -> list[SubBlock]:
    """The same sub-blocks, one after the other under a key: see `SubBlocks.in_a_row`."""
    ends = [0, *accumulate(prod(sub_block.shape) for sub_block in sub_blocks)]
    spans = pairwise(ends)
    return [
        SubBlock(key, (ends[-1],), (slice(*span),), sub_block.to)
        for span, sub_block in zip(spans, sub_blocks, strict=True)
    ]
