"""The tasks that join blocks of C from the portions that workers have made of them."""

from __future__ import annotations

from collections.abc import Callable

from dask._task_spec import Task

from multimm.graph.block_task import BlockTask, Key, Place
from multimm.graph.keys import Keys
from multimm.graph.pieces import made_of
from multimm.graph.recut import Tasks, join
from multimm.planning.gathered import GatheredLayout
from multimm.planning.grid import Coordinate
from multimm.planning.recut import Index


def gathered(
    layout: GatheredLayout, keys: Keys, place: Callable[[Coordinate, Index], Place]
) -> Tasks:
    """A task for each block of C that is in portions.

    Parameters
    ----------
    layout : GatheredLayout
    keys : Keys
    place : callable
        From a worker and an order to a `Place`.
    """
    made: Tasks = {}
    for strip, across in layout.joined:
        at = layout.cell(strip, across)
        key: Key = (keys.name("matmul"), *at)
        where = place(layout.keeper_of(strip), (0, layout.steps, *at))
        made[key] = BlockTask(key, join, _portions(layout, keys, strip, across), place=where)
    return made


def _portions(layout: GatheredLayout, keys: Keys, strip: int, across: int) -> Task:
    """A part of a task that makes `Pieces` of a block of C."""
    by_columns, at = layout.by_columns, layout.cell(strip, across)
    where = tuple(slice(0, blocks[i]) for blocks, i in zip(layout.sides, at, strict=True))
    found, cuts, sizes = [], [], []
    for portion, inside, to in layout.spans(strip):
        i, j = layout.cell(portion, across)
        found.append(keys.sum((), i, j))
        sizes.append((layout.m_blocks[i], layout.n_blocks[j]))
        cut, goes_to = (
            (where[0], span) if by_columns else (span, where[1]) for span in (inside, to)
        )
        cuts.append((cut, goes_to))
    return made_of(found, cuts, sizes, where)
