"""Many pieces of arrays copied to other places by few launches of kernels/copy_pieces.cu.

An operand that comes in small blocks is a thousand copies. One by one, as CuPy's assignments, each
takes the host 15 us, 9 so, and parts of rows are copied at half the speed.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import mul
from typing import Any, NamedTuple

import numpy as np

from multimm.gpu.runtime.launch import by_value, kernel_for
from multimm.gpu.strides import collapse, common_alignment
from multimm.shapes import Shape

Array = Any
Where = tuple[slice, ...]

#: Compile-time parameters of the kernel: pieces of one launch, as many as its parameters hold, and
#: how each is cut.
DEFINES = (("CAPACITY", 60), ("THREADS", 256), ("UNROLL", 4))
CAPACITY, THREADS, UNROLL = (value for _, value in DEFINES)
#: Words that a thread block copies.
SPAN = THREADS * UNROLL


class Move(NamedTuple):
    """A part of one array that goes to a part of another, in C order of both.

    One of them may be a stretch of a vector. Steps of slices are 1.
    """

    source: Array
    cut: Where
    target: Array
    to: Where


class View(NamedTuple):
    """Elements in memory; strides count bytes."""

    pointer: int
    shape: Shape
    strides: Shape

    @classmethod
    def of(cls, array: Array, where: Where) -> View:
        """A part of a CuPy array."""
        pointer = array.data.ptr
        strides = array.strides
        for at, stride in zip(where, strides, strict=True):
            pointer += at.start * stride
        return cls(pointer, tuple([at.stop - at.start for at in where]), strides)

    def as_shape(self, shape: Shape) -> View:
        """A stretch of a contiguous vector as an array in C order; any other view as it is."""
        if len(shape) <= len(self.shape):
            return self
        steps = accumulate(reversed(shape[1:]), mul, initial=self.strides[0])
        return View(self.pointer, shape, tuple(steps)[::-1])


class Rows(NamedTuple):
    """A piece as the kernel walks it; see there."""

    source: int
    target: int
    source_pitch: int
    target_pitch: int
    cols: int
    words: int
    word_bytes: int


def copy_all(moves: Sequence[Move]) -> None:
    """Copy between CuPy arrays of one device, in the order of the current stream.

    Parameters
    ----------
    moves : sequence of Move
        No target overlaps another one, or a source. What has to be cast, or is no rows of
        neighbours, is left to CuPy.
    """
    found: list[Rows] = []
    for move in moves:
        rows = rows_of(move)
        if rows is None:
            assign(move)
        elif rows.words:
            found.append(rows)
    for first in range(0, len(found), CAPACITY):
        _launch(found[first : first + CAPACITY], moves[0].target.device.id)


def assign(move: Move) -> None:
    """The same of one piece, between arrays of CuPy or of NumPy; cast if need be."""
    part, room = move.source[move.cut], move.target[move.to]
    if part.ndim < room.ndim:
        part = part.reshape(room.shape)
    else:
        room = room.reshape(part.shape)
    room[...] = part


def rows_of(move: Move) -> Rows | None:
    """A piece as the kernel walks it, in words as long as they can be; None if it cannot."""
    if move.source.dtype != move.target.dtype:
        return None
    source, target = View.of(move.source, move.cut), View.of(move.target, move.to)
    source, target = source.as_shape(target.shape), target.as_shape(source.shape)
    item: int = move.target.itemsize
    if 0 in target.shape:
        return Rows(source.pointer, target.pointer, 0, 0, 1, 0, item)
    axes = collapse(target.shape, (source.strides, target.strides))
    cols = axes.pop().size if axes and axes[-1].strides == (item, item) else 1
    rows, (from_row, to_row) = axes.pop() if axes else (1, (0, 0))
    if axes:
        return None
    width, addresses = cols * item, (source.pointer, target.pointer)
    word = common_alignment(*addresses, width, from_row, to_row)
    return Rows(*addresses, from_row, to_row, width // word, rows * width // word, word)


def _launch(pieces: Sequence[Rows], device: int) -> None:
    blocks = [-(-piece.words // SPAN) for piece in pieces]
    *firsts, total = accumulate(blocks, initial=0)
    table = np.zeros((CAPACITY, 8), np.int64)
    table[: len(pieces)] = [(*rows, first) for rows, first in zip(pieces, firsts, strict=True)]
    kernel = kernel_for(device, "copy_pieces.cu", "copy_pieces", DEFINES)
    # What fits a GPU's memory, in words of a byte, is less than a grid may have.
    kernel((total, 1, 1), (THREADS, 1, 1), (len(pieces), by_value(table)))
