"""Products of narrow integers on the tensor cores, exact: how their kernels are launched.

    integer_pack   each operand as FP16 numbers, from the bytes that it has
    sgemm_split    one product of these, with INTEGER: what the tensor cores sum goes to int32
                   before it can leave the integers that float32 holds

On Hopper GPUs those of 8 bits stay bytes (`int8_cores`).

Sums are exact modulo 2^32. Where they are asked for in more, k is cut into stretches whose sums
int32 holds, and these are added.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from multimm.gpu.arch import LOWER, ArchLimits
from multimm.gpu.emulated.configs import (
    SLAB,
    WGMMA,
    SplitConfig,
    entries_for,
    split_slices,
    stretch_of,
    tiles_for,
)
from multimm.gpu.emulated.pack import source_of
from multimm.gpu.integers import int8_cores
from multimm.gpu.integers.bounds import FP16, HELD, is_narrow, terms
from multimm.gpu.integers.float_blas import most
from multimm.gpu.kernel_selection import ALONE, SPLIT, Choice, note
from multimm.gpu.runtime.launch import device_of, kernel_for
from multimm.gpu.runtime.workspace import Take, workspaces
from multimm.gpu.subproducts import along_k, of_a_stack

Array = Any
DType = np.dtype[Any]

#: Wide tiles, and what D of few tiles is made of: a thread has registers for its sums, and for as
#: many integers. Not compared with others on a GPU.
WGMMA_CONFIGS = (SplitConfig(1, 192, 5, 12, True), SplitConfig(1, 64, 9, 12, True))
MMA_CONFIGS = (SplitConfig(1, 128, 6, 8, False), SplitConfig(1, 64, 6, 8, False))
INTEGER = (("INTEGER", 1),)
#: What int32 holds.
_MOST = 2**31 - 1
_PACK_THREADS, _FOUR = 256, 4  # of integer_pack.cu: threads of a block, elements of a wide load
_INT32, _FLOAT32 = np.dtype("int32"), np.dtype("float32")


class Plan(NamedTuple):
    """How k is cut for numbers that are no larger than these."""

    promote: int  #: slabs that the tensor cores sum; 0: products of bytes
    length: int  #: of a stretch whose sums int32 holds


def plan_for(most_a: int, most_b: int) -> Plan | None:
    """How k is cut for factors of so large absolute values; None if FP16 does not carry them, or a
    slab of their products can leave what float32 holds.

    >>> plan_for(128, 128), plan_for(255, 255).promote, plan_for(2048, 128).promote
    (Plan(promote=16, length=131008), 4, 1)
    >>> plan_for(2048, 2048) is plan_for(1, 2049) is None
    True
    """
    promote = terms(most_a, most_b, HELD["float32"]) // SLAB
    if max(most_a, most_b) > FP16 or not promote:
        return None
    return Plan(min(promote, _MOST), terms(most_a, most_b, _MOST) // SLAB * SLAB)


def able(a: Array, b: Array) -> bool:
    """Whether CuPy arrays are of dtypes that may go to the tensor cores, and the GPU has some."""
    dtypes = is_narrow(a.dtype) and is_narrow(b.dtype)
    return dtypes and bool(entries_for(device_of(a.device.id).limits, 1))


def product(
    a: Array,
    b: Array,
    trans: tuple[bool, bool],
    shape: tuple[int, ...],
    sums: DType,
    *,
    partial: Array = None,
    final: DType | None = None,
    lower: bool = False,
) -> Array | None:
    """op(A) op(B) + P of `able` arrays; None where the numbers, or a stack's sizes, do not suit.

    Parameters
    ----------
    a, b, trans, shape, sums, partial
        As for `integers.gemm.product`.
    final : dtype, optional
        float32 where it is all that becomes of int32 sums: the kernel rounds them.
    lower : bool
        What is above the diagonal is not asked for.

    Returns
    -------
    cupy.ndarray of dtype `final` or `sums`, or None
    """
    k = a.shape[-2 if trans[0] else -1]
    if len(shape) > 2 and shape[-2] * shape[-1] * k < ALONE:
        return None
    import cupy

    in_bytes = int8_cores.takes(a, b)
    plan = Plan(0, int8_cores.longest(a, b)) if in_bytes else plan_for(most(cupy, a), most(cupy, b))
    if plan is None:
        return None
    with cupy.cuda.Device(a.device.id):
        if len(shape) == 2:
            made = _matrix(a, b, trans, sums, partial, final, plan, lower)
        else:
            made = cupy.empty(shape, sums)
            for at, (left, right, p) in of_a_stack(shape[:-2], a, b, partial):
                made[at] = _matrix(left, right, trans, sums, p, None, plan, lower)
    bits = f"{_bits(a.dtype)} and {_bits(b.dtype)}"
    kernel, reason = SPLIT, f"FP16 carries integers of {bits}"
    if in_bytes:
        kernel, reason = "byte_mma", f"INT8 tensor cores multiply integers of {bits}"
    note(Choice(kernel, "exact", reason))
    return made


def _bits(dtype: DType) -> str:
    return "one bit" if dtype.kind == "b" else f"{8 * dtype.itemsize} bits"


def _matrix(
    a: Array, b: Array, trans: tuple[bool, bool], sums: DType, partial: Array, final: DType | None,
    plan: Plan, lower: bool,
) -> Array:  # fmt: skip
    """A single product, stretch after stretch of k."""
    import cupy

    m, k = a.shape[::-1] if trans[0] else a.shape
    n = b.shape[0] if trans[1] else b.shape[1]
    modular = sums.kind in "iu" and sums.itemsize <= _INT32.itemsize
    longest = stretch_of(m, n, k) if plan.promote else k
    stretches = [*along_k(a, b, trans, longest if modular else min(longest, plan.length))]
    if not modular:
        total: Array = None
        for left, right in stretches:
            d = cupy.empty((m, n), _INT32)
            _launch(left, right, trans, None, d, plan, lower)
            total = d.astype(sums) if total is None else cupy.add(total, d.astype(sums), out=total)
        return total if partial is None else cupy.add(total, partial.astype(sums), out=total)
    before: Array = None
    if partial is not None:
        before = cupy.ascontiguousarray(partial.astype(_INT32, copy=False))
    last = len(stretches) - 1
    for i, (left, right) in enumerate(stretches):
        d = cupy.empty((m, n), _FLOAT32 if i == last and final == _FLOAT32 else _INT32)
        _launch(left, right, trans, before, d, plan, lower)
        before = d
    return before if before.dtype == final else before.astype(sums, copy=False)


def _launch(
    a: Array, b: Array, trans: tuple[bool, bool], p: Array, d: Array, plan: Plan, lower: bool
) -> None:
    """D = op(A) op(B) + P, by the current stream."""
    if not plan.promote:
        int8_cores.launch(a, b, trans, p, d, lower=lower)
        return
    with workspaces(d.device.id) as take:
        k, tiles = _packed(a, "a", trans[0], take)
        same = a is b and trans[0] != trans[1]
        tiles_b = tiles if same else _packed(b, "b", trans[1], take)[1]
        _multiply(tiles.data.ptr, tiles_b.data.ptr, k, p, d, plan, lower, take)


def _multiply(
    a: int, b: int, k: int, p: Array, d: Array, plan: Plan, lower: bool, take: Take
) -> None:
    """The same of packed operands, by their addresses."""
    device, (m, n) = d.device.id, d.shape
    chip = device_of(device)
    config = config_for(m, n, chip.limits, chip.multiprocessors, lower)
    kernel = kernel_for(
        device, f"{config.entry}.cu", config.entry,
        (*config.defines().items(), *INTEGER, *LOWER * lower),
        shared_bytes=config.shared_bytes, specific=config.specific,
    )  # fmt: skip
    slabs = -(-k // SLAB)
    slices, length = split_slices(m, n, k, chip.multiprocessors)
    to, before = d, p
    if slices > 1:
        to, before = take((slices, m, n)).view(np.int32), None
    grid = min(config.tiles(m, n, lower) * slices, chip.multiprocessors)
    args = (
        m, n, slabs, length if slices > 1 else 0, np.float32(1), np.float32(0),
        a, 0, b, 0, 0, 0,
        0 if before is None else before.data.ptr, n, to.data.ptr, n, m * n, 0,
        plan.promote, np.int32(to.dtype == np.float32),
    )  # fmt: skip
    kernel((grid, 1, 1), (config.threads, 1, 1), args, shared_mem=config.shared_bytes)
    if slices > 1:
        int8_cores.add_slices(to, p, d)


def config_for(
    m: int, n: int, limits: ArchLimits, multiprocessors: int, lower: bool = False
) -> SplitConfig:
    """Wide tiles, unless there are too few of them to keep a GPU busy."""
    configs = WGMMA_CONFIGS if limits.capability == WGMMA else MMA_CONFIGS
    wide, narrow = configs
    return wide if wide.tiles(m, n, lower) >= multiprocessors else narrow


def _packed(x: Array, side: str, trans: bool, take: Take) -> tuple[int, Array]:
    """k of an operand, and its tiles."""
    x, source = source_of(x, side, trans)
    panels, slabs = tiles_for(source.rows, source.k)
    tiles = take((panels * slabs * SLAB * SLAB // 2,))
    stack, itemsize = source.stack, x.dtype.itemsize
    wide = stack.pointer % (_FOUR * itemsize) == 0 and (stack.ld % _FOUR == 0 or stack.rows <= 1)
    defines = (("BYTES", itemsize), ("SIGNED", int(x.dtype.kind == "i")))
    kernel = kernel_for(x.device.id, "integer_pack.cu", "integer_pack", defines)
    args = (
        stack.pointer, stack.ld, source.rows, source.k, np.int32(source.along_k), np.int32(wide),
        tiles.data.ptr,
    )  # fmt: skip
    kernel((panels * slabs, 1, 1), (_PACK_THREADS, 1, 1), args)
    return source.k, tiles
