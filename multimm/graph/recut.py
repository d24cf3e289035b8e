"""What comes in other blocks than the plan's: cut where its blocks lie, joined where it is needed.

Dask's own `rechunk` knows no places: a block that is cut into many would travel whole to each of
the workers that keep one of them. So every element travels once at most, or twice if it lies with
a worker that has no place in the grid; and what one worker has of a block travels in one bundle,
for each fetch takes longer than its bytes do. Operand blocks are joined by tasks at their homes, as
several products use them; those of the C that is added by the task that makes the result's.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate, pairwise
from math import prod
from typing import NamedTuple

import numpy as np
from dask._task_spec import Task, TaskRef

from multimm.gpu.layout import Shape
from multimm.graph.block_task import Block, BlockTask, Inputs, Key, Place
from multimm.graph.operand import Operand
from multimm.graph.pieces import Pieces, made_of
from multimm.graph.tasks import finished, stream_for
from multimm.planning.grid import Coordinate
from multimm.planning.recut import Index, Where, cuts_of, shape_of, size_of

Tasks = dict[Key, BlockTask]
#: What becomes of a block: its key, where it is kept, and the tasks that make it.
Made = tuple[Key, Coordinate, Tasks]


class Piece(NamedTuple):
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


def block_of(
    operand: Operand,
    index: Index,
    home: Coordinate,
    step: Index,
    name: str,
    place: Callable[[Coordinate, Index, Inputs], Place],
) -> Made:
    """One of the plan's blocks, made of the array's own and kept at its home.

    The parameters are those of `brought`.
    """
    pieces, inputs, tasks = brought(operand, index, home, step, name, place)
    where, first = operand.where(index), pieces[0]
    if first.whole and first.shape == shape_of(where):
        return first.key, inputs[first.key], tasks
    key, at_home = (name, *index), place(home, (*step, -2, -2), tuple(inputs.items()))
    parts = _task_of(pieces, where, operand)
    tasks[key] = BlockTask(key, join, parts, place=at_home)
    return key, home, tasks


def addend_of(
    operand: Operand,
    index: Index,
    home: Coordinate,
    step: Index,
    name: str,
    place: Callable[[Coordinate, Index, Inputs], Place],
) -> tuple[TaskRef | Task, Inputs, Tasks]:
    """A block of C as a task is given it to add it; its inputs, and the tasks that make those.

    The parameters are those of `brought`.
    """
    pieces, inputs, tasks = brought(operand, index, home, step, name, place)
    where, first = operand.where(index), pieces[0]
    fits = first.whole and first.shape == shape_of(where)
    ref = TaskRef(first.key) if fits else _task_of(pieces, where, operand)
    return ref, tuple(inputs.items()), tasks


def brought(
    operand: Operand,
    index: Index,
    home: Coordinate,
    step: Index,
    name: str,
    place: Callable[[Coordinate, Index, Inputs], Place],
) -> tuple[list[Piece], dict[Key, Coordinate], Tasks]:
    """What one of the plan's blocks is made of, where that lies, and the tasks that cut it out.

    Parameters
    ----------
    operand : Operand
    index : tuple of int
        Of the block, as stored.
    home : Coordinate
        Where it is to be joined.
    step : tuple of int
        When it is needed: wave and step.
    name : str
        What the keys begin with.
    place : callable
        From a worker, an order and inputs to a `Place`.
    """
    where, grid = operand.where(index), operand.layout.grid
    found: dict[int, list[Piece]] = {}
    for at, cut, to in cuts_of(operand.own_chunks, where):
        piece = Piece(operand.key(at), size_of(operand.own_chunks, at), cut, to)
        lies = operand.located(at) or (home if piece.whole else _spread(operand, at))
        found.setdefault(grid.rank(lies), []).append(piece)
    tasks: Tasks = {}
    pieces: list[Piece] = []
    inputs: dict[Key, Coordinate] = {}
    for rank, own in found.items():
        lies, alone = grid.place(rank), len(own) == 1 and own[0].whole
        if rank != grid.rank(home) and not alone:
            sources = tuple((piece.key, lies) for piece in own)
            key, at_once = (name, *index, rank), place(lies, (*step, -3, -3), sources)
            parts = _task_of(own, where, operand)
            tasks[key] = BlockTask(key, cut_out, parts, place=at_once)
            own = _bundled(own, key)
        pieces += own
        inputs |= dict.fromkeys((piece.key for piece in own), lies)
    return pieces, inputs, tasks


def _spread(operand: Operand, at: Index) -> Coordinate:
    """A worker for a block that is still to be made, and of which several workers have a part."""
    grid = operand.layout.grid
    return grid.place(int(np.ravel_multi_index(at, operand.array.numblocks)) % grid.workers)


def _task_of(pieces: list[Piece], where: Where, operand: Operand) -> Task:
    """A part of a task that makes `Pieces` of a rectangle."""
    keys, sizes, *cuts = zip(*pieces, strict=True)
    return made_of(keys, [*zip(*cuts, strict=True)], sizes, where, operand.array.dtype)


def _bundled(pieces: list[Piece], key: Key) -> list[Piece]:
    """The same pieces once they lie one after the other under a key: see `Pieces.in_a_row`."""
    ends = [0, *accumulate(prod(piece.shape) for piece in pieces)]
    spans = pairwise(ends)
    return [
        Piece(key, (ends[-1],), (slice(*span),), piece.to)
        for span, piece in zip(spans, pieces, strict=True)
    ]


def cut_out(parts: Pieces) -> Block:
    """Parts of a worker's blocks, in memory of their own: the rest need not stay for them."""
    with stream_for(parts.blocks[0]):
        return finished(parts.in_a_row())


def join(parts: Pieces) -> Block:
    """A block of its pieces, in memory of its own."""
    with stream_for(parts.blocks[0]):
        return finished(parts.copied())
