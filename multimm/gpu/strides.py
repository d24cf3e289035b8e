"""Sizes of products, and stacks of matrices in memory as the kernels address them.

Integers only: shapes, strides and pointers in, leading dimensions and batch strides out. Nothing
in this module touches an array, so all of it is tested without a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from multimm.shapes import Shape


class ProductShape(NamedTuple):
    """The sizes of a product of stacks: `batch` is the shape of the stack."""

    batch: Shape
    m: int
    n: int
    k: int

    @property
    def result(self) -> Shape:
        """Shape of the result."""
        return (*self.batch, self.m, self.n)


@dataclass(frozen=True, slots=True)
class GemmSizes:
    """The sizes of a product: `batch` products of m x k by k x n, and how A and B are copied.

    An operand is scattered if it is stored along k, and turned on its way to shared memory; it is
    ragged if it lies along m or n, but not all of its rows begin and end on 16 bytes. Both kinds
    are copied 4 bytes at a time. Of a `lower` product, whose m and n are equal, tiles above
    the diagonal are not computed.
    """

    m: int
    n: int
    k: int
    batch: int = 1
    scattered_a: bool = False
    scattered_b: bool = False
    ragged_a: bool = False
    ragged_b: bool = False
    lower: bool = False


@dataclass(frozen=True, slots=True)
class Stack:
    """A stack of row-major matrices in memory; lengths count elements.

    `transposed` says that what lies in memory row by row is the transpose of the array.
    """

    pointer: int
    rows: int  #: of the matrices as they lie in memory
    cols: int
    ld: int
    transposed: bool
    batch: Shape  #: distance of neighbours along each axis of the stack


#: An operand that is not there.
ABSENT = Stack(0, 0, 0, 0, False, ())


def stack_of(pointer: int, shape: Shape, strides: Shape, itemsize: int) -> Stack | str:
    """Describe an array to a kernel, or say why it cannot be.

    Parameters
    ----------
    pointer : int
        Address of the first element, in bytes.
    shape, strides : tuple of int
        Of the array, at least 2-D; strides in bytes.
    itemsize : int

    Returns
    -------
    Stack or str
        A string is the reason why a copy is needed. C order is preferred where both orders fit.
    """
    if any(stride % itemsize for stride in strides):
        return f"strides {strides} are no multiples of the {itemsize} bytes of an element"
    *batch, by_row, by_col = (stride // itemsize for stride in strides)
    rows, cols = shape[-2:]
    if rows == 0 or cols == 0:  # nothing lies anywhere: NumPy and CuPy give any strides
        return Stack(pointer, rows, cols, max(cols, 1), False, tuple(batch))
    for transposed, (height, width, step, unit) in (
        (False, (rows, cols, by_row, by_col)),
        (True, (cols, rows, by_col, by_row)),
    ):
        # The stride of an axis of one element is never used, and may be anything.
        if width <= 1 or unit == 1:
            ld = step if height > 1 else max(width, 1)
            if ld >= 0:
                return Stack(pointer, height, width, ld, transposed, tuple(batch))
    return f"strides {strides}: neither rows nor columns are contiguous and ascending"


def batch_strides(stack: Stack, shape: Shape, batch: Shape) -> Shape:
    """Return a stack's strides for a larger stack that it is broadcast to: 0 where repeated.

    Parameters
    ----------
    stack : Stack
    shape : tuple of int
        The array's shape.
    batch : tuple of int
        The stack of the result.
    """
    own = [0 if size == 1 else step for size, step in zip(shape[:-2], stack.batch, strict=True)]
    return (0,) * (len(batch) - len(own)) + tuple(own)


class Axis(NamedTuple):
    """An axis of a stack, and the distance of neighbours in each operand."""

    size: int
    strides: Shape


def collapse(batch: Shape, strides: Sequence[Shape]) -> list[Axis]:
    """Merge the axes of a stack that every operand steps through evenly.

    Parameters
    ----------
    batch : tuple of int
    strides : sequence of tuple of int
        For each operand, one stride per axis.

    Returns
    -------
    list of Axis
        As few as possible, the last one steps fastest; empty for a single matrix.
    """
    axes: list[Axis] = []
    for size, *steps in zip(batch, *strides, strict=True):
        if size == 1:
            continue
        if axes and all(
            outer == inner * size for outer, inner in zip(axes[-1].strides, steps, strict=True)
        ):
            axes[-1] = Axis(axes[-1].size * size, tuple(steps))
        else:
            axes.append(Axis(size, tuple(steps)))
    return axes


def may_overlap(x: Stack, x_batch: Shape, y: Stack, y_batch: Shape, itemsize: int) -> bool:
    """Whether two stacks may share an element; only ever wrong by saying that they may.

    The bounds of both decide, and for single matrices that are column ranges of one larger
    matrix, the ranges.

    Parameters
    ----------
    x, y : Stack
    x_batch, y_batch : tuple of int
        The shapes of the stacks.
    itemsize : int
    """
    if 0 in (x.rows, x.cols, y.rows, y.cols, *x_batch, *y_batch):
        return False
    (x_first, x_end), (y_first, y_end) = (
        _bounds(x, x_batch, itemsize),
        _bounds(y, y_batch, itemsize),
    )
    if x_end <= y_first or y_end <= x_first:
        return False
    if prod(x_batch) > 1 or prod(y_batch) > 1 or x.ld != y.ld or x.ld < max(x.cols, y.cols):
        return True
    apart, misplaced = divmod(y.pointer - x.pointer, itemsize)
    column = apart % x.ld  # of y's first column, counted from x's
    return bool(misplaced) or column < x.cols or column + y.cols > x.ld


def _bounds(stack: Stack, batch: Shape, itemsize: int) -> tuple[int, int]:
    """Addresses of the first byte of a stack, and of the one after its last."""
    steps = [(size - 1) * step for size, step in zip(batch, stack.batch, strict=True)]
    low = sum(min(step, 0) for step in steps)
    high = sum(max(step, 0) for step in steps) + (stack.rows - 1) * stack.ld + stack.cols
    return stack.pointer + low * itemsize, stack.pointer + high * itemsize


def repeats(stack: Stack, batch: Shape) -> bool:
    """Whether two elements of a stack may be the same memory, so that it cannot be written to."""
    axes = [(stack.rows, stack.ld), *zip(batch, stack.batch, strict=True)]
    span = stack.cols  # elements from the first to the last of what is looked at so far
    for size, step in sorted(axes, key=lambda axis: abs(axis[1])):
        if size > 1 and abs(step) < span:
            return True
        span += (size - 1) * abs(step)
    return False


def common_alignment(*lengths: int) -> int:
    """The largest power of two, up to 16, that divides all lengths and addresses."""
    bits = 16
    for length in lengths:
        bits |= length
    return bits & -bits
