"""What a task is given in place of a block: parts of others, which it joins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import prod

import numpy as np

from multimm.gpu.arrays import is_cupy
from multimm.gpu.elementwise.batched_copy import Move, assign, copy_all
from multimm.gpu.library_gemm import module_of
from multimm.graph.block_task import Block, check_shape
from multimm.graph.tasks.dtype_check import DType, as_declared
from multimm.planning.tiling.rechunk import Where, shape_of
from multimm.shapes import Shape


@dataclass(frozen=True)
class SubBlocks:
    """What a task is given in place of an operand block.

    Parameters
    ----------
    blocks : list of array
        All that the block has a sub-block of.
    cuts : tuple of pair of Where
        Of each: which part of it is a sub-block, and where in the block that goes; of a vector, the
        part is in C order.
    sizes : tuple of tuple of int
        Of each: its shape. Of a larger one a part could be taken for what is no part of it.
    shape : tuple of int
        Of the block.
    dtype : dtype, optional
        Of all of them, as their array declares it.
    """

    blocks: list[Block]
    cuts: tuple[tuple[Where, Where], ...]
    sizes: tuple[Shape, ...]
    shape: Shape
    dtype: DType = None

    def __post_init__(self) -> None:
        blocks = [as_declared(block, self.dtype) for block in self.blocks]
        object.__setattr__(self, "blocks", blocks)

    def joined(self) -> Block:
        """The block: part of another one, or a new one, in the order of the current stream."""
        if len(self.blocks) == 1:
            check_shape(self.blocks[0], self.sizes[0])
            return self.blocks[0][self.cuts[0][0]].reshape(self.shape)
        return self.copied()

    def copied(self) -> Block:
        """The block in memory of its own, in the order of the current stream."""
        whole = self._empty(self.shape)
        cuts = zip(self.blocks, self.cuts, strict=True)
        return copied([Move(block, cut, whole, at) for block, (cut, at) in cuts])

    def in_a_row(self) -> Block:
        """The sub-blocks one after the other in a vector, in the order of the current stream."""
        ends = [0, *accumulate(prod(shape_of(at)) for _, at in self.cuts)]
        row = self._empty((ends[-1],))
        cuts = zip(self.blocks, self.cuts, pairwise(ends), strict=True)
        return copied([Move(block, cut, row, (slice(*span),)) for block, (cut, _), span in cuts])

    def _empty(self, shape: Shape) -> Block:
        """Room for what is copied from blocks that are what they should be."""
        for block, size in zip(self.blocks, self.sizes, strict=True):
            module_of(block)  # or it is masked, or sparse: no such block may be copied
            check_shape(block, size)
        first = self.blocks[0]
        # Transposed blocks stay so: they copy faster, and BLAS gives the bits of a lazy transpose.
        turned = not is_cupy(first) and first.flags.fnc and len(shape) == first.ndim
        if turned:
            return np.empty(shape, first.dtype, order="F")
        return module_of(first).empty(shape, first.dtype)


def copied(moves: Sequence[Move]) -> Block:
    """What all of them go to, in the order of the current stream."""
    if is_cupy(moves[0].target):
        copy_all(moves)
    else:
        for move in moves:
            assign(move)
    return moves[0].target
