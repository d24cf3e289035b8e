"""Products of 8-bit integers on INT8 tensor cores, exact modulo 2^32: how they are launched.

    byte_pack   each operand in tiles, its bytes as they are
    byte_mma    one product of these, with INTEGER: sums are int32

No number has to be looked at before: bytes of any value are multiplied exactly.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from multimm.gpu import byte_products
from multimm.gpu.emulated.configs import WGMMA, even_slices
from multimm.gpu.emulated.pack import source_of
from multimm.gpu.integers.bounds import magnitude, terms
from multimm.gpu.runtime.launch import device_of, kernel_for
from multimm.gpu.runtime.workspace import Take, workspaces

Array = Any

_PACK_THREADS, _FOUR = 256, 4  # of byte_pack.cu: threads of a block, bytes of a wide load
#: k of a slice, at least: shorter ones would be added up for longer than they are multiplied.
_SLICE = 4096
#: Of sums of slices, beside D: 2^28 bytes.
_MOST_SUMS = 2**26


def takes(a: Array, b: Array) -> bool:
    """Whether CuPy arrays are of bytes, and their GPU multiplies them."""
    able = device_of(a.device.id).limits.capability == WGMMA
    return able and a.dtype.itemsize == b.dtype.itemsize == 1


def longest(a: Array, b: Array) -> int:
    """So many products of any of their numbers are summed before int32 can overflow."""
    held = terms(magnitude(a.dtype), magnitude(b.dtype), 2**31 - 1)
    return held // byte_products.DEPTH * byte_products.DEPTH


def slices_for(m: int, n: int, k: int, multiprocessors: int) -> tuple[int, int]:
    """Into how many slices k is cut where D has few tiles, and the tiles along k of each.

    >>> slices_for(8192, 8192, 8192, 132), slices_for(500, 500, 2**20, 132)
    ((1, 64), (16, 512))
    """
    tiles = -(-m // byte_products.ROWS) * -(-n // byte_products.COLUMNS)
    wanted = min(multiprocessors // tiles, k // _SLICE, _MOST_SUMS // (m * n))
    return even_slices(byte_products.slabs(k), max(1, wanted))


def launch(
    a: Array, b: Array, trans: tuple[bool, bool], p: Array, d: Array, *, lower: bool = False
) -> None:
    """D = op(A) op(B) + P of matrices that are taken, by the current stream.

    Parameters
    ----------
    a, b : cupy.ndarray of int8, uint8 or bool
    trans : (bool, bool)
        Whether they are stored transposed.
    p : cupy.ndarray of int32, of D's shape and contiguous, or None
        May be D.
    d : cupy.ndarray of int32, or of float32: sums are rounded to it then
    lower : bool
        What is above the diagonal is not asked for.
    """
    device, (m, n) = d.device.id, d.shape
    k = a.shape[0 if trans[0] else 1]
    slices, slabs = slices_for(m, n, k, device_of(device).multiprocessors)
    with workspaces(device) as take:
        tiles = _packed(a, "a", trans[0], slices, slabs, take)
        same = a is b and trans[0] != trans[1]
        tiles_b = tiles if same else _packed(b, "b", trans[1], slices, slabs, take)
        to, before = d, p
        if slices > 1:
            to, before = take((slices, m, n)).view(np.int32), None
        more = ("INTEGER", 1), ("SIGNED_A", _signed(a)), ("SIGNED_B", _signed(b))
        arguments = (
            slabs, np.int32(slices), tiles.data.ptr, tiles_b.data.ptr,
            0 if before is None else before.data.ptr, to.data.ptr,
            np.int32(to.dtype == np.float32),
        )  # fmt: skip
        byte_products.launch(device, m, n, slices, arguments, more, lower=lower)
        if slices > 1:
            add_slices(to, p, d)


def add_slices(sums: Array, p: Array, d: Array) -> None:
    """D = the sums of all slices of k, and P, in int32."""
    total = sums.sum(axis=0, dtype=np.int32)
    if p is not None:
        total += p
    d[...] = total


def _signed(x: Array) -> int:
    return int(x.dtype.kind == "i")


def _packed(x: Array, side: str, trans: bool, slices: int, slabs: int, take: Take) -> Array:
    """The tiles of an operand."""
    x, source = source_of(x, side, trans)
    panels = byte_products.panels(source.rows)
    number = slices * panels * slabs
    tiles = take((number * byte_products.TILE_BYTES // 4,))
    stack = source.stack
    wide = stack.pointer % _FOUR == 0 and (stack.ld % _FOUR == 0 or stack.rows <= 1)
    kernel = kernel_for(x.device.id, "byte_pack.cu", "byte_pack", ())
    kernel((number, 1, 1), (_PACK_THREADS, 1, 1), (
        stack.pointer, stack.ld, source.rows, source.k, np.int32(source.along_k), np.int32(wide),
        slabs, tiles.data.ptr,
    ))  # fmt: skip
    return tiles
