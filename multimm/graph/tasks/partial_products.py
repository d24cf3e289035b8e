"""What workers do with a matrix that is multiplied where it lies.

See `multimm.planning.work.partial_products`.

Pure functions of blocks, as those of `multimm.graph.tasks.multiply`. A task has hundreds of these,
and to describe each by a task of its own would take longer than to multiply it: blocks come in
lists, and `Recipe` says what becomes of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, islice, pairwise
from typing import NamedTuple

from multimm.gpu.elementwise.batched_copy import Move
from multimm.gpu.library_gemm import module_of
from multimm.graph.block_task import Block, check_shape
from multimm.graph.tasks.dtype_check import DType, as_declared
from multimm.graph.tasks.multiply import Step, finished, link, stream_for, summed
from multimm.graph.tasks.sub_blocks import SubBlocks, copied
from multimm.planning.tiling.grid import Blocks
from multimm.planning.tiling.rechunk import Where
from multimm.planning.work.partial_products import Run
from multimm.shapes import Shape


class Recipe(NamedTuple):
    """What a partial product is made of."""

    k_tiles: tuple[SubBlocks, ...]  #: of the small operand, with numbers in place of blocks
    lengths: Blocks  #: of these k-tiles, along k
    #: Heights of the rows of chunks of each group, and numbers of its k-tiles.
    groups: tuple[tuple[Blocks, tuple[int, ...]], ...]
    by_columns: bool  #: the large operand is B
    turned: bool  #: its rows are columns of the chunks, as they are stored


def partial_product(
    small: list[Block], large: list[Block], *, recipe: Recipe, step: Step, inner: Step
) -> Block:
    """Rows of C, or columns, of all that a worker has of what they are made of.

    Parameters
    ----------
    small : list of array
        What k-tiles of the other operand are cut from.
    large : list of array
        Chunks: group by group, k-tile by k-tile, row by row.
    recipe : Recipe
    step, inner : Step
        Of the last k-tile of a group, and of the others.
    """
    by_columns = recipe.by_columns
    of_small, of_large = (step.dtype_a, step.dtype_b)[:: 1 if by_columns else -1]

    def linked(rows: Block, k_tile: Block, total: Block, step: Step) -> Block:
        """`link`; what has been joined for it is let go when this returns."""
        a, b = (k_tile, rows) if by_columns else (rows, k_tile)
        return link(a, b, total, step=step)

    with stream_for(large[0]):
        k_tiles = [
            replace(x, blocks=[small[i] for i in x.blocks], dtype=of_small).joined()
            for x in recipe.k_tiles
        ]
        made, left = list[Block](), iter(large)
        for heights, numbers in recipe.groups:
            total = None
            for number in numbers:
                shapes = _shapes(heights, recipe.lengths[number], recipe.turned)
                total = linked(
                    _joined([*islice(left, len(heights))], shapes, recipe.turned, of_large),
                    k_tiles[number],
                    total,
                    step if number == numbers[-1] else inner,
                )
            made.append(total)
        return finished(_joined(made, [x.shape for x in made], by_columns, None))


def _shapes(heights: Blocks, length: int, turned: bool) -> list[Shape]:
    """Of the chunks of some rows and a k-tile, as they are stored."""
    return [(length, height) if turned else (height, length) for height in heights]


def _joined(blocks: list[Block], shapes: list[Shape], turned: bool, dtype: DType) -> Block:
    """Blocks of a dtype below each other, or side by side if they are `turned`."""
    if len(shapes) == 1:
        check_shape(blocks[0], shapes[0])
        return as_declared(blocks[0], dtype)
    ends = [0, *accumulate(shape[turned] for shape in shapes)]
    whole = list(shapes[0])
    whole[turned] = ends[-1]
    cuts = tuple(
        (tuple(map(slice, (0, 0), shape)), _along(slice(*span), shape, turned))
        for shape, span in zip(shapes, pairwise(ends), strict=True)
    )
    return SubBlocks(blocks, cuts, tuple(shapes), tuple(whole), dtype).joined()


def join_partial_products(
    *partial_products: Block,
    shape: Shape,
    runs: tuple[Run, ...],
    by_columns: bool,
    step: Step | None,
) -> Block:
    """A block of C of its partial products, in memory of its own.

    Parameters
    ----------
    *partial_products : Block
    shape : tuple of int
        Of the block.
    runs : tuple of Run
        With numbers of these partial products.
    by_columns : bool
        Rows of runs are columns.
    step : Step or None
        What becomes of sums; None: they are finished, and in one partial product each.
    """
    with stream_for(partial_products[0]):
        dtype = partial_products[0].dtype if step is None else step.dtype
        whole = module_of(partial_products[0]).empty(shape, dtype)
        moves = []
        for found, goes_to in runs:
            parts = [partial_products[at][_along(rows, shape, by_columns)] for at, rows in found]
            rows = parts[0] if step is None else summed(parts, None, step)
            for inside, to in goes_to:
                # As wide as the block: so are its partial products.
                cut, room = (_along(at, shape, by_columns) for at in (inside, to))
                moves.append(Move(rows, cut, whole, room))
        return finished(copied(moves))


def _along(at: slice, shape: Sequence[int], second: bool) -> Where:
    """Of a matrix: rows, all of each, or columns, if it is its second axis that `at` is along."""
    return (slice(0, shape[0]), at) if second else (at, slice(0, shape[1]))
