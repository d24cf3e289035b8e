"""What workers do with a matrix that is multiplied where it lies: see `multimm.planning.gathered`.

Pure functions of blocks, as those of `multimm.graph.tasks`.
"""

from __future__ import annotations

from collections.abc import Sequence

from multimm.gpu.copies import Move
from multimm.gpu.layout import Shape
from multimm.gpu.reference import module_of
from multimm.graph.block_task import Block
from multimm.graph.pieces import Pieces, copied
from multimm.graph.tasks import Step, finished, link, stream_for, summed
from multimm.planning.portions import Run


def portion(
    small: list[Pieces],
    groups: list[list[Pieces]],
    *,
    uses: tuple[tuple[int, ...], ...],
    by_columns: bool,
    step: Step,
    inner: Step,
) -> Block:
    """Rows of C, or columns, of all that a worker has of what they are made of.

    Parameters
    ----------
    small : list of Pieces
        Slabs of the other operand.
    groups : list of list of Pieces
        Of each group: its rows of the large one, slab after slab.
    uses : tuple of tuple of int
        Of each group: its slabs, of those in `small`.
    by_columns : bool
        The large one is B.
    step, inner : Step
        Of the last slab of a group, and of the others.
    """
    with stream_for(small[0].blocks[0]):
        slabs = [pieces.joined() for pieces in small]
        made = []
        for group, numbers in zip(groups, uses, strict=True):
            total = None
            for left, (rows, number) in enumerate(zip(group, numbers, strict=True), 1 - len(group)):
                pair = rows.joined(), slabs[number]
                a, b = pair[::-1] if by_columns else pair
                total = link(a, b, total, step=inner if left else step)
            made.append(total)
        return finished(_in_a_row(made, by_columns))


def _in_a_row(blocks: Sequence[Block], by_columns: bool) -> Block:
    """Blocks below each other, or side by side."""
    if len(blocks) == 1:
        return blocks[0]
    shape = list(blocks[0].shape)
    shape[by_columns] = sum(block.shape[by_columns] for block in blocks)
    whole = module_of(block=blocks[0]).empty(tuple(shape), blocks[0].dtype)
    moves, begin = [], 0
    for block in blocks:
        end = begin + block.shape[by_columns]
        to = _along(slice(begin, end), shape, by_columns)
        moves.append(Move(block, tuple(map(slice, (0, 0), block.shape)), whole, to))
        begin = end
    return copied(moves)


def join_portions(
    *portions: Block,
    shape: Shape,
    runs: tuple[Run, ...],
    by_columns: bool,
    step: Step | None,
) -> Block:
    """A block of C of its portions, in memory of its own.

    Parameters
    ----------
    *portions : Block
    shape : tuple of int
        Of the block.
    runs : tuple of Run
        With numbers of these portions.
    by_columns : bool
        Rows of runs are columns.
    step : Step or None
        What becomes of sums; None: they are finished, and in one portion each.
    """
    with stream_for(portions[0]):
        dtype = portions[0].dtype if step is None else step.dtype
        whole = module_of(block=portions[0]).empty(shape, dtype)
        moves = []
        for found, goes_to in runs:
            parts = [portions[at][_along(rows, shape, by_columns)] for at, rows in found]
            rows = parts[0] if step is None else summed(parts, None, step)
            for inside, to in goes_to:
                # As wide as the block: so are its portions.
                cut, room = (_along(at, shape, by_columns) for at in (inside, to))
                moves.append(Move(rows, cut, whole, room))
        return finished(copied(moves))


def _along(at: slice, shape: Sequence[int], by_columns: bool) -> tuple[slice, slice]:
    """Rows, or columns, of a matrix that is as wide, or as high."""
    return (slice(0, shape[0]), at) if by_columns else (at, slice(0, shape[1]))
