"""The kernels on CuPy arrays: checks, layouts, scalar types, compiled kernels, launches.

Whatever can be wrong is checked before CUDA is touched. Kernels run on the caller's current
stream of the operands' device, and the results are ready in that stream's order.

CuPy adds -ftz=true to all code that it compiles from text. The kernels keep subnormal numbers
nevertheless: kernels/common/ieee.cuh says how.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from multimm.errors import ArrayTypeError, DTypeError, ShapeError
from multimm.gpu.compiled import (
    GEMM_SIGNATURE,
    TRANSPOSE_SIGNATURE,
    batch_axes,
    device_of,
    kernel_for,
    launch,
)
from multimm.gpu.layout import (
    ProductShape,
    Shape,
    Stack,
    check_addend,
    may_overlap,
    product_shape,
    repeats,
    stack_of,
)
from multimm.gpu.registry import Problem, choose, config_named
from multimm.gpu.tiles import TileConfig, TransposeConfig

logger = logging.getLogger(__name__)

Array = Any

TRANSPOSE_TILE = 32

_ABSENT = Stack(0, 0, 0, 0, False, ())


def gemm(
    a: Array,
    b: Array,
    *,
    trans_a: bool = False,
    trans_b: bool = False,
    alpha: float = 1.0,
    beta: float = 0.0,
    c: Array = None,
    partial: Array = None,
    out: Array = None,
    config: TileConfig | str | None = None,
) -> Array:
    """D = alpha * (op(A) @ op(B) + P) + beta * C with FP32 fused multiply-adds.

    Parameters
    ----------
    a : cupy.ndarray of float32, shape (..., m, k), or (..., k, m) if `trans_a`
    b : cupy.ndarray of float32, shape (..., k, n), or (..., n, k) if `trans_b`
        C order, F order and slices of either are read as they are, other layouts are copied
        first. Stacks broadcast as in ``np.matmul``.
    alpha, beta : float
        beta == 0 never reads C, alpha == 0 never reads A, B or P.
    c, partial : cupy.ndarray of float32, shape (..., m, n), optional
        Copied first unless their rows are contiguous. Their stacks may be broadcast.
    out : cupy.ndarray of float32, shape (..., m, n), optional
        Written to and returned: rows or columns contiguous, overlapping no operand.
    config : TileConfig or str, optional
        Or the name of one; by default `registry.choose` decides.

    Returns
    -------
    cupy.ndarray of float32, shape (..., m, n)
        On the device of `a`; `out`, or a new C-contiguous array.

    Raises
    ------
    ShapeError, DTypeError, ArrayTypeError
        Operands that do not fit together, or an `out` that cannot be written to.
    KernelError
        An unknown configuration, or a GPU that is too old.
    """
    named = {"a": a, "b": b, "c": c, "partial": partial, "out": out}
    given = {name: x for name, x in named.items() if x is not None}
    _check_arrays(given)
    shape = product_shape(a.shape, b.shape, trans_a, trans_b)
    for name in ("c", "partial"):
        if name in given:
            check_addend(name, given[name].shape, shape)
    if out is not None and _check_out(given, shape.result).transposed:
        # Rows of the transpose are what is contiguous: D' = op(B)' op(A)'.
        turned = {name: x.swapaxes(-1, -2) for name, x in given.items() if name not in "ab"}
        gemm(b, a, trans_a=not trans_b, trans_b=not trans_a, alpha=alpha, beta=beta,
             config=config, **turned)  # fmt: skip
        return out
    if isinstance(config, str):
        config = config_named(config)
    import cupy

    with cupy.cuda.Device(a.device.id):
        if out is None:
            out = cupy.empty(shape.result, np.float32)
        if out.size:
            read_c = None if beta == 0 else c  # nor copied
            operands = [(a, trans_a), (b, trans_b), (read_c, None), (partial, None), (out, None)]
            _launch_gemm(operands, shape, alpha, beta, config)
    return out


def transpose(a: Array, *, out: Array = None) -> Array:
    """Swap the last two axes of a CuPy array, in memory.

    Parameters
    ----------
    a : cupy.ndarray, shape (..., m, n)
        Any dtype, any layout.
    out : cupy.ndarray of the same dtype, shape (..., n, m), optional
        Written to and returned; its rows are contiguous and overlap no element of `a`.

    Returns
    -------
    cupy.ndarray, shape (..., n, m)
        On the device of `a`; `out`, or a new C-contiguous array.

    Raises
    ------
    ShapeError, DTypeError, ArrayTypeError
        Fewer than 2 dimensions, or an `out` that cannot be written to.
    """
    given = {"a": a} if out is None else {"a": a, "out": out}
    _check_arrays(given, a.dtype)
    if a.ndim < 2:
        raise ShapeError(f"a has shape {a.shape}: a matrix or a stack of them is needed")
    shape = (*a.shape[:-2], a.shape[-1], a.shape[-2])
    if out is not None and _check_out(given, shape).transposed:
        raise ShapeError("out has contiguous columns: transpose writes contiguous rows")
    import cupy

    with cupy.cuda.Device(a.device.id):
        if out is None:
            out = cupy.empty(shape, a.dtype)
        source = _describe(a)
        if isinstance(source, str) or source.transposed:
            # Rows of the result lie in memory already, or nothing does: a strided copy.
            logger.debug("transpose copies: %s", source)
            cupy.copyto(out, a.swapaxes(-1, -2))
        elif out.size:
            _launch_transpose(a, source, out)
    return out


def _check_arrays(given: dict[str, Array], dtype: Any = np.float32) -> None:
    """Check that all are CuPy arrays of one dtype on one device."""
    for name, x in given.items():
        if type(x).__module__.partition(".")[0] != "cupy" or not hasattr(x, "strides"):
            raise ArrayTypeError(
                f"{name} is a {type(x).__module__}.{type(x).__qualname__}: the kernels take CuPy "
                "arrays; move it with cupy.asarray"
            )
        if x.dtype != dtype:
            raise DTypeError(
                f"{name} has dtype {x.dtype}: the kernel takes {np.dtype(dtype)}; convert it with "
                "astype"
            )
        if x.data.ptr % np.dtype(dtype).alignment:
            raise ArrayTypeError(f"{name} begins at an address that no {x.dtype} has: copy it")
    devices = {name: x.device.id for name, x in given.items()}
    if len(set(devices.values())) > 1:
        raise ArrayTypeError(f"operands lie on several devices ({devices}): move them to one")


def _check_out(given: dict[str, Array], shape: Shape) -> Stack:
    """Check that `out` has the result's shape, can be written to and overlaps nothing."""
    out = given["out"]
    if out.shape != shape:
        raise ShapeError(f"out has shape {out.shape}: the result has {shape}")
    stack = _describe(out)
    if isinstance(stack, str):
        raise ShapeError(f"out cannot be written to: {stack}; pass a contiguous array")
    if out.size and repeats(stack, shape[:-2]):
        raise ShapeError(f"out has strides {out.strides}: some elements may share memory")
    for name, x in given.items():
        other = _describe(x)
        if name == "out" or isinstance(other, str):  # what no kernel can address is copied first
            continue
        if may_overlap(stack, shape[:-2], other, x.shape[:-2], out.itemsize):
            raise ShapeError(f"out and {name} may share memory: pass an out of its own")
    return stack


def _describe(x: Array) -> Stack | str:
    return stack_of(x.data.ptr, x.shape, x.strides, x.itemsize)


def _prepare(x: Array, any_order: bool) -> tuple[Array, Stack]:
    """Return an operand that a kernel can address, a copy if need be, and where it lies."""
    if x is None:
        return None, _ABSENT
    stack = _describe(x)
    if isinstance(stack, Stack) and (any_order or not stack.transposed):
        return x, stack
    import cupy

    logger.debug("operand of shape %s is copied: %s", x.shape, stack)
    x = cupy.ascontiguousarray(x)
    copied = _describe(x)
    if isinstance(copied, str):  # cannot be: a C-contiguous array has contiguous rows
        raise ArrayTypeError(copied)
    return x, copied


def _launch_gemm(
    operands: Sequence[tuple[Array, bool | None]],
    shape: ProductShape,
    alpha: float,
    beta: float,
    config: TileConfig | None,
) -> None:
    # The copies stay referenced until everything that reads them is in the stream.
    prepared = [_prepare(x, any_order=flag is not None) for x, flag in operands]
    stacks = [stack for _, stack in prepared]
    axes = batch_axes(shape.batch, prepared)
    device = operands[0][0].device.id
    if config is None:
        batch = int(np.prod(shape.batch, dtype=np.int64))
        config, _ = choose(Problem(shape.m, shape.n, shape.k, batch), device_of(device))
    flags = {
        name: int(bool(flag) != stack.transposed)
        for name, (_, flag), stack in zip(("TRANS_A", "TRANS_B"), operands, stacks, strict=False)
    }
    kernel = kernel_for(
        device, "sgemm_tiled.cu", "sgemm_tiled", (*config.defines().items(), *flags.items())
    )
    tiles = -(-shape.m // config.block_m) * -(-shape.n // config.block_n)
    head = (shape.m, shape.n, shape.k, alpha, beta)
    launch(kernel, tiles, config.threads, head, stacks, axes, GEMM_SIGNATURE, 4)


def _launch_transpose(a: Array, source: Stack, out: Array) -> None:
    prepared = [(a, source), _prepare(out, any_order=False)]
    stacks = [stack for _, stack in prepared]
    word = a.itemsize & -a.itemsize  # the largest power of two that divides it
    for address in (a.data.ptr, out.data.ptr):
        word = min(word, 8, address & -address)
    config = TransposeConfig(word, a.itemsize // word)
    kernel = kernel_for(a.device.id, "transpose.cu", "transpose", tuple(config.defines().items()))
    rows, cols = a.shape[-2:]
    tiles = -(-rows // TRANSPOSE_TILE) * -(-cols // TRANSPOSE_TILE)
    axes = batch_axes(a.shape[:-2], prepared)
    launch(kernel, tiles, config.threads, (rows, cols), stacks, axes, TRANSPOSE_SIGNATURE,
            a.itemsize)  # fmt: skip
