"""What comes in other blocks than the plan's: cut where its blocks lie, joined where it is needed.

Dask's own `rechunk` knows no places: a block that is cut into many would travel whole to each of
the workers that keep one of them. So every element travels once at most, or twice if it lies with
a worker that has no place in the grid; and what one worker has of a block travels in one coalesced
transfer, for each fetch takes longer than its bytes do. Operand blocks are joined by tasks at their
owners, as several products use them; those of the C that is added by the task that makes the
result's.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import chain

from dask._task_spec import TaskRef

from multimm.graph.block_task import Block, BlockTask, Key, Place, check_shape
from multimm.graph.label import Kind, Label
from multimm.graph.lowering.operand import Argument, Operand
from multimm.graph.lowering.sub_blocks import coalesced, task_of
from multimm.graph.task_keys import Keys
from multimm.graph.tasks.dtype_check import DType
from multimm.graph.tasks.host_offload import upload, uploaded
from multimm.graph.tasks.multiply import finished, stream_for
from multimm.graph.tasks.sub_blocks import SubBlocks
from multimm.planning.tiling.grid import Coordinate, number_of
from multimm.planning.tiling.rechunk import Index, Part, Where, shape_of
from multimm.planning.tiling.result_chunks import senders

Tasks = dict[Key, BlockTask]


def brought(
    operand: Operand,
    index: Index,
    owner: Coordinate,
    step: Index,
    keys: Keys,
) -> tuple[Argument, Tasks]:
    """One of the plan's blocks, for a task that joins it, and the tasks that cut what travels.

    Parameters
    ----------
    operand : Operand
    index : tuple of int
        Of the block, as stored.
    owner : Coordinate
        Where it is needed.
    step : tuple of int
        When it is needed: row panel and step.
    keys : Keys
    """
    where, grid = operand.where(index), operand.layout.grid
    found: dict[int, list[Part]] = {}
    for part in operand.cuts(where):
        lies = operand.located(part.of) or (owner if part.whole else _spread(operand, part.of))
        own = found.setdefault(grid.rank(lies), [])
        own.append(part._replace(of=operand.key(part.of)))
    tasks: Tasks = {}
    for rank in senders(found, grid.rank(owner)):
        lies, sources = grid.place(rank), tuple(part.of for part in found[rank])
        key = (keys.name(f"cut-{operand.role}"), *index, rank)
        place = keys.place(lies, (*step, Kind.CUT), ((lies, sources),))
        label = keys.label(Kind.CUT, operand.role, index)
        tasks[key] = cutting(key, found, rank, where, operand.array.dtype, label, place)
    sub_blocks = [*chain(*found.values())]
    inputs = [
        (grid.place(rank), tuple(dict.fromkeys(part.of for part in own)))
        for rank, own in found.items()
    ]
    key, size, *_ = first = sub_blocks[0]
    if first.whole and size == shape_of(where):  # it is one of the array's
        return Argument(TaskRef(key), tuple(inputs), ((size, (key,)),)), tasks
    return Argument(task_of(sub_blocks, where, operand.array.dtype), tuple(inputs)), tasks


def cutting(
    key: Key,
    found: dict[int, list[Part]],
    rank: int,
    where: Where,
    dtype: DType,
    label: Label,
    place: Place,
) -> BlockTask:
    """The task that cuts out what one worker has of a rectangle; what is `found` refers to it."""
    parts = task_of(found[rank], where, dtype)
    found[rank] = coalesced(found[rank], key)
    return BlockTask(key, cut_out, parts, label=label, place=place)


def _spread(operand: Operand, at: Index) -> Coordinate:
    """A worker for a block that is still to be made, and of which several workers have a part."""
    grid = operand.layout.grid
    return grid.place(number_of(at, operand.array.numblocks) % grid.workers)


def cut_out(parts: SubBlocks) -> Block:
    """Parts of a worker's blocks, in memory of their own: the rest need not stay for them."""
    with stream_for(parts.blocks[0]):
        return finished(parts.in_a_row())


def join(parts: SubBlocks) -> Block:
    """A block of its sub-blocks, in memory of its own."""
    with stream_for(parts.blocks[0]):
        return finished(parts.copied())


def upload_sub_blocks(parts: SubBlocks) -> Block:
    """A block of sub-blocks in host memory, on this worker's GPU."""
    if len(parts.blocks) == 1:
        return upload(parts.joined())
    for block, size in zip(parts.blocks, parts.sizes, strict=True):
        check_shape(block, size)
    cuts, places = zip(*parts.cuts, strict=True)
    blocks = [block[cut] for block, cut in zip(parts.blocks, cuts, strict=True)]
    matrix = len(parts.shape) <= 2 and all(len(parts.shape) == block.ndim for block in blocks)
    whole = (places, parts.shape) if matrix else None
    return uploaded(blocks, partial(_join_all, parts), whole)


def _join_all(parts: SubBlocks, blocks: list[Block]) -> Block:
    """A block of others that are nothing but its sub-blocks."""
    whole = [tuple(slice(0, size) for size in block.shape) for block in blocks]
    own = tuple((cut, to) for cut, (_, to) in zip(whole, parts.cuts, strict=True))
    return replace(parts, blocks=blocks, cuts=own, sizes=tuple(x.shape for x in blocks)).copied()
