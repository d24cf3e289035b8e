"""Launches of skinny products: kernels/sgemm_dot.cu, sgemm_axpy.cu and sgemm_outer.cu.

`skinny_choice` decides; here its decision becomes kernels with arguments. The three kernels take
the arguments of sgemm_ffma.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from multimm.gpu import add
from multimm.gpu.compiled import Launches, kernel_for, prepare
from multimm.gpu.layout import Axis, ProductShape, Stack
from multimm.gpu.recall import Run
from multimm.gpu.skinny_choice import Way
from multimm.gpu.skinny_config import AxpyConfig
from multimm.gpu.tiles import STRIP
from multimm.gpu.workspace import workspace

Array = Any

#: The parameter types, in their order: m, n, k, k_step, alpha, beta, 5 matrices.
_SIGNATURE = (*(int,) * 4, np.float32, np.float32, *(int,) * 15)

_ABSENT = Stack(0, 0, 0, 0, False, ())


def prepared(
    way: Way,
    device: int,
    operands: Sequence[tuple[Array, Stack]],
    axes: Sequence[Axis],
    shape: ProductShape,
    alpha: float,
    beta: float,
    sides: tuple[bool, bool],
) -> Run:
    """Return what launches a skinny product.

    Parameters
    ----------
    way : Way
        Of `skinny_choice.way_for`.
    device : int
    operands : sequence of (cupy.ndarray of float32 or None, Stack)
        A, B, C, P and D, which the kernels can address.
    axes : sequence of Axis
        Of `compiled.batch_axes`.
    shape : ProductShape
    alpha, beta : float
    sides : (bool, bool)
        Whether A and B are stored as the transposes of op(A) and op(B).

    Returns
    -------
    callable
        Takes the addresses of A, B, C, P and D, and launches on the current stream. It may be
        called again for other operands of the same kind.
    """
    kernel = _kernel(way, device, [stack for _, stack in operands], axes, sides)
    if way.slices > 1 and alpha != 0 and not _has_loose_column(shape, operands):
        return _Sliced(way, kernel, device, operands, shape, alpha, beta, sides)
    head = (shape.m, shape.n, shape.k, 0, alpha, beta)
    stacks = [stack for _, stack in operands]
    return _launches(way, kernel, head, stacks, axes)


def _kernel(
    way: Way, device: int, stacks: Sequence[Stack], axes: Sequence[Axis], sides: tuple[bool, bool]
) -> Any:
    config = way.config
    defines = {**config.defines(), "TRANS_A": int(sides[0]), "TRANS_B": int(sides[1])}
    if way.kernel != "sgemm_outer":
        defines["TURNED"] = int(way.turned)
    if isinstance(config, AxpyConfig):
        defines["WIDE"] = int(_is_wide(config.cells, stacks, axes, int(way.turned)))
    return kernel_for(
        device, f"{way.kernel}.cu", way.kernel, tuple(defines.items()),
        shared_bytes=config.shared_bytes,
    )  # fmt: skip


def _is_wide(cells: int, stacks: Sequence[Stack], axes: Sequence[Axis], operand: int) -> bool:
    """Whether all rows of an operand begin and end on addresses of `cells` words."""
    stack = stacks[operand]
    lengths = (stack.ld, stack.cols, *(axis.strides[operand] for axis in axes))
    return stack.pointer % (4 * cells) == 0 and not any(length % cells for length in lengths)


def _has_loose_column(shape: ProductShape, operands: Sequence[tuple[Array, Stack]]) -> bool:
    """Whether D is a column, and its values or what is added to them are no neighbours.

    Sums of slices are added along rows; here that would be one value at a time.
    """
    return shape.n == 1 and any(x is not None and stack.ld != 1 for x, stack in operands[2:])


def _launches(
    way: Way, kernel: Any, head: tuple[Any, ...], stacks: Sequence[Stack], axes: Sequence[Axis]
) -> Launches:
    config = way.config
    return prepare(kernel, way.blocks(head[0], head[1]), config.threads, head, stacks, axes,
                   _SIGNATURE, 4, config.shared_bytes)  # fmt: skip


class _Sliced:
    """A product whose slices of k are summed into a workspace, and added in a fixed tree."""

    def __init__(
        self,
        way: Way,
        kernel: Any,
        device: int,
        operands: Sequence[tuple[Array, Stack]],
        shape: ProductShape,
        alpha: float,
        beta: float,
        sides: tuple[bool, bool],
    ) -> None:
        m, n, k = shape.m, shape.n, shape.k
        (_, a), (_, b), *_ = operands
        step = (
            -(-m * n // STRIP) * STRIP
        )  # all sums are aligned: 16 bytes of them are added at once
        steps = (
            way.length * (a.ld if sides[0] else 1),
            way.length * (1 if sides[1] else b.ld),
            0, 0, step,
        )  # fmt: skip
        self._products = _launches(
            way, kernel, (m, n, k, way.length, 1.0, 0.0),
            (a, b, _ABSENT, _ABSENT, Stack(0, m, n, n, False, ())), [Axis(way.slices, steps)],
        )  # fmt: skip
        self._device, self._size = device, (way.slices, step)
        self._offsets = [4 * step * i for i in range(way.slices)]
        # A stack has one product here.
        c, partial, out = (x if x is None else x[(0,) * (x.ndim - 2)] for x, _ in operands[2:])
        given = {3: partial, 2: None if beta == 0 else c, 4: out}
        self._places = [i for i, x in given.items() if x is not None]
        sums, release = workspace(self._size, device)
        addends = [*sums[:, : m * n].reshape(way.slices, m, n), *(given[i] for i in self._places)]
        self._add = add.prepared_sum(addends, (0, 1), alpha, beta if 2 in self._places else 0.0)
        release()

    def __call__(self, pointers: Sequence[int]) -> None:
        """Launch on the current stream, in whose order the workspace is used again."""
        sums, release = workspace(self._size, self._device)
        first: int = sums.data.ptr
        self._products((pointers[0], pointers[1], 0, 0, first))
        self._add([*(first + i for i in self._offsets), *(pointers[i] for i in self._places)])
        release()
