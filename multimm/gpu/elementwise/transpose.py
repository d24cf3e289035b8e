"""Matrix transposes on a GPU: which kernel, in which configuration, and its launch.

kernels/transpose.cu where the rows of both matrices begin at multiples of 16 bytes and for small
matrices, kernels/transpose_skewed.cu for large ones whose rows begin anywhere.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from multimm.errors import KernelError, ShapeError
from multimm.gpu.elementwise.transpose_configs import TransposeConfig, config_for
from multimm.gpu.runtime import launch_cache
from multimm.gpu.runtime.launch import (
    TRANSPOSE_SIGNATURE,
    Launches,
    batch_axes,
    kernel_for,
    prepare,
)
from multimm.gpu.strides import Axis, Stack
from multimm.gpu.validate import check_arrays, check_out, common_alignment, describe
from multimm.shapes import Shape

logger = logging.getLogger(__name__)

Array = Any


def transpose(a: Array, *, out: Array = None, config: TransposeConfig | None = None) -> Array:
    """Swap the last two axes of a CuPy array, in memory.

    Parameters
    ----------
    a : cupy.ndarray, shape (..., m, n)
        Any dtype, any layout.
    out : cupy.ndarray of the same dtype, shape (..., n, m), optional
        Written to and returned; its rows are contiguous and overlap no element of `a`.
    config : TransposeConfig, optional
        By default `config_for` decides. The result does not depend on it.

    Returns
    -------
    cupy.ndarray, shape (..., n, m)
        On the device of `a`; `out`, or a new C-contiguous array.

    Raises
    ------
    ShapeError, DTypeError, ArrayTypeError
        Fewer than 2 dimensions, or an `out` that cannot be written to.
    KernelError
        Elements of more than 40 bytes, or a configuration that does not fit the operands.
    """
    if config is None and (done := launch_cache.again("transpose", (a,), out)) is not None:
        return done
    given = {"a": a} if out is None else {"a": a, "out": out}
    check_arrays(given, a.dtype)
    if a.ndim < 2:
        raise ShapeError(f"a has shape {a.shape}: a matrix or a stack of them is needed")
    shape = _turned(a.shape)
    if out is not None and check_out(given, shape).transposed:
        raise ShapeError("out has contiguous columns: transpose writes contiguous rows")
    import cupy

    with a.device:
        result = cupy.empty(shape, a.dtype) if out is None else out
        source, target = describe(a), describe(result)
        if isinstance(source, str) or source.transposed or 1 in a.shape[-2:]:
            # Rows of the result lie in memory already, or nothing does: a strided copy. (Tiles of
            # one column could be more than a grid has.)
            logger.debug("transpose copies: %s", source)
            cupy.copyto(result, a.swapaxes(-1, -2))
        elif result.size and isinstance(target, Stack):
            launches = _decided(a, source, result, target, config)
            launches((a.data.ptr, result.data.ptr))
            if config is None:
                launch_cache.keep("transpose", (a,), out, result=result, run=launches)
    return result


def _turned(shape: Shape) -> Shape:
    return (*shape[:-2], shape[-1], shape[-2])


def _decided(
    a: Array, source: Stack, out: Array, target: Stack, config: TransposeConfig | None
) -> Launches:
    rows, cols = a.shape[-2:]
    axes = batch_axes(a.shape[:-2], [(a, source), (out, target)])
    aligned = _alignment((source, target), axes, a.itemsize)
    best = config_for(a.itemsize, aligned, rows, cols)
    if config is None:
        config = best
    elif not _fits(config, a.itemsize, aligned):
        raise KernelError(
            f"{config} does not fit elements of {a.itemsize} bytes in rows that begin at multiples "
            f"of {aligned} bytes: use {best}"
        )
    kernel = kernel_for(
        a.device.id, f"{config.entry}.cu", config.entry, tuple(config.defines().items())
    )
    return prepare(
        kernel, config.tiles(rows, cols), config.threads, (rows, cols), (source, target), axes,
        TRANSPOSE_SIGNATURE, a.itemsize,
    )  # fmt: skip


def _fits(config: TransposeConfig, itemsize: int, alignment: int) -> bool:
    """Whether rows begin where the kernel may read and write them; skewed, that is anywhere."""
    needed = config.word_bytes if config.skew else config.slot_bytes
    return config.word_bytes * config.words == itemsize and alignment % needed == 0


def _alignment(stacks: Sequence[Stack], axes: Sequence[Axis], itemsize: int) -> int:
    """What divides the address of every row's first element, in bytes and up to 16."""
    steps = [stack.ld for stack in stacks]
    steps += [step for axis in axes if axis.size > 1 for step in axis.strides]
    return common_alignment(
        *(stack.pointer for stack in stacks), *(step * itemsize for step in steps)
    )
