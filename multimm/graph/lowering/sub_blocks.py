"""Operand blocks of what comes in other blocks: which sub-blocks of those they are made of.

Each product may cut and join them for itself, or tasks of their own do so once
(`multimm.graph.lowering.rechunk`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dask._task_spec import Task

from multimm.graph.block_task import Key
from multimm.graph.task_refs import refs
from multimm.graph.tasks.dtype_check import DType
from multimm.graph.tasks.sub_blocks import SubBlocks
from multimm.planning.tiling.grid import Blocks
from multimm.planning.tiling.rechunk import Index, Where, cuts_of, shape_of, size_of
from multimm.shapes import Shape


def sub_blocks(
    key: Callable[[Index], Key], chunks: tuple[Blocks, ...], where: Where, dtype: DType = None
) -> tuple[Task, list[Key]]:
    """A part of a task that makes `SubBlocks` of a rectangle, and the keys of what that takes.

    Parameters
    ----------
    key : callable
        From a block's index to its key.
    chunks : tuple of Blocks
        Of the array.
    where : tuple of slice
        Of the array.
    dtype : dtype, optional
        That it declares.
    """
    found = cuts_of(chunks, where)
    keys = [key(at) for at, _, _ in found]
    sizes = [size_of(chunks, at) for at, _, _ in found]
    return made_of(keys, [(cut, to) for _, cut, to in found], sizes, where, dtype), keys


def made_of(
    keys: Sequence[Key],
    cuts: Sequence[tuple[Where, Where]],
    sizes: Sequence[Shape],
    where: Where,
    dtype: DType = None,
) -> Task:
    """A part of a task that makes `SubBlocks` of a rectangle, cut from each of `keys`."""
    sizes = tuple(sizes)
    shape = shape_of(where)
    return Task(
        None, SubBlocks, refs(keys), cuts=tuple(cuts), sizes=sizes, shape=shape, dtype=dtype
    )
