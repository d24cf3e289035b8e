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

from multimm.gpu.arch import MAX_PARTS, Guard, defines
from multimm.gpu.problem import check_arrays, copied
from multimm.gpu.runtime import launch_cache
from multimm.gpu.runtime.launch import MAX_GRID_Z, by_value, kernel_for
from multimm.gpu.runtime.workspace import not_captured
from multimm.gpu.strides import Axis, collapse, common_alignment

logger = logging.getLogger(__name__)

Array = Any
Grid = tuple[int, int, int]

#: Kernels add up to so many parts: few of them, to be compiled before a product needs them. Those
#: of 2 to 8 take up to 1.4 x as long with one for 8 or 64, on an H200; 9 and more 1.06 x at most.
CAPACITIES = (2, 4, 8, MAX_PARTS)
#: Thread blocks of one launch.
MAX_GRID_X = 2**31 - 1
FLOAT = 4  # bytes


@dataclass(frozen=True, slots=True)
class AddConfig:
    """How add_partials.cu cuts its work.

    Parameters
    ----------
    capacity : int
        Parts that it can add.
    vector : int, optional
        Elements that one instruction moves.
    unroll : int, optional
        Vectors of one thread.
    threads : int, optional
        Of a block.
    """

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


def config_for(parts: int, alignment: int) -> AddConfig:
    """Return the configuration for some parts, in rows that begin on an alignment in bytes."""
    vector = max(1, alignment // FLOAT)
    capacity = next(most for most in CAPACITIES if parts <= most)
    # Single elements need more of them on their way; measured on an H200, as the rest.
    return AddConfig(capacity, vector, unroll=1 if vector > 1 else 8)


def add_partials(
    parts: Sequence[Array], *, alpha: float = 1.0, beta: float = 0.0, c: Array = None
) -> Array:
    """alpha * (sum of the parts) + beta * C, added pairwise: ((p0 + p1) + (p2 + p3)) + ...

    The tree depends on nothing but the number of parts, so the same parts give the same bits,
    those of `multimm.gpu.library_gemm.add_partials`.

    Parameters
    ----------
    parts : sequence of cupy.ndarray of float32
        At least one; equal in shape. Any number of axes, any layout; those that are not contiguous
        along the last axis are copied first.
    alpha, beta : float
        Rounded to float32. beta == 0 never reads C, alpha == 0 never reads the parts.
    c : cupy.ndarray of float32 and the parts' shape, optional

    Returns
    -------
    cupy.ndarray
        New and C-contiguous, on the device of the parts.

    Raises
    ------
    DTypeError, ArrayTypeError
        What is no float32 of CuPy's, or lies elsewhere.
    KernelError
        A captured stream, where operands would be copied or there are too many parts.
    """
    operands = (*parts, c)
    done = launch_cache.again("add_partials", operands, None, alpha, beta)
    if done is not None:
        return done
    named = {f"part {i}": part for i, part in enumerate(parts)}
    check_arrays(named if c is None else named | {"c": c}, np.float32)
    import cupy

    with parts[0].device:
        result = cupy.empty(parts[0].shape, np.float32)
        addends = list(parts[:1] if alpha == 0 else parts)  # none is read
        shallow = len(addends) <= MAX_PARTS
        if not shallow:
            not_captured(f"sums of {MAX_PARTS} of the {len(addends)} parts are made first",
                         f"add at most {MAX_PARTS} in a call")  # fmt: skip
        while len(addends) > MAX_PARTS:  # complete branches of the tree
            groups = [addends[i : i + MAX_PARTS] for i in range(0, len(addends), MAX_PARTS)]
            addends = [add_partials(group) if len(group) > 1 else group[0] for group in groups]
        if result.size:
            given = [*addends, *([] if beta == 0 else [c]), result]
            # The copies stay referenced until everything that reads them is in the stream.
            walked = [_walkable(x) for x in given]
            run = prepared_sum(walked, alpha, beta)
            run([x.data.ptr for x in walked])
            if shallow and all(x is y for x, y in zip(given, walked, strict=True)):
                places = [*range(len(addends)), *([] if beta == 0 else [len(parts)]), -1]
                launch_cache.keep(
                    "add_partials", operands, None, alpha, beta, result=result,
                    run=lambda pointers: run([pointers[i] for i in places]),
                )  # fmt: skip
    return result


def prepared_sum(
    operands: Sequence[Array], alpha: float, beta: float, guard: Guard = ()
) -> Callable[[Sequence[int]], None]:
    """Return what adds operands like these: the parts, C unless beta is 0, and D.

    Their rows are contiguous. It takes their addresses, and launches on the current stream. With a
    guard it also takes the address of what packing has counted, last.
    """
    out, given = operands[-1], len(operands)
    count = given - 1 - (beta != 0)
    axes = _axes(operands)
    *_, batches, rows, (cols, _) = axes
    config = config_for(count, _alignment(operands, axes))
    kernel = kernel_for(
        out.device.id, "add_partials.cu", "add_partials",
        (*config.defines().items(), *guard),
    )  # fmt: skip
    leading = (cols, np.float32(alpha), np.float32(beta), count)
    calls = _calls(axes, config.span)
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


def _walkable(x: Array) -> Array:
    """The operand, or a copy if its rows are not contiguous."""
    steps = [step for size, step in zip(x.shape, x.strides, strict=True) if size > 1]
    rows = not steps or steps[-1] == x.itemsize
    return x if rows and all(step >= 0 and step % x.itemsize == 0 for step in steps) else copied(x)


def _axes(operands: Sequence[Array]) -> list[Axis]:
    """The axes of all operands from the largest step to neighbours: batches, rows and columns."""
    strides = [tuple(step // x.itemsize for step in x.strides) for x in operands]
    axes = collapse(operands[0].shape, strides)
    return [Axis(1, (0,) * len(operands))] * (3 - len(axes)) + axes


def _alignment(operands: Sequence[Array], axes: Sequence[Axis]) -> int:
    """Of all rows of all operands, in bytes."""
    steps = (step for size, steps in axes[:-1] for step in steps if size > 1)
    return common_alignment(*(x.data.ptr for x in operands), *(step * FLOAT for step in steps))


def _calls(axes: Sequence[Axis], span: int) -> list[tuple[Grid, list[int]]]:
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
            sum(i * axis.strides[n] for i, axis in moves) * FLOAT for n in range(len(rows.strides))
        ]
        grid = (min(rows.size - row, at_once) * spans, 1, min(batches.size - z, MAX_GRID_Z))
        logger.debug("launch grid=%s operands=%d cols=%d", grid, len(offsets), cols)
        calls.append((grid, offsets))
    return calls
