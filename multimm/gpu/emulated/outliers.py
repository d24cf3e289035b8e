"""Elements that packed parts do not carry, added to a product: kernels/split_residuals.cu."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from multimm.gpu.arch import RESIDUAL_CAP
from multimm.gpu.emulated.configs import PARTS, SLAB
from multimm.gpu.emulated.packed import PackedBlock
from multimm.gpu.problem import describe
from multimm.gpu.runtime.launch import device_of, kernel_for

Array = Any

_THREADS = 256
#: Thread blocks on a multiprocessor: what their lists take of its shared memory.
_RESIDENT = 8


class Lists(NamedTuple):
    """A packed operand and its residuals, by their addresses."""

    tiles: int
    exponents: int
    known: int  #: how many residuals there are, unless packing has counted them
    places: int
    values: int


#: Takes A, B, and the addresses of D and of what packing has counted, or 0; launches on the current
#: stream.
Adding = Callable[[Lists, Lists, int, int], None]


def residual_defines(parts: int) -> tuple[tuple[str, int], ...]:
    """The compile-time parameters of kernels/split_residuals.cu."""
    return (("PARTS", parts), ("CAP", RESIDUAL_CAP))


def prepared(m: int, n: int, k: int, scheme: str, device: int, alpha: float, ldd: int) -> Adding:
    """Return what adds the residuals of both operands of a product to it.

    Parameters
    ----------
    m, n, k : int
        None of them 0.
    scheme : {"float32", "tf32"}
    device : int
    alpha : float
    ldd : int
        Rows of D lie so many elements apart.
    """
    defines = residual_defines(PARTS[scheme])
    kernel = kernel_for(device, "split_residuals.cu", "split_residuals", defines)
    tiles = -(-m // SLAB) * -(-n // SLAB)
    grid = (min(tiles, _RESIDENT * device_of(device).multiprocessors), 1, 1)
    scalar = np.float32(alpha)

    def run(a: Lists, b: Lists, d: int, counts: int) -> None:
        kernel(grid, (_THREADS, 1, 1), (m, n, k, scalar, *a, *b, d, ldd, counts))

    return run


def add_residuals(d: Array, a: PackedBlock, b: PackedBlock, *, alpha: float) -> None:
    """D += alpha * (R @ B + A' @ S), for the residuals R of A and S of B.

    With A = A' + R and B = B' + S, where A' and B' are what the parts carry, the product of the
    parts lacks that.

    Parameters
    ----------
    d : cupy.ndarray of float32, shape (m, n)
        Written to, on the current stream of its device; rows or columns contiguous.
    a, b : PackedBlock
        Of tiles. Most have no residuals: then nothing is launched.
    alpha : float
    """
    if a.uncarried == b.uncarried == 0 or alpha == 0 or not d.size:
        return
    stack = describe(d)
    assert not isinstance(stack, str), "what can be written to has contiguous rows or columns"
    if stack.transposed:  # D' = B' A'
        a, b = b, a
    import cupy

    lists = _lists(a), _lists(b)
    with cupy.cuda.Device(a.device_id):
        add = prepared(a.rows, b.rows, a.k, a.scheme, a.device_id, alpha, stack.ld)
        add(*lists, stack.pointer, 0)


def _lists(block: PackedBlock) -> Lists:
    lists = (block.places, block.values) if block.uncarried else ()
    places, values = (x.data.ptr for x in lists) if lists else (0, 0)
    return Lists(block.tiles.data.ptr, block.exponents.data.ptr, block.uncarried, places, values)
