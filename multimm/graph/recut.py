"""An operand that comes in other blocks than the plan's: cut where its blocks lie, joined at home.

Dask's own `rechunk` knows no places: a block that is cut into many would travel whole to each of
the workers that keep one of them. So every element travels once at most, or twice if it lies with
a worker that has no place in the grid.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from dask._task_spec import TaskRef

from multimm.gpu.layout import Shape
from multimm.gpu.reference import module_of
from multimm.graph.operand import Index, Operand
from multimm.graph.pieces import Pieces, Where, check_shape, copy, cuts_of, made_of, size_of
from multimm.graph.tasks import Block, BlockTask, Inputs, Key, Place, finished, stream_for
from multimm.planning.grid import Coordinate

#: What becomes of a block: its key, where it is kept, and the tasks that make it.
Made = tuple[Key, Coordinate, dict[Key, BlockTask]]


def block_of(
    operand: Operand,
    index: Index,
    home: Coordinate,
    step: Index,
    name: str,
    place: Callable[[Coordinate, Index, Inputs], Place],
) -> Made:
    """One of the plan's blocks, made of the array's own.

    Parameters
    ----------
    operand : Operand
    index : tuple of int
        Of the block, as stored.
    home : Coordinate
        Where it is to be kept.
    step : tuple of int
        When it is needed: wave and step.
    name : str
        What the keys begin with.
    place : callable
        From a worker, an order and inputs to a `Place`.
    """
    where, own, rank = operand.where(index), operand.array.chunks, operand.layout.grid.rank
    found = cuts_of(own, where)
    tasks: dict[Key, BlockTask] = {}
    inputs: list[tuple[Key, Coordinate]] = []
    cuts: list[tuple[Where, Where]] = []
    sizes: list[Shape] = []
    for number, (at, cut, to) in enumerate(found):
        key, size = operand.key(at), size_of(own, at)
        whole = cut == tuple(slice(0, length) for length in size)
        lies = operand.located(at) or (home if whole else _somewhere(operand, at))
        if whole and len(found) == 1:
            return key, lies, {}
        if not whole and rank(lies) != rank(home):
            order = (*step, -3, -3)
            source, key = key, (name, *index, number)
            own_place = place(lies, order, ((source, lies),))
            tasks[key] = BlockTask(key, cut_out, TaskRef(source), cut, size, place=own_place)
            size = tuple(part.stop - part.start for part in cut)
            cut = tuple(slice(0, length) for length in size)
        inputs.append((key, lies))
        cuts.append((cut, to))
        sizes.append(size)
    parts = made_of([key for key, _ in inputs], cuts, sizes, where)
    key, order = (name, *index), (*step, -2, -2)
    tasks[key] = BlockTask(key, join, parts, place=place(home, order, tuple(inputs)))
    return key, home, tasks


def _somewhere(operand: Operand, at: Index) -> Coordinate:
    """A worker for a block that is still to be made, and of which several workers have a part."""
    grid = operand.layout.grid
    return grid.place(int(np.ravel_multi_index(at, operand.array.numblocks)) % grid.workers)


def cut_out(block: Block, where: Where, size: Shape) -> Block:
    """A part of a block of that shape, in memory of its own: the rest need not stay for it."""
    check_shape(block, size)
    with stream_for(block):
        part = block[where]
        result = module_of(block=block).empty(part.shape, part.dtype)
        copy(part, result)
        return finished(result)


def join(parts: Pieces) -> Block:
    """A block of its pieces, in memory of its own."""
    with stream_for(parts.blocks[0]):
        return finished(parts.copied())
