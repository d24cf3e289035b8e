"""Products of CuPy arrays and packed operands at a promised precision."""

from __future__ import annotations

from typing import Any

import numpy as np

from multimm.gpu.emulated import gemm as emulated_gemm
from multimm.gpu.emulated import multiply
from multimm.gpu.emulated.configs import stretch_of
from multimm.gpu.emulated.gemm import why_refused
from multimm.gpu.emulated.outliers import add_residuals
from multimm.gpu.emulated.pack import pack
from multimm.gpu.emulated.packed import PackedBlock, check_pair
from multimm.gpu.emulated.selection import PRODUCTS, entries_for, pays
from multimm.gpu.kernel_selection import (
    FFMA,
    SPLIT,
    SPLIT_K,
    Choice,
    check_precision,
    choose_kernel,
    note,
    one_by_one,
)
from multimm.gpu.runtime import launch_cache
from multimm.gpu.runtime.launch import device_of
from multimm.gpu.runtime.workspace import copied, not_captured, workspace
from multimm.gpu.simt import gemm as simt_gemm
from multimm.gpu.simt.configs import GemmSizes
from multimm.gpu.strides import ProductShape, check_addend, check_lower, product_shape
from multimm.gpu.validate import check_arrays, check_beta, check_out, is_broadcast

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
    lower: bool = False,
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
    trans_a, trans_b, alpha, beta, c, partial, out, tuned, lower
        As for `launch.gemm`. Of ``lower`` products of one array and its transpose, given as `a` and
        as `b`, half of the packing is left out, too.

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
        A GPU that is too old, or an operand that would be copied while the stream is captured.
    """
    epilogue = {"alpha": alpha, "beta": beta, "c": c, "partial": partial}
    if isinstance(a, PackedBlock) or isinstance(b, PackedBlock):
        check_precision(precision)
        check_beta(beta, c)
        return _packed(a, b, trans_a, trans_b, epilogue, out, tuned, lower)
    known = simt_gemm.kind_of(
        precision, a, b, c, partial, out, trans_a, trans_b, alpha, beta, tuned, lower
    )
    if (done := launch_cache.again(*known)) is not None:
        return done
    check_precision(precision)
    check_beta(beta, c)
    check_arrays({"a": a, "b": b}, np.float32)
    shape, device = product_shape(a.shape, b.shape, trans_a, trans_b), device_of(a.device.id)
    check_lower(lower, shape.m, shape.n)
    stacked = a.ndim > 2 or b.ndim > 2  # also of one matrix; of how many, no choice depends on
    sizes = GemmSizes(shape.m, shape.n, shape.k, batch=2 if stacked else 1)
    if stacked and one_by_one(sizes, precision, device):
        options = {
            "precision": precision, "trans_a": trans_a, "trans_b": trans_b, "tuned": tuned,
            "lower": lower,
        }  # fmt: skip
        return _of_each(a, b, shape, epilogue | {"out": out}, options)
    choice = choose_kernel(sizes, precision, device)
    if choice.kernel == SPLIT and alpha == 0:
        choice = Choice(FFMA, precision, "alpha is 0")
    if choice.kernel == SPLIT:
        return _split(a, b, trans_a, trans_b, shape, choice, epilogue, out, tuned, lower, known)
    return simt_gemm.gemm(
        a, b, trans_a=trans_a, trans_b=trans_b, out=out, tuned=tuned, noted=choice,
        kept_as=precision, lower=lower, **epilogue,
    )  # fmt: skip


def _of_each(
    a: Array, b: Array, shape: ProductShape, arrays: dict[str, Any], options: dict[str, Any]
) -> Array:
    """The products of a stack, one after the other: each has the whole GPU to do."""
    import cupy

    scalars = {name: arrays.pop(name) for name in ("alpha", "beta")}
    with cupy.cuda.Device(a.device.id):
        named = {"a": a, "b": b} | arrays
        there = {name: x for name, x in named.items() if x is not None}
        check_arrays(there, np.float32)
        for name in there.keys() & {"c", "partial"}:
            check_addend(name, there[name].shape, shape)
        if arrays["out"] is None:
            there["out"] = cupy.empty(shape.result, np.float32)
        else:
            check_out(there, shape.result)
        stacks = {
            name: cupy.broadcast_to(x, (*shape.batch, *x.shape[-2:])) for name, x in there.items()
        }
        for at in np.ndindex(shape.batch):
            matrices = {name: x[at] for name, x in stacks.items()}
            matrices["out"] = there["out"][at]  # what is broadcast is read-only
            gemm(**matrices, **scalars, **options)
    return there["out"]


def packed(x: Array, *, side: str, trans: bool, scheme: str) -> Operand:
    """Return an operand packed, or as it is where the GPU has no tensor cores for it.

    Parameters
    ----------
    x : cupy.ndarray of float32, shape (rows, k) or (k, rows)
    side, trans, scheme
        As for `pack`.
    """
    if not pays(PRODUCTS[scheme], device_of(x.device.id)):
        return x
    return pack(_dense(x), side=side, trans=trans, scheme=scheme)


def _split(
    a: Array, b: Array, trans_a: bool, trans_b: bool, shape: ProductShape, choice: Choice,
    epilogue: dict[str, Any], out: Array, tuned: bool, lower: bool, known: tuple[Any, ...] | None,
) -> Array:  # fmt: skip
    """A product on the tensor cores, unless the data turn out to be nothing for them."""
    import cupy

    alpha, beta, c, partial = (epilogue[name] for name in ("alpha", "beta", "c", "partial"))
    with cupy.cuda.Device(a.device.id):
        named = {"a": a, "b": b, "c": c, "partial": partial, "out": out}
        there = {name: x for name, x in named.items() if x is not None}
        check_arrays(there, np.float32)
        for name in there.keys() & {"c", "partial"}:
            check_addend(name, there[name].shape, shape)
        if out is not None and check_out(there, shape.result).transposed:
            # Rows of the transpose are what is contiguous: D' = op(B)' op(A)'.
            turned = {name: x if x is None else x.swapaxes(-1, -2) for name, x in
                      (("c", c), ("partial", partial))}  # fmt: skip
            _split(b, a, not trans_b, not trans_a, ProductShape((), shape.n, shape.m, shape.k),
                   choice, epilogue | turned, out.swapaxes(-1, -2), tuned, False, None)  # fmt: skip
            return out
        if stretch_of(shape.m, shape.n, shape.k) < shape.k:
            options = {"precision": choice.precision, "tuned": tuned, "lower": lower}
            return _in_stretches(a, b, (trans_a, trans_b), shape, epilogue | {"out": out}, options)
        result = cupy.empty(shape.result, np.float32) if out is None else out
        gram = lower and a is b and trans_a != trans_b
        dense = _dense(a)
        operands = (dense, dense if gram else _dense(b), None if beta == 0 else c, partial, result)
        # The copies stay referenced until everything that reads them is in the stream.
        found = [simt_gemm.addressable(x, any_order=i < 2) for i, x in enumerate(operands)]
        run = emulated_gemm.prepared(
            found, (trans_a, trans_b), shape, alpha, beta, choice, tuned, lower, gram
        )
        run([stack.pointer for _, stack in found])
        given = (a, b, c, partial, result)
        if known and all(x is y for (x, _), y in zip(found, given, strict=True)):
            launch_cache.keep(*known, result=result, run=run)
    return result


def _in_stretches(
    a: Array, b: Array, trans: tuple[bool, bool], shape: ProductShape, last: dict[str, Any],
    options: dict[str, Any],
) -> Array:  # fmt: skip
    """The sum of the products of one stretch of k after another; `last` is what the last one adds.

    An array and its transpose stay one array, so that each stretch is packed once.
    """
    gram, step = a is b and trans[0] != trans[1], stretch_of(shape.m, shape.n, shape.k)
    options |= {"trans_a": trans[0], "trans_b": trans[1]}
    sums, release = last.pop("partial"), None
    for start in range(0, shape.k, step):
        k = slice(start, start + step)
        x = a[k] if trans[0] else a[:, k]
        y = x if gram else b[:, k] if trans[1] else b[k]
        more, release_next = last, None
        if start + step < shape.k:
            room, release_next = workspace(shape.result, a.device.id)
            more = {"out": room}
        sums = gemm(x, y, partial=sums, **options, **more)
        if release is not None:
            release()
        release = release_next
    return sums


def _dense(x: Array) -> Array:
    """An operand without rows or columns that are repeated by a stride of 0."""
    return copied(x) if is_broadcast(x) else x


def _packed(
    a: Operand, b: Operand, trans_a: bool, trans_b: bool, epilogue: dict[str, Any], out: Array,
    tuned: bool, lower: bool,
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
    choice = choose_kernel(GemmSizes(a.rows, b.rows, a.k), scheme, device)
    if flagged:
        why = why_refused(flagged[0].side, flagged[0].nonfinite, flagged[0].uncarried)
        choice = Choice(FFMA, scheme, why or f"k = {a.k} is shorter than {SPLIT_K}")
    elif entries_for(device.limits) and 0 not in (a.rows, b.rows, a.k):
        choice = Choice(SPLIT, scheme, "the operands are packed")
    if choice.kernel == FFMA and any(block.raw is None for block in (a, b)):
        not_captured("a packed operand is unpacked first", "multiply the arrays")
    if choice.kernel == FFMA:  # what packing has found is no kind: kept as no promise
        return simt_gemm.gemm(a.unpack(), b.unpack(), out=out, tuned=tuned, noted=choice,
                              lower=lower,
                           **epilogue)  # fmt: skip
    note(choice)
    result = multiply.multiply(a, b, out=out, lower=lower, **epilogue)
    add_residuals(result, a, b, alpha=epilogue["alpha"])
    return result
