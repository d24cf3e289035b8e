"""Sub-blocks of what has other blocks than are needed, and the part of a task that joins them.

Each product may cut and join them for itself, or tasks of their own do so once
(`multimm.graph.lowering.rechunk`).
"""

from __future__ import annotations

from itertools import accumulate, pairwise
from math import prod

from dask._task_spec import List, Task, TaskRef

from multimm.graph.block_task import Key
from multimm.graph.tasks.dtype_check import DType
from multimm.graph.tasks.sub_blocks import SubBlocks
from multimm.planning.tiling.rechunk import Part, Where, shape_of


def task_of(sub_blocks: list[Part], where: Where, dtype: DType) -> Task:
    """A part of a task that makes `SubBlocks` of a rectangle, of an array of a declared dtype."""
    keys, sizes, *cuts = zip(*sub_blocks, strict=True)
    pairs, shape = tuple(zip(*cuts, strict=True)), shape_of(where)
    blocks = List(*map(TaskRef, keys))
    return Task(None, SubBlocks, blocks, cuts=pairs, sizes=sizes, shape=shape, dtype=dtype)


def coalesced(sub_blocks: list[Part], key: Key) -> list[Part]:
    """The same sub-blocks, one after the other under a key: see `SubBlocks.in_a_row`."""
    ends = [0, *accumulate(prod(sub_block.shape) for sub_block in sub_blocks)]
    spans = pairwise(ends)
    return [
        Part(key, (ends[-1],), (slice(*span),), sub_block.to)
        for span, sub_block in zip(spans, sub_blocks, strict=True)
    ]
