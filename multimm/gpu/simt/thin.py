"""Launches of skinny products: kernels/sgemm_dot.cu, sgemm_axpy.cu and sgemm_outer.cu.

`skinny_choice` decides; here its decision becomes kernels with arguments. The three kernels take
the arguments of sgemm_ffma.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from multimm.gpu.runtime.launch import GEMM_SIGNATURE, Launches, kernel_for, prepare
from multimm.gpu.runtime.launch_cache import Run
from multimm.gpu.simt.split_k import can_be_added, in_slices
from multimm.gpu.simt.thin_configs import AxpyConfig
from multimm.gpu.simt.thin_selection import Way
from multimm.gpu.strides import Axis, ProductShape, Stack

Array = Any


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
    stacks = [stack for _, stack in operands]
    launches = functools.partial(_launches, way, _kernel(way, device, stacks, axes, sides))
    if way.slices > 1 and alpha != 0 and can_be_added(shape, operands[2:]):
        return in_slices(launches, device, operands, shape, way.slices, way.length, alpha, beta,
                         sides)  # fmt: skip
    return launches((shape.m, shape.n, shape.k, 0, alpha, beta), stacks, axes)


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


def _launches(
    way: Way, kernel: Any, head: tuple[Any, ...], stacks: Sequence[Stack], axes: Sequence[Axis]
) -> Launches:
    config = way.config
    return prepare(kernel, way.blocks(head[0], head[1]), config.threads, head, stacks, axes,
                   GEMM_SIGNATURE, 4, config.shared_bytes)  # fmt: skip
