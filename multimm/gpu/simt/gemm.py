"""Products of CuPy arrays by sgemm_ffma: layouts, configurations, slices of k, launches.

Whatever can be wrong is checked before CUDA is touched. Kernels run on the caller's current
stream of the operands' device, and the results are ready in that stream's order.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from multimm.errors import ArrayTypeError
from multimm.gpu.arch import TileConfig, tiles_of
from multimm.gpu.kernel_selection import FFMA, Choice, note
from multimm.gpu.runtime import launch_cache
from multimm.gpu.runtime.launch import (
    GEMM_SIGNATURE,
    IF_REFUSED,
    LOWER,
    Launches,
    batch_axes,
    device_of,
    kernel_for,
    prepare,
)
from multimm.gpu.runtime.workspace import copied
from multimm.gpu.simt import thin
from multimm.gpu.simt.configs import (
    INSTEAD,
    GemmSizes,
    choose,
    config_named,
    slice_length,
    slices_of_k,
)
from multimm.gpu.simt.load_paths import alike, load_paths, sizes_of
from multimm.gpu.simt.split_k import Operands, can_be_added, in_slices
from multimm.gpu.simt.thin_selection import way_for
from multimm.gpu.strides import (
    ABSENT,
    Axis,
    ProductShape,
    Stack,
    check_addend,
    check_lower,
    product_shape,
)
from multimm.gpu.tuning import autotune
from multimm.gpu.validate import check_arrays, check_out, describe

Array = Any

ASKED_FOR = Choice(FFMA, "ieee", "FP32 multiply-adds were asked for")


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
    tuned: bool = True,
    noted: Choice = ASKED_FOR,
    kept_as: str = FFMA,
    lower: bool = False,
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
        Or the name of one; by default what `multimm tune` found on this GPU, else
        `registry.choose` decides. The bits of the result are the same. Skinny products
        (`skinny_choice`) have kernels of their own, which sum in another order; a named
        configuration always means sgemm_ffma.
    tuned : bool, optional
        False leaves out what was found on this GPU.
    noted : Choice, optional
        For `choice.last_choice`.
    kept_as : str, optional
        What `recall` knows the product by: its kernel or, of a caller who chooses alike for all
        operands of this kind, the precision that was promised. Then `noted` is noted again
        whenever that is asked for.
    lower : bool, optional
        D is square, and what is above its diagonal is not asked for: it is computed or not, and
        else whatever memory holds. About half of the operations are left out. (BLAS calls this
        gemmt.)

    Returns
    -------
    cupy.ndarray of float32, shape (..., m, n)
        On the device of `a`; `out`, or a new C-contiguous array.

    Raises
    ------
    ShapeError, DTypeError, ArrayTypeError
        Operands that do not fit together, or an `out` that cannot be written to.
    KernelError
        An unknown configuration, a GPU that is too old, or an operand that would be copied while
        the stream is captured.
    """
    known = kind_of(kept_as, a, b, c, partial, out, trans_a, trans_b, alpha, beta, tuned, lower)
    if config is None and (done := launch_cache.again(*known)) is not None:
        note(noted)
        return done
    named = {"a": a, "b": b, "c": c, "partial": partial, "out": out}
    given = {name: x for name, x in named.items() if x is not None}
    check_arrays(given, np.float32)
    shape = product_shape(a.shape, b.shape, trans_a, trans_b)
    check_lower(lower, shape.m, shape.n)
    for name in ("c", "partial"):
        if name in given:
            check_addend(name, given[name].shape, shape)
    if out is not None and check_out(given, shape.result).transposed:
        # Rows of the transpose are what is contiguous: D' = op(B)' op(A)'.
        turned = {name: x.swapaxes(-1, -2) for name, x in given.items() if name not in "ab"}
        gemm(b, a, trans_a=not trans_b, trans_b=not trans_a, alpha=alpha, beta=beta,
             config=config, tuned=tuned, noted=noted, **turned)  # fmt: skip
        return out
    note(noted)
    if isinstance(config, str):
        config = config_named(config)
    import cupy

    with cupy.cuda.Device(a.device.id):
        if out is None:
            out = cupy.empty(shape.result, np.float32)
        if out.size:
            read_c = None if beta == 0 else c  # nor copied
            operands = [(a, trans_a), (b, trans_b), (read_c, None), (partial, None), (out, None)]
            run = _launch_gemm(operands, shape, alpha, beta, config, tuned, lower)
            # An operand that is not read has no place in what was decided.
            if config is None and run is not None and read_c is c:
                launch_cache.keep(*known, result=out,
                            run=run if kept_as == FFMA else _noting(run, noted))  # fmt: skip
    return out


def _noting(run: launch_cache.Run, choice: Choice) -> launch_cache.Run:
    def run_and_note(pointers: Sequence[int]) -> None:
        run(pointers)
        note(choice)

    return run_and_note


def kind_of(
    verb: str, a: Any, b: Any, c: Any, partial: Any, out: Any, trans_a: bool, trans_b: bool,
    alpha: float, beta: float, tuned: bool, lower: bool,
) -> tuple[Any, ...]:  # fmt: skip
    """Return by what `recall` knows a product: for a plain one, what `recall.product` asks for."""
    known = (verb, (a, b, c, partial), out, trans_a, trans_b)
    plain = alpha == 1 and tuned and not lower and c is partial is out is None
    return known if plain else (*known, alpha, beta, tuned, lower, lower and a is b)


def addressable(x: Array, any_order: bool) -> tuple[Array, Stack]:
    """Return an operand that a kernel can address, a copy if need be, and where it lies.

    Parameters
    ----------
    x : cupy.ndarray or None
    any_order : bool
        Whether columns may be what is contiguous.
    """
    if x is None:
        return None, ABSENT
    stack = describe(x)
    if isinstance(stack, Stack) and (any_order or not stack.transposed):
        return x, stack
    x = copied(x)
    stack = describe(x)
    if isinstance(stack, str):  # cannot be: a C-contiguous array has contiguous rows
        raise ArrayTypeError(stack)
    return x, stack


def _launch_gemm(
    operands: Sequence[tuple[Array, bool | None]],
    shape: ProductShape,
    alpha: float,
    beta: float,
    config: TileConfig | None,
    tuned: bool,
    lower: bool,
) -> launch_cache.Run | None:
    """Launch; return what can be launched again for other operands of the same kind."""
    # The copies stay referenced until everything that reads them is in the stream.
    found = [addressable(x, any_order=flag is not None) for x, flag in operands]
    flags = operands[0][1], operands[1][1]
    sides = bool(flags[0]), bool(flags[1])
    run = prepared(found, sides, shape, alpha, beta, config, tuned, lower=lower)
    run([stack.pointer for _, stack in found])
    copies = any(x is not given for (x, _), (given, _) in zip(found, operands, strict=True))
    return None if copies else run


def prepared(
    operands: Operands,
    trans: tuple[bool, bool],
    shape: ProductShape,
    alpha: float,
    beta: float,
    config: TileConfig | None,
    tuned: bool,
    if_refused: bool = False,
    lower: bool = False,
) -> launch_cache.Run:
    """Return what computes products of operands like these.

    Parameters
    ----------
    operands : sequence of (cupy.ndarray of float32 or None, Stack)
        A, B, C, P and D, as `addressable` returns them. Not empty.
    trans : (bool, bool)
        Whether A and B are used transposed.
    shape, alpha, beta, config, tuned, lower
        As for `gemm`.
    if_refused : bool, optional
        Whether the product is needed only if packing refuses an operand. Then it runs on
        sgemm_ffma, and what is returned takes the address of what packing has counted as well.

    Returns
    -------
    callable
        Takes the addresses of the operands, and launches on the current stream.
    """
    guard = IF_REFUSED if if_refused else ()
    stacks = [stack for _, stack in operands]
    axes = batch_axes(shape.batch, operands)
    ident = operands[0][0].device.id
    device = device_of(ident)
    loads = load_paths(trans, stacks, axes)
    sizes = sizes_of(shape, loads, lower)
    sides = loads["TRANS_A"] == 1, loads["TRANS_B"] == 1
    if config is None and not if_refused and (way := way_for(sizes, device)) is not None:
        return thin.prepared(way, ident, operands, axes, shape, alpha, beta, sides)
    if if_refused:
        config, _ = choose(sizes, device, INSTEAD)
        loads = alike(loads)  # the fewest kernels
    elif config is None:
        config = _chosen(sizes, ident, sides, tuned)
    defines = (*config.defines().items(), *loads.items(), *guard, *LOWER * lower)
    kernel = kernel_for(
        ident, "sgemm_ffma.cu", "sgemm_ffma", defines, shared_bytes=config.shared_bytes
    )
    tiles = tiles_of(shape.m, shape.n, config.block_m, config.block_n, lower)
    launches = functools.partial(_launches, kernel, tiles, config, if_refused)
    slices = slices_of_k(sizes, device)
    if if_refused and 2 * tiles > device.multiprocessors:
        slices = 1  # seldom needed: not worth the launch of a sum
    if slices > 1 and alpha != 0 and can_be_added(shape, operands[2:]):
        length = slice_length(shape.k, slices)
        return in_slices(launches, ident, operands, shape, slices, length, alpha, beta, sides,
                         guard)  # fmt: skip
    return launches((shape.m, shape.n, shape.k, 0, alpha, beta), stacks, axes)


def _chosen(sizes: GemmSizes, ident: int, sides: tuple[bool, bool], tuned: bool) -> TileConfig:
    """The configuration that was fastest on this GPU, if one is known, or should be."""
    config = autotune.lookup(ident, sizes, *sides) if tuned else None
    return choose(sizes, device_of(ident))[0] if config is None else config


def _launches(
    kernel: Any, tiles: int, config: TileConfig, guarded: bool, head: tuple[float, ...],
    stacks: Sequence[Stack], axes: Sequence[Axis],
) -> Launches:  # fmt: skip
    return prepare(kernel, tiles, config.threads, head, stacks, axes, GEMM_SIGNATURE, 4,
                   config.shared_bytes, guarded)  # fmt: skip
