"""Sums of partial results on a GPU: how kernels/add_partials.cu is configured and launched.

The operands are walked as stacks of rows, however many axes they have: axes that all operands
step through evenly are one, so that contiguous blocks of any shape are a single row.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from multimm.errors import DTypeError, OptionError, ShapeError
from multimm.gpu.arch import MAX_PARTS, Guard, defines
from multimm.gpu.runtime import launch_cache
from multimm.gpu.runtime.launch import MAX_GRID_Z, by_value, kernel_for
from multimm.gpu.runtime.workspace import copied, not_captured
from multimm.gpu.strides import Axis, collapse
from multimm.gpu.validate import check_arrays, check_beta, check_out, common_alignment
from multimm.shapes import Shape

logger = logging.getLogger(__name__)

Array = Any
Grid = tuple[int, int, int]

#: Kernels add up to so many parts: few of them, to be compiled before a product needs them. Those
#: of 2 to 8 take up to 1.4 x as long with one for 8 or 64, on an H200; 9 and more 1.06 x at most.
CAPACITIES = (2, 4, 8, MAX_PARTS)
#: Thread blocks of one launch.
MAX_GRID_X = 2**31 - 1
#: What the kernel can add.
DTYPES = ("float32", "float64")


@dataclass(frozen=True, slots=True)
class AddConfig:
    """How add_partials.cu cuts its work.

    Parameters
    ----------
    element_bytes : int
        4 for float32, 8 for float64.
    capacity : int
        Parts that it can add.
    vector : int, optional
        Elements that one instruction moves.
    unroll : int, optional
        Vectors of one thread.
    threads : int, optional
        Of a block.
    """

    element_bytes: int
    capacity: int
    vector: int = 1
    unroll: int = 1
    threads: int = 256

    @property
    def span(self) -> int:
        """Neighbouring elements of a row that a block adds."""
        return self.threads * self.vector * self.unroll

    def defines(self) -> dict[str, int]:
        """Return the kernel's compile-time parameters, by their names there."""
        return defines(self)


def config_for(element_bytes: int, parts: int, alignment: int) -> AddConfig:
    """Return the configuration for some parts, in rows that begin on an alignment in bytes."""
    vector = max(1, alignment // element_bytes)
    capacity = next(most for most in CAPACITIES if parts <= most)
    # Single elements need more of them on their way; measured on an H200, as the rest.
    return AddConfig(element_bytes, capacity, vector, unroll=1 if vector > 1 else 8)


def add_partials(
    parts: Sequence[Array] | Array,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    c: Array = None,
    out: Array = None,
) -> Array:
    """alpha * (sum of the parts) + beta * C, added pairwise: ((p0 + p1) + (p2 + p3)) + ...

    The tree depends on nothing but the number of parts, so the same parts give the same bits,
    those of `multimm.gpu.library_gemm.add_partials`.

    Parameters
    ----------
    parts : sequence of cupy.ndarray, or one with the parts along its first axis
        At least one; float32 or float64, equal in shape. Any number of axes, any layout; those
        that are not contiguous along the same axis as `out` are copied first.
    alpha, beta : float
        Rounded to the dtype. beta == 0 never reads C, alpha == 0 never reads the parts.
    c : cupy.ndarray of the parts' dtype and shape, optional
    out : cupy.ndarray of the parts' dtype and shape, optional
        Written to and returned; rows or columns contiguous. May be `c` or one of the parts,
        element by element; otherwise it overlaps no operand.

    Returns
    -------
    cupy.ndarray
        On the device of the parts; `out`, or a new C-contiguous array.

    Raises
    ------
    ShapeError, DTypeError, ArrayTypeError
        Operands that do not fit together, or an `out` that cannot be written to.
    OptionError
        Scalars that are no real numbers.
    KernelError
        A captured stream, where operands would be copied or there are too many parts.
    """
    stacked = hasattr(parts, "strides")
    operands = (parts, c) if stacked else (*parts, c)
    done = launch_cache.again("add_partials", operands, out, stacked, alpha, beta)
    if done is not None:
        return done
    addends = list(parts)
    _check(addends, alpha, beta, c, out)
    import cupy

    with addends[0].device:
        result = cupy.empty(addends[0].shape, addends[0].dtype) if out is None else out
        if alpha == 0:
            addends = addends[:1]  # none is read
        shallow = len(addends) <= MAX_PARTS
        if not shallow:
            not_captured(f"sums of {MAX_PARTS} of the {len(addends)} parts are made first",
                         f"add at most {MAX_PARTS} in a call")  # fmt: skip
        while len(addends) > MAX_PARTS:  # complete branches of the tree
            groups = [addends[i : i + MAX_PARTS] for i in range(0, len(addends), MAX_PARTS)]
            addends = [add_partials(group) if len(group) > 1 else group[0] for group in groups]
        if result.size:
            order = sorted(range(result.ndim), key=lambda axis: -result.strides[axis])
            given = [*addends, *([] if beta == 0 else [c]), result]
            # The copies stay referenced until everything that reads them is in the stream.
            walked = [_walkable(x, order) for x in given]
            run = prepared_sum(walked, order, alpha, beta)
            run([x.data.ptr for x in walked])
            if walked[-1] is not result:  # one column of a wider array
                cupy.copyto(result, walked[-1])
            if shallow and all(x is y for x, y in zip(given, walked, strict=True)):
                again = _by_operands(run, parts, len(addends), len(operands), beta)
                launch_cache.keep("add_partials", operands, out, stacked, alpha, beta,
                            result=result, run=again, in_place=True)  # fmt: skip
    return result


def _by_operands(
    run: Callable[[Sequence[int]], None],
    parts: Sequence[Array] | Array,
    count: int,
    operands: int,
    beta: float,
) -> launch_cache.Run:
    """Return `run` for the addresses of `parts`, in one array or several, of C and the result."""
    step = getattr(parts, "strides", (None,))[0]
    places = [(i, 0) if step is None else (0, i * step) for i in range(count)]
    places += [*([] if beta == 0 else [(operands - 1, 0)]), (operands, 0)]
    return lambda pointers: run([pointers[i] + offset for i, offset in places])


def _check(parts: list[Array], alpha: float, beta: float, c: Array, out: Array) -> None:
    if not parts:
        raise ShapeError("add_partials got no parts: at least one is needed")
    for name, scalar in (("alpha", alpha), ("beta", beta)):
        if isinstance(scalar, (complex, np.complexfloating)):
            raise OptionError(f"{name} is {scalar}: the kernel takes real numbers")
    check_beta(beta, c)
    named = {**{f"part {i}": part for i, part in enumerate(parts)}, "c": c, "out": out}
    given = {name: x for name, x in named.items() if x is not None}
    dtype = np.dtype(getattr(parts[0], "dtype", np.float32))
    check_arrays(given, dtype)
    if dtype.name not in DTYPES:
        raise DTypeError(f"the parts have dtype {dtype}: {' and '.join(DTYPES)} can be added")
    shape = parts[0].shape
    for name, x in given.items():
        if x.shape != shape:
            raise ShapeError(f"{name} has shape {x.shape}: all must have that of part 0, {shape}")
    if out is not None:
        # What is out itself is read before it is written, element by element.
        apart = {name: x for name, x in given.items() if name == "out" or not _same(x, out)}
        check_out({name: _matrices(x) for name, x in apart.items()}, _matrices(out).shape)


def _matrices(x: Array) -> Array:
    """The array itself, or a vector or scalar as a matrix of one row."""
    return x[(None,) * (2 - x.ndim) + (...,)] if x.ndim < 2 else x


def _same(x: Array, out: Array) -> bool:
    """Whether two arrays are the same elements in the same order."""
    return bool(x.data.ptr == out.data.ptr) and _steps(x) == _steps(out)


def _steps(x: Array) -> list[tuple[int, int]]:
    """Size and stride in bytes of each axis of more than one element; others never step."""
    return [(size, step) for size, step in zip(x.shape, x.strides, strict=True) if size > 1]


def prepared_sum(
    operands: Sequence[Array],
    order: Sequence[int],
    alpha: float,
    beta: float,
    guard: Guard = (),
) -> Callable[[Sequence[int]], None]:
    """Return what adds operands like these: the parts, C unless beta is 0, and D.

    Their rows lie in the order `order` of axes and are contiguous. It takes their addresses, and
    launches on the current stream. With a guard it also takes the address of what packing has
    counted, last.
    """
    out, given = operands[-1], len(operands)
    count = given - 1 - (beta != 0)
    axes = _axes(operands, order)
    *_, batches, rows, (cols, _) = axes
    config = config_for(out.itemsize, count, _alignment(operands, axes, out.itemsize))
    kernel = kernel_for(
        out.device.id, "add_partials.cu", "add_partials",
        (*config.defines().items(), *guard),
    )  # fmt: skip
    leading = (cols, out.dtype.type(alpha), out.dtype.type(beta), count)
    calls = _calls(axes, config.span, out.itemsize)
    c, d = config.capacity, config.capacity + 1  # where they lie in the table
    places = [*range(count), *([] if beta == 0 else [c]), d]
    template = np.zeros((d + 1, 3), np.int64)
    template[places, 1], template[places, 2] = rows.strides, batches.strides
    cuts = ((0, c), (c, d), (d, d + 1))

    def run(pointers: Sequence[int]) -> None:  # kept: it must refer to no operand
        pointers, counts = pointers[:given], pointers[given:]
        for grid, offsets in calls:
            table = template.copy()
            table[places, 0] = [p + offset for p, offset in zip(pointers, offsets, strict=True)]
            structs = (by_value(table[first:end]) for first, end in cuts)
            kernel(grid, (config.threads, 1, 1), (*leading, *structs, *counts))

    return run


def _walkable(x: Array, order: Sequence[int]) -> Array:
    """The operand, or a copy if its elements are not neighbours along the last axis of `order`."""
    last = next((axis for axis in reversed(order) if x.shape[axis] > 1), None)
    if (last is None or x.strides[last] == x.itemsize) and all(
        step >= 0 and step % x.itemsize == 0 for _, step in _steps(x)
    ):
        return x
    return copied(x, order)


def _axes(operands: Sequence[Array], order: Sequence[int]) -> list[Axis]:
    """The axes of all operands from the largest step to neighbours: batches, rows and columns."""
    shape: Shape = tuple(operands[0].shape[axis] for axis in order)
    strides = [tuple(x.strides[axis] // x.itemsize for axis in order) for x in operands]
    axes = collapse(shape, strides)
    return [Axis(1, (0,) * len(operands))] * (3 - len(axes)) + axes


def _alignment(operands: Sequence[Array], axes: Sequence[Axis], itemsize: int) -> int:
    """Of all rows of all operands, in bytes."""
    steps = (step for size, steps in axes[:-1] for step in steps if size > 1)
    return common_alignment(*(x.data.ptr for x in operands), *(step * itemsize for step in steps))


def _calls(axes: Sequence[Axis], span: int, itemsize: int) -> list[tuple[Grid, list[int]]]:
    """The launches of blocks of so many columns: a grid, and where each operand begins in bytes."""
    *beyond, batches, rows, (cols, _) = axes
    spans = -(-cols // span)
    at_once = max(1, MAX_GRID_X // spans)  # rows
    outer = [range(size) for size, _ in beyond]
    calls = []
    for *far, z, row in itertools.product(
        *outer, range(0, batches.size, MAX_GRID_Z), range(0, rows.size, at_once)
    ):
        moves = list(zip((*far, z, row), (*beyond, batches, rows), strict=True))
        offsets = [
            sum(i * axis.strides[n] for i, axis in moves) * itemsize
            for n in range(len(rows.strides))
        ]
        grid = (min(rows.size - row, at_once) * spans, 1, min(batches.size - z, MAX_GRID_Z))
        logger.debug("launch grid=%s operands=%d cols=%d", grid, len(offsets), cols)
        calls.append((grid, offsets))
    return calls
