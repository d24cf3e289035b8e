"""Products of packed operands on the tensor cores: how their kernels are launched.

On Hopper kernels/sgemm_split.cu, on other GPUs from sm_80 on kernels/sgemm_split_mma.cu.

A packed operand is any value with these attributes:

tiles : cupy.ndarray of float16, shape (R / 64, slabs, parts, 64, 64), C-contiguous
    R is `rows` rounded up to 128, a slab has 64 k; parts are 2 (high, low) or 1 (high).
exponents : cupy.ndarray of int32, shape (R,)
rows, k : int
    Of the operand: op(A) is m x k and has m rows, op(B) is k x n and has n.

How the tiles are laid out say the kernel files. What the tiles cannot carry (values that are not
finite, and others that the pack lists) is not looked at here. Whatever can be wrong is checked
before CUDA is touched; kernels run on the caller's current stream of the operands' device.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from multimm.errors import ArrayTypeError, KernelError, ShapeError
from multimm.gpu.emulated.configs import TILE_ROWS, SplitConfig
from multimm.gpu.emulated.pack_configs import ROW_ALIGN, SLAB
from multimm.gpu.emulated.selection import choose_split, slices_of, split_config_named
from multimm.gpu.runtime.launch import LOWER, UNLESS_REFUSED, device_of, kernel_for
from multimm.gpu.runtime.launch_cache import Run
from multimm.gpu.simt.gemm import addressable
from multimm.gpu.simt.split_k import Operands, can_be_added, slice_step, summed
from multimm.gpu.strides import ProductShape, check_addend, check_lower
from multimm.gpu.validate import check_arrays, check_out

logger = logging.getLogger(__name__)

Array = Any
Packed = Any

_PLAIN = np.float32(1), np.float32(0)  # alpha and beta
_FLOAT16, _INT32 = np.dtype(np.float16), np.dtype(np.int32)


def multiply(
    packed_a: Packed,
    packed_b: Packed,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    c: Array = None,
    partial: Array = None,
    out: Array = None,
    config: SplitConfig | str | None = None,
    lower: bool = False,
) -> Array:
    """D = alpha * (A @ B + P) + beta * C of packed operands, on the tensor cores.

    With two parts, A @ B is accurate as with FP32 arithmetic: from k = 256 on componentwise within
    (k + 2) * 2**-24 of abs(A) @ abs(B). Of random data that is 24 * 2**-24 up to k = 2**17; of
    constant data, whose roundings have one sign, about 70 * 2**-24 from k = 8192 on. With one part
    it is a ``tf32`` product.

    Parameters
    ----------
    packed_a, packed_b : packed operands
        m rows and n rows, of the same k, number of parts and device.
    alpha, beta : float
        beta == 0 never reads C, alpha == 0 never reads A, B or P.
    c, partial : cupy.ndarray of float32, shape (m, n), optional
        Copied first unless their rows are contiguous.
    out : cupy.ndarray of float32, shape (m, n), optional
        Written to and returned: rows or columns contiguous, overlapping no operand.
    config : SplitConfig or str, optional
        Or the name of one; by default `split_choice.choose_split` decides. The bits of the
        result are the same.
    lower : bool, optional
        D is square, and what is above its diagonal is not asked for: whatever memory holds.

    Returns
    -------
    cupy.ndarray of float32, shape (m, n)
        On the device of the operands; `out`, or a new C-contiguous array.

    Raises
    ------
    ShapeError, DTypeError, ArrayTypeError
        Operands that do not fit together, or an `out` that cannot be written to.
    KernelError
        An unknown configuration, one for another number of parts, or a GPU without tensor cores
        for it.
    """
    parts, ident = _check_packed(packed_a, packed_b)
    m, n, k = packed_a.rows, packed_b.rows, packed_a.k
    check_lower(lower, m, n)
    if not (c is partial is out is None):
        given = {"c": c, "partial": partial, "out": out}
        if _check_others({name: x for name, x in given.items() if x is not None}, m, n, k, ident):
            # Rows of the transpose of out are what is contiguous: D' = B' A'.
            c, partial = (x if x is None else x.T for x in (c, partial))
            # (Its lower triangle is what is above the diagonal of out.)
            multiply(packed_b, packed_a, alpha=alpha, beta=beta, c=c, partial=partial, out=out.T,
                     config=config)  # fmt: skip
            return out
    import cupy

    with cupy.cuda.Device(ident):
        if out is None:
            out = cupy.empty((m, n), np.float32)
        if out.size:
            # The copies stay referenced until everything that reads them is in the stream.
            read = None if beta == 0 else c, None if alpha == 0 else partial, out
            addends = [addressable(x, any_order=False) for x in read]
            places = [stack.pointer for _, stack in addends]
            run = prepared((m, n, k), parts, ident, alpha, beta, addends, config, lower)
            operands = packed_a.tiles, packed_a.exponents, packed_b.tiles, packed_b.exponents
            run([*(x.data.ptr for x in operands), *places, 0])
        else:
            _plan(m, n, k, parts, ident, config, lower)  # what can be wrong with it is
    return out


def prepared(
    sizes: tuple[int, int, int],
    parts: int,
    device: int,
    alpha: float,
    beta: float,
    addends: Operands,
    config: SplitConfig | str | None = None,
    lower: bool = False,
) -> Run:
    """Return what multiplies packed operands of these sizes.

    Parameters
    ----------
    sizes : (int, int, int)
        m, n and k; m and n are not 0.
    parts : int
        Of each element: 2, or 1 for ``tf32``.
    device : int
    alpha, beta : float
    addends : sequence of (cupy.ndarray of float32 or None, Stack)
        C, P and D with contiguous rows.
    config : SplitConfig or str, optional
    lower : bool, optional
        As for `multiply`.

    Returns
    -------
    callable
        Takes the addresses of the tiles and exponents of A and of B, of C, P and D (0 for what is
        not there), and of what packing has counted: nothing is computed for operands that are
        refused, and 0 says that none is. Launches on the current stream.
    """
    plan = _plan(*sizes, parts, device, config, lower)
    (c, c_at), (partial, p_at), (_, d_at) = addends
    ldc, ldp = (stack.ld if x is not None else 0 for x, stack in ((c, c_at), (partial, p_at)))
    ldd = d_at.ld
    m, n, k = sizes
    shape = ProductShape((), m, n, k)
    scalars = np.float32(alpha), np.float32(beta)

    def run(pointers: Sequence[int]) -> None:
        *operands, c, p, d, counts = pointers
        plan.launch(0, scalars, operands, (c, ldc, p, ldp, d, ldd), 0, counts)

    if alpha == 0 or plan.slices == 1 or not can_be_added(shape, addends):
        return run
    step = slice_step(shape)

    def products(pointers: Sequence[int], to: int) -> None:
        plan.launch(plan.length, _PLAIN, pointers[:4], (0, 0, 0, 0, to, n), step, pointers[7])

    return summed(products, lambda: run, device, addends, 4, shape, plan.slices, alpha, beta,
                  UNLESS_REFUSED)  # fmt: skip


def _check_packed(a: Packed, b: Packed) -> tuple[int, int]:
    """Check what is inside two packed operands; return their number of parts and device."""
    for side, x in (("a", a), ("b", b)):
        tiles, exponents = x.tiles, x.exponents
        if tiles is None:
            raise ArrayTypeError(f"packed {side} has no tiles: multiply its source")
        rows, slabs = -(-x.rows // ROW_ALIGN) * ROW_ALIGN, -(-x.k // SLAB)
        parts = tiles.shape[2] if tiles.ndim == 5 else 2
        wanted = (rows // TILE_ROWS, slabs, parts, TILE_ROWS, SLAB)
        if (tiles.shape, exponents.shape) != (wanted, (rows,)) or parts not in (1, 2):
            raise ShapeError(
                f"packed {side} of {x.rows} rows and k {x.k} has tiles of shape {tiles.shape} and "
                f"exponents of shape {exponents.shape}: they must be {wanted}, with 1 or 2 parts, "
                f"and {(rows,)}; pack the operand again"
            )
        if (tiles.dtype, exponents.dtype) != (_FLOAT16, _INT32) or not (
            tiles.flags.c_contiguous and exponents.flags.c_contiguous
        ):
            raise ArrayTypeError(
                f"packed {side} has {tiles.dtype} tiles and {exponents.dtype} exponents, strides "
                f"{tiles.strides}: they must be C-contiguous float16 and int32"
            )
    if a.k != b.k or a.tiles.shape[2] != b.tiles.shape[2]:
        raise ShapeError(
            f"packed a has k {a.k} in {a.tiles.shape[2]} parts, packed b has {b.k} in "
            f"{b.tiles.shape[2]}: both must be equal; pack both for the same precision"
        )
    devices = [x.data.device_id for x in (a.tiles, a.exponents, b.tiles, b.exponents)]
    if len(set(devices)) > 1:
        raise ArrayTypeError(f"packed operands lie on devices {devices}: move them to one")
    return a.tiles.shape[2], devices[0]


def _check_others(given: dict[str, Array], m: int, n: int, k: int, ident: int) -> bool:
    """Check C, P and out; return whether columns of out are what is contiguous."""
    check_arrays(given, np.float32)
    shape = ProductShape((), m, n, k)
    for name, x in given.items():
        if x.data.device_id != ident:
            raise ArrayTypeError(
                f"{name} lies on device {x.data.device_id}, the packed operands on {ident}: move "
                "them to one"
            )
        if name != "out":
            check_addend(name, x.shape, shape)
    return "out" in given and check_out(given, shape.result).transposed


class _Plan(NamedTuple):
    """What sizes and configuration decide about a product."""

    kernel: Any
    threads: int
    shared_bytes: int
    sizes: tuple[int, int, int]  #: m, n and slabs
    tiles: int
    slices: int
    length: int  #: of a slice, in slabs
    multiprocessors: int

    def launch(
        self,
        step: int,
        scalars: tuple[Any, Any],
        operands: Sequence[int],
        addends: Sequence[int],
        apart: int,
        counts: int,
    ) -> None:
        """The product to D; or slices of `step` slabs to places that lie `apart` floats apart."""
        blocks = min(self.tiles * (self.slices if step else 1), self.multiprocessors)
        args = (*self.sizes, step, *scalars, *operands, *addends,
                apart, counts)  # fmt: skip
        self.kernel((blocks, 1, 1), (self.threads, 1, 1), args, shared_mem=self.shared_bytes)


@functools.lru_cache(maxsize=1024)
def _plan(
    m: int, n: int, k: int, parts: int, ident: int, config: SplitConfig | str | None, lower: bool
) -> _Plan:
    device = device_of(ident)
    products = 1 if parts == 1 else 3
    if config is None:
        config, _ = choose_split(m, n, k, products, device, lower)
    elif isinstance(config, str):
        config = split_config_named(config)
    if config.products != products:
        raise KernelError(f"{config} makes other products than operands of {parts} parts need")
    if not config.runs_on(device.limits):
        raise KernelError(
            f"{config} does not run on a GPU of compute capability "
            f"{device.limits.capability / 10}: leave the configuration out"
        )
    kernel = kernel_for(
        ident, config.file, config.entry, (*config.defines().items(), *LOWER * lower),
        shared_bytes=config.shared_bytes, specific=config.specific,
    )  # fmt: skip
    slices, length = slices_of(m, n, k, products, device, lower)
    plan = _Plan(
        kernel, config.threads, config.shared_bytes, (m, n, -(-k // SLAB)),
        config.tiles(m, n, lower), slices, length, device.multiprocessors,
    )  # fmt: skip
    logger.debug("k=%d %s: %s", k, config, plan)
    return plan
