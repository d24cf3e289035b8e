"""The tasks that bring operand blocks from host memory to the GPUs that have them."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from dask._task_spec import TaskRef

from multimm.graph.block_task import BlockTask, Key
from multimm.graph.label import Kind
from multimm.graph.lowering.operand import Operand
from multimm.graph.task_keys import Keys
from multimm.graph.tasks.host_offload import upload
from multimm.planning.tiling.grid import Coordinate
from multimm.planning.tiling.rechunk import Index, size_of


def uploads(
    made: Iterable[BlockTask],
    operands: Iterable[Operand],
    keys: Keys,
) -> dict[Key, BlockTask]:
    """A task for each block of the operands that tasks of a product need on a GPU.

    Each runs where its block lies, or where the block is first needed, and as early as that.
    Products that give their worker's thread up begin before blocks go up that others need: a first
    product would wait until the worker had begun all uploads.

    Parameters
    ----------
    made : iterable of BlockTask
        The product.
    operands : iterable of Operand
        Those whose blocks are uploaded, and others.
    keys : Keys
    """
    first: dict[Key, tuple[Index, Coordinate]] = {}
    for task in made:
        for key, owner in task.place.blocks:
            when = _before(task.place.order, overlaps=keys.layout.overlaps), owner
            first[key] = min(first.get(key, when), when)
    tasks: dict[Key, BlockTask] = {}
    for operand in operands:
        for index in np.ndindex(*operand.array.numblocks) if operand.uploaded else ():
            if (key := operand.key(index)) not in first or key in tasks:
                continue  # read from its source, in the plan's blocks; or one array on both sides
            order, owner = first[key]
            source, at = operand.source(index), operand.located(index) or owner
            tasks[key] = BlockTask(
                key,
                upload,
                TaskRef(source),
                dtype=operand.array.dtype,
                label=keys.label(Kind.UPLOAD, operand.role, source[1:]),
                place=keys.place(at, order, ((at, (source,)),)),
                sizes=((size_of(operand.own_chunks, index), (source,)),),
            )
    return tasks


def _before(order: Index, *, overlaps: bool) -> Index:
    """The order of an upload for a task in such an order: of a step, all uploads are its first."""
    row_panel, step, kind, *rest = order
    if overlaps and kind == Kind.MULTIPLY:
        return (*order, Kind.UPLOAD)
    return (row_panel, step, Kind.UPLOAD, kind, *rest)
