"""Compiled kernels by device and parameters, and how they are launched over stacks.

CuPy compiles a kernel at its first launch, keeps the binary on disk, and launches on the current
stream. Kernels are never pickled: what travels is a configuration, and each process has its own.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from multimm.gpu.layout import Axis, Shape, Stack, batch_strides, collapse
from multimm.gpu.registry import Device
from multimm.gpu.source import kernel_text
from multimm.gpu.tiles import limits_for

logger = logging.getLogger(__name__)

Array = Any

MAX_GRID_Z = 65_535

_SIZE, _POINTER, _FLOAT = np.int64, np.uint64, np.float32
_MATRIX = (_POINTER, _SIZE, _SIZE)  # first element, leading dimension, batch stride
#: The parameter types of sgemm_tiled and transpose, in their order.
GEMM_SIGNATURE = (_SIZE, _SIZE, _SIZE, _FLOAT, _FLOAT, *_MATRIX * 5)
TRANSPOSE_SIGNATURE = (_SIZE, _SIZE, *_MATRIX * 2)


@functools.cache
def device_of(device: int) -> Device:
    """Return what `registry.choose` needs to know about a device."""
    import cupy

    chip = cupy.cuda.Device(device)
    return Device(
        limits_for(int(chip.compute_capability)), int(chip.attributes["MultiProcessorCount"])
    )


@functools.cache
def kernel_for(device: int, file: str, entry: str, defines: tuple[tuple[str, int], ...]) -> Any:
    """Return the kernel of a device and its parameters; CuPy compiles it at its first launch."""
    import cupy

    logger.debug("kernel %s for device %d: %s", entry, device, dict(defines))
    return cupy.RawKernel(kernel_text(file, dict(defines)), entry, options=("--std=c++17",))


def batch_axes(batch: Shape, prepared: Sequence[tuple[Array, Stack]]) -> list[Axis]:
    """Return the axes of a stack of products, the longest last: that one goes into the grid."""
    strides = [
        (0,) * len(batch) if x is None else batch_strides(stack, x.shape, batch)
        for x, stack in prepared
    ]
    axes = sorted(collapse(batch, strides), key=lambda axis: axis.size)
    return axes or [Axis(1, (0,) * len(prepared))]


def launch(
    kernel: Any,
    tiles: int,
    threads: int,
    head: tuple[float, ...],
    stacks: Sequence[Stack],
    axes: Sequence[Axis],
    signature: Sequence[type[np.generic]],
    itemsize: int,
) -> None:
    """Launch once per matrix of the outer axes, with the longest axis along the grid's z."""
    *outer, (depth, steps) = axes
    for index in itertools.product(*(range(size) for size, _ in outer)):
        for first in range(0, depth, MAX_GRID_Z):
            values = list(head)
            for operand, stack in enumerate(stacks):
                offset = first * steps[operand] + sum(
                    i * strides[operand] for i, (_, strides) in zip(index, outer, strict=True)
                )
                values += [stack.pointer + offset * itemsize, stack.ld, steps[operand]]
            grid = (tiles, 1, min(depth - first, MAX_GRID_Z))
            logger.debug("launch grid=%s block=%d sizes=%s", grid, threads, head)
            kernel(grid, (threads, 1, 1), _coerced(values, signature))


def _coerced(
    values: Sequence[float], signature: Sequence[type[np.generic]]
) -> tuple[np.generic, ...]:
    """Give every scalar the width that the kernel reads: CuPy would pass a float as a double."""
    return tuple(kind(value) for kind, value in zip(signature, values, strict=True))
