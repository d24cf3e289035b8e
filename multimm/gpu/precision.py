"""Products of CuPy arrays and packed operands at a promised precision.

The tensor cores carry most float32 data; what they do not carry is found out while packing. So
both are launched one after the other, and only then the host looks at what packing counted: a few
elements are added on their own, and where there are many the product is computed again with FP32
multiply-adds.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from multimm.gpu import launch, split
from multimm.gpu.choice import FFMA, SPLIT, Choice, choose_kernel, note
from multimm.gpu.compiled import device_of
from multimm.gpu.layout import ProductShape, check_addend, product_shape
from multimm.gpu.operands import check_arrays, check_out, is_broadcast
from multimm.gpu.packing import PackedBlock, check_pair, pack, start_pack
from multimm.gpu.registry import Problem
from multimm.gpu.residuals import add_residuals
from multimm.gpu.split_config import CAPABILITY

Array = Any
Operand = Any  #: a cupy.ndarray or a PackedBlock


def gemm(
    a: Operand,
    b: Operand,
    *,
    precision: str = "float32",
    trans_a: bool = False,
    trans_b: bool = False,
    alpha: float = 1.0,
    beta: float = 0.0,
    c: Array = None,
    partial: Array = None,
    out: Array = None,
    tuned: bool = True,
) -> Array:
    """D = alpha * (op(A) @ op(B) + P) + beta * C.

    Parameters
    ----------
    a, b : cupy.ndarray of float32, or PackedBlock
        As for `launch.gemm`. A packed operand is op(A) or op(B) already, and decides the
        precision by the scheme that it was packed for.
    precision : {"float32", "ieee", "tf32"}
        ``"float32"``: no element less accurate than an FP32 dot product's bound.
        ``"ieee"``: FP32 fused multiply-adds. ``"tf32"``: one product of 11-bit significands.
    trans_a, trans_b, alpha, beta, c, partial, out, tuned
        As for `launch.gemm`.

    Returns
    -------
    cupy.ndarray of float32, shape (..., m, n)
        On the device of `a`; `out`, or a new C-contiguous array. `choice.last_choice` says which
        kernel computed it.

    Raises
    ------
    ShapeError, DTypeError, ArrayTypeError, OptionError
        Operands that do not fit together, or an `out` that cannot be written to.
    KernelError
        A GPU that is too old.
    """
    scalars = {"alpha": alpha, "beta": beta, "c": c, "partial": partial}
    if isinstance(a, PackedBlock) or isinstance(b, PackedBlock):
        return _packed(a, b, trans_a, trans_b, scalars, out, tuned)
    check_arrays({"a": a, "b": b}, np.float32)
    shape, device = product_shape(a.shape, b.shape, trans_a, trans_b), device_of(a.device.id)
    stack = math.prod(shape.batch) if a.ndim == b.ndim == 2 else 2  # also of one matrix
    problem = Problem(shape.m, shape.n, shape.k, stack)
    choice = choose_kernel(problem, precision, device)
    if choice.kernel == SPLIT and (alpha == 0 or _capturing(a.device.id)):
        reason = "alpha is 0" if alpha == 0 else "the data of a captured graph is not known yet"
        choice = Choice(FFMA, precision, reason)
    if choice.kernel == SPLIT:
        return _split(a, b, trans_a, trans_b, shape, choice, scalars, out, tuned)
    note(choice)
    # What no precision would run otherwise, `matmul` may repeat without asking for one.
    always = choose_kernel(problem, "float32", device).kernel == FFMA
    return launch.gemm(
        a, b, trans_a=trans_a, trans_b=trans_b, out=out, tuned=tuned,
        kept_as="gemm" if always else "ieee", **scalars,
    )  # fmt: skip


def packed(x: Array, *, side: str, trans: bool, scheme: str) -> Operand:
    """Return an operand packed, or as it is where the GPU has no tensor cores for it.

    Parameters
    ----------
    x : cupy.ndarray of float32, shape (rows, k) or (k, rows)
    side, trans, scheme
        As for `pack`.
    """
    if device_of(x.device.id).limits.capability != CAPABILITY:
        return x
    return pack(_dense(x), side=side, trans=trans, scheme=scheme)


def _capturing(device: int) -> bool:
    import cupy

    with cupy.cuda.Device(device):
        stream = cupy.cuda.get_current_stream()
        return bool(cupy.cuda.runtime.streamIsCapturing(stream.ptr))


def _split(
    a: Array, b: Array, trans_a: bool, trans_b: bool, shape: ProductShape, choice: Choice,
    scalars: dict[str, Any], out: Array, tuned: bool,
) -> Array:  # fmt: skip
    """Pack both operands and multiply; FP32 multiply-adds where packing does not carry them."""
    import cupy

    others = {"c": scalars["c"], "partial": scalars["partial"], "out": out}
    if others := {name: x for name, x in others.items() if x is not None}:
        check_arrays({"a": a, "b": b, **others}, np.float32)
        for name in others.keys() - {"out"}:
            check_addend(name, others[name].shape, shape)
    if out is not None:
        check_out({"a": a, "b": b, **others}, shape.result)
    operands = [(_dense(a), "a", trans_a), (_dense(b), "b", trans_b)]
    with cupy.cuda.Device(a.device.id):
        try:
            started = start_pack(operands, scheme=choice.precision, keep_raw=False)
        except cupy.cuda.memory.OutOfMemoryError:
            reason = "no memory is left to pack the operands in"
            note(Choice(FFMA, choice.precision, reason))
            return launch.gemm(
                a, b, trans_a=trans_a, trans_b=trans_b, out=out, tuned=tuned, **scalars
            )
        result = split.multiply(*started.operands, out=out, **scalars)
        if started.clean():
            note(choice)
            return result
        blocks = started.finish()
        flagged = [block for block in blocks if block.raw is not None]
        if flagged:
            note(Choice(FFMA, choice.precision, _why_raw(flagged[0])))
            return launch.gemm(
                a, b, trans_a=trans_a, trans_b=trans_b, out=result, tuned=tuned, **scalars
            )
        note(choice)
        add_residuals(result, *blocks, alpha=scalars["alpha"])
    return result


def _dense(x: Array) -> Array:
    """An operand without rows or columns that are repeated by a stride of 0."""
    if is_broadcast(x):
        import cupy

        with cupy.cuda.Device(x.device.id):
            return cupy.ascontiguousarray(x)
    return x


def _packed(
    a: Operand, b: Operand, trans_a: bool, trans_b: bool, scalars: dict[str, Any], out: Array,
    tuned: bool,
) -> Array:  # fmt: skip
    """At least one operand is packed: pack the other, or multiply both as they were."""
    scheme = a.scheme if isinstance(a, PackedBlock) else b.scheme
    if not isinstance(a, PackedBlock):
        a = pack(_dense(a), side="a", trans=trans_a, scheme=scheme)
    if not isinstance(b, PackedBlock):
        b = pack(_dense(b), side="b", trans=trans_b, scheme=scheme)
    check_pair(a, b)
    device = device_of(a.device_id)
    flagged = [block for block in (a, b) if block.raw is not None]
    choice = choose_kernel(Problem(a.rows, b.rows, a.k), scheme, device)
    if flagged:
        choice = Choice(FFMA, scheme, _why_raw(flagged[0]))
    elif device.limits.capability == CAPABILITY and 0 not in (a.rows, b.rows, a.k):
        choice = Choice(SPLIT, scheme, "the operands are packed")
    note(choice)
    if choice.kernel == FFMA:
        return launch.gemm(a.unpack(), b.unpack(), out=out, tuned=tuned, **scalars)
    result = split.multiply(a, b, out=out, **scalars)
    add_residuals(result, a, b, alpha=scalars["alpha"])
    return result


def _why_raw(block: PackedBlock) -> str:
    if block.nonfinite:
        return f"operand {block.side} has {block.nonfinite} elements that are not finite"
    return f"operand {block.side} has {block.uncarried} elements that FP16 parts do not carry"
