"""`multimm.gpu.gemm`: checks, choice of a kernel, configuration, launch, one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from multimm.gpu.emulated import gemm as emulated_gemm
from multimm.gpu.emulated import multiply
from multimm.gpu.emulated.configs import PRODUCTS, SplitConfig, broad_pays, pays, stretch_of
from multimm.gpu.emulated.outliers import add_residuals
from multimm.gpu.emulated.pack import pack
from multimm.gpu.emulated.packed import PackedBlock, check_pair
from multimm.gpu.kernel_selection import (
    SINGLE,
    SPLIT,
    Choice,
    Precision,
    check_precision,
    choose_kernel,
    choose_packed,
    note,
)
from multimm.gpu.problem import Problem, check_beta, check_product
from multimm.gpu.runtime import launch_cache
from multimm.gpu.runtime.launch import device_of
from multimm.gpu.runtime.launch_cache import Run
from multimm.gpu.runtime.workspace import not_captured, nothing, workspace
from multimm.gpu.simt import gemm as simt_gemm
from multimm.gpu.simt.configs import TileConfig
from multimm.gpu.strides import GemmSizes
from multimm.gpu.subproducts import along_k, of_a_stack

Array = Any
Operand = Any  #: a cupy.ndarray or a PackedBlock


def gemm(
    a: Operand,
    b: Operand,
    *,
    precision: Precision = "float32",
    trans_a: bool = False,
    trans_b: bool = False,
    alpha: float = 1.0,
    beta: float = 0.0,
    c: Array = None,
    partial: Array = None,
    out: Array = None,
    config: TileConfig | SplitConfig | str | None = None,
    lower: bool = False,
) -> Array:
    """D = alpha * (op(A) @ op(B) + P) + beta * C.

    Whatever can be wrong is checked before CUDA is touched. Kernels run on the caller's current
    stream of the operands' device, and the results are ready in that stream's order.

    Parameters
    ----------
    a : cupy.ndarray of float32, shape (..., m, k), or (..., k, m) if `trans_a`; or PackedBlock
    b : cupy.ndarray of float32, shape (..., k, n), or (..., n, k) if `trans_b`; or PackedBlock
        C order, F order and slices of either are read as they are, other layouts are copied
        first. Stacks broadcast as in ``np.matmul``. A packed operand is op(A) or op(B) already, and
        decides the precision by the scheme that it was packed for.
    precision : {"float32", "ieee", "tf32"}
        ``"float32"``: no element less accurate than an FP32 dot product's bound.
        ``"ieee"``: FP32 fused multiply-adds. ``"tf32"``: one product of 11-bit significands.
    alpha, beta : float
        beta == 0 never reads C, alpha == 0 never reads A, B or P.
    c, partial : cupy.ndarray of float32, shape (..., m, n), optional
        Copied first unless their rows are contiguous. Their stacks may be broadcast.
    out : cupy.ndarray of float32, shape (..., m, n), optional
        Written to and returned: rows or columns contiguous, overlapping no operand.
    config : TileConfig, SplitConfig or str, optional
        Or the name of one. One of arrays means sgemm_ffma, whatever the precision; its bits are
        those of any other, but of skinny products, which have kernels of their own. The bits of a
        product of packed operands do not depend on it.
    lower : bool, optional
        D is square, and what is above its diagonal is not asked for: it is computed or not, and
        else whatever memory holds. About half of the operations are left out, and of one array and
        its transpose, given as `a` and as `b`, half of the packing. (BLAS calls this gemmt.)

    Returns
    -------
    cupy.ndarray of float32, shape (..., m, n)
        On the device of `a`; `out`, or a new C-contiguous array. `last_choice` says which kernel
        computed it.

    Raises
    ------
    ShapeError, DTypeError, ArrayTypeError, OptionError
        Operands that do not fit together, or an `out` that cannot be written to.
    KernelError
        An unknown configuration, a GPU that is too old, or an operand that would be copied while
        the stream is captured.
    """
    check_precision(precision, SINGLE)
    if isinstance(a, PackedBlock) or isinstance(b, PackedBlock):
        check_beta(beta, c)  # before anything is packed
        epilogue = {"alpha": alpha, "beta": beta, "c": c, "partial": partial, "out": out,
                    "lower": lower, "config": config}  # fmt: skip
        return _of_packed(a, b, trans_a, trans_b, epilogue)
    known = launch_cache.product_kind(
        precision, a, b, c, partial, out, trans_a, trans_b, alpha, beta, lower
    )
    if config is None and (done := launch_cache.again(*known)) is not None:
        return done
    problem = check_product(a, b, c, partial, out, (trans_a, trans_b), alpha, beta, lower)
    problem = problem._replace(config=config)
    choice = choose_kernel(
        problem.sizes, "ieee" if config is not None else precision, device_of(problem.device),
        alpha == 0,
    )  # fmt: skip
    import cupy

    with cupy.cuda.Device(problem.device):
        if choice.kernel == SPLIT and problem.shape.batch:
            made = _one_by_one(problem, precision)
        elif choice.kernel == SPLIT and stretch_of(*problem.shape[1:]) < problem.shape.k:
            made = _in_stretches(problem, precision)
        else:
            made = _at_once(problem, choice, known)
    return made if out is None else out


def _at_once(
    problem: Problem, choice: Choice, known: tuple[Any, ...], packed: Sequence[Array] = ()
) -> Array:
    """D of the chosen kernel; what was decided is kept for the next product of the kind.

    Parameters
    ----------
    problem, choice
    known : tuple
        The arguments of `launch_cache.keep`.
    packed : sequence of cupy.ndarray, optional
        Tiles and exponents of A, and of B, where these are packed already.
    """
    problem = problem.with_result()
    *_, result = problem.arrays
    if not result.size:
        note(choice)
        return result
    found = problem.addressable(dense=choice.kernel == SPLIT and not packed)
    run = _prepared(found, choice, bool(packed))
    if found.turned:
        run = _turned(run, len(packed) or 2)
    # The copies stay referenced until everything that reads them is in the stream.
    *read, c, p, d = found.pointers
    read = [x.data.ptr for x in packed] or read[:: -1 if found.turned else 1]
    run([*read, c, p, d])
    if problem.config is None and found.stands_for(problem):
        launch_cache.keep(*known, result=result, run=run)
    return result


def _prepared(problem: Problem, choice: Choice, packed: bool) -> Run:
    """What launches the chosen kernel and notes that it did."""
    if choice.kernel == SPLIT and not packed:
        return emulated_gemm.prepared(problem, choice)
    if packed:
        launches = multiply.prepared(problem, PRODUCTS[choice.precision])
    else:
        launches = simt_gemm.prepared(problem)

    def run(pointers: Sequence[int]) -> None:
        launches((*pointers, 0) if packed else pointers)
        note(choice)

    return run


def _turned(run: Run, count: int) -> Run:
    """The same for the addresses of the caller's A and B, so many, and of C, P and D."""
    half = count // 2
    return lambda x: run((*x[half:count], *x[:half], *x[count:]))


def _one_by_one(problem: Problem, precision: Precision) -> Array:
    """The products of a stack, one after the other: each has the whole GPU to do."""
    import cupy

    *read, out = problem.arrays
    out = cupy.empty(problem.shape.result, np.float32) if out is None else out
    for at, (a, b, c, partial) in of_a_stack(problem.shape.batch, *read):
        gemm(a, b, c=c, partial=partial, out=out[at], precision=precision, **problem.options)
    return out


def _in_stretches(problem: Problem, precision: Precision) -> Array:
    """The sum of the products of one stretch of k after another; the last one adds C."""
    a, b, c, sums, out = problem.arrays
    shape, options, release = problem.shape, problem.options, nothing
    parts = [*along_k(a, b, problem.trans, stretch_of(*shape[1:]))]
    for x, y in parts[:-1]:
        room, release_next = workspace(shape.result, problem.device)
        first = options | {"alpha": 1.0, "beta": 0.0, "out": room}
        sums = gemm(x, y, partial=sums, precision=precision, **first)
        release()
        release = release_next
    x, y = parts[-1]
    made = gemm(x, y, partial=sums, c=c, out=out, precision=precision, **options)
    release()
    return made


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
    return pack(x, side=side, trans=trans, scheme=scheme)


def _of_packed(
    a: Operand, b: Operand, trans_a: bool, trans_b: bool, epilogue: dict[str, Any]
) -> Array:
    """At least one operand is packed: pack the other, or multiply both as they were."""
    scheme = a.scheme if isinstance(a, PackedBlock) else b.scheme
    if not isinstance(a, PackedBlock):
        a = pack(a, side="a", trans=trans_a, scheme=scheme)
    if not isinstance(b, PackedBlock):
        b = pack(b, side="b", trans=trans_b, scheme=scheme)
    check_pair(a, b)
    sizes, refused = GemmSizes(a.rows, b.rows, a.k), a.refused or b.refused
    device = device_of(a.device_id)
    choice = choose_packed(sizes, scheme, refused, device)
    if choice.kernel == SPLIT:
        return _of_tiles(a, b, choice, **epilogue)
    if a.raw is None or b.raw is None:
        not_captured("a packed operand is unpacked first", "multiply the arrays")
    finite = refused is not None and not (a.nonfinite or b.nonfinite)
    broad = finite and broad_pays(a.rows, b.rows, a.k, scheme, device)
    precision: Any = scheme if broad else "ieee"
    # A configuration of tensor cores is none of what multiplies instead.
    result = gemm(a.unpack(), b.unpack(), precision=precision, **epilogue | {"config": None})
    if not broad:  # which depends on the data
        note(choice)
    return result


def _of_tiles(
    a: PackedBlock, b: PackedBlock, choice: Choice, *, c: Array, partial: Array, out: Array,
    alpha: float, beta: float, lower: bool, config: object,
) -> Array:  # fmt: skip
    """The product of what the tiles carry, and of what they do not."""
    tiles = (a.tiles, a.exponents, b.tiles, b.exponents)
    known = ("packed", (*tiles, c, partial), out, a.rows, b.rows, a.k, alpha, beta, lower)
    if config is not None or (made := launch_cache.again(*known)) is None:
        problem = check_product(a, b, c, partial, out, (False, False), alpha, beta, lower)
        problem = problem._replace(config=config)
        import cupy

        with cupy.cuda.Device(problem.device):
            made = _at_once(problem, choice, known, tiles)
    made = made if out is None else out
    add_residuals(made, a, b, alpha=alpha)
    return made
