"""Splitting float32 into FP16 parts in NumPy, to the last bit as kernels/split_pack.cu does.

Tests alone need it: they hold kernels to it, also where there is no GPU.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from multimm.gpu.emulated.configs import ROW_ALIGN, SLAB

Array = NDArray[Any]

#: Of the low part, in units of the high one.
LOW_UNIT = np.float32(2.0**-11)

_TOP = 14  # exponent of the largest element of a row after scaling
_LARGEST = np.finfo(np.float32).max
_NORMAL = np.float32(2.0**-14)  # FP16 numbers below are subnormal


class Split(NamedTuple):
    """The parts of a matrix, by row: x = (high + low / 2^11) * 2^exponents + rest."""

    high: Array  #: float16, rows x k
    low: Array  #: float16, rows x k; zeros where there is one part
    exponents: Array  #: int32, rows
    rest: Array  #: float32, rows x k; elements that the parts do not carry, and have 0 for
    nonfinite: int  #: elements that are no numbers; their parts are 0


def row_exponents(x: Array) -> Array:
    """floor(log2 max |x|) - 14 over the finite elements of each row, int32; 0 for zero rows.

    Parameters
    ----------
    x : numpy.ndarray of float32, shape (rows, k)
    """
    sizes = np.where(np.isfinite(x), np.abs(x), 0).max(axis=1, initial=0)
    _, exponents = np.frexp(sizes)
    return np.where(sizes > 0, exponents - 1 - _TOP, 0).astype(np.int32)


def split(x: Array, parts: int = 2) -> Split:
    """Split a matrix as kernels/split_pack.cu does.

    Parameters
    ----------
    x : numpy.ndarray of float32, shape (rows, k)
    parts : {2, 1}
        1 leaves out the low part.

    Returns
    -------
    Split
    """
    exponents = row_exponents(x)
    finite = np.isfinite(x)
    x = np.where(finite, x, np.float32(0))
    y = _scaled(x, -exponents[:, None])
    carried = np.abs(y) >= _NORMAL
    y = np.where(carried, y, np.float32(0))
    high = y.astype(np.float16)
    low = np.zeros_like(high)
    if parts == 2:
        low = ((y - high.astype(np.float32)) / LOW_UNIT).astype(np.float16)
    rest = np.where(carried, np.float32(0), x)
    return Split(high, low, exponents, rest, int((~finite).sum()))


def joined(parts: Split) -> Array:
    """What the parts and the rests stand for: float32, nothing is rounded.

    High parts alone may stand for 2^128, which is the largest float32 then.
    """
    y = parts.high.astype(np.float32) + parts.low.astype(np.float32) * LOW_UNIT
    return np.clip(_scaled(y, parts.exponents[:, None]), -_LARGEST, _LARGEST) + parts.rest


def _scaled(x: Array, exponents: Array) -> Array:
    """x * 2^exponents, in two factors as the kernels do: one alone may be no float32."""
    half = exponents >> 1
    one = np.float32(1)
    with np.errstate(over="ignore", under="ignore"):
        scaled: Array = x * np.ldexp(one, half) * np.ldexp(one, exponents - half)
    return scaled


#: Of kernels/common/broad.cuh: what a row's exponent is lowered by, and what is carried then.
BROAD_SHIFT, LEAST_BROAD = 33, 2.0**-62


def broad_parts(x: Array, parts: int = 3, exponents: Array | None = None) -> tuple[Array, Array]:
    """What kernels/broad_pack.cu makes of a matrix, before it is cut into tiles.

    What it does not carry becomes 0.

    Parameters
    ----------
    x : numpy.ndarray of float32, shape (rows, k)
    parts : {3, 1}
        Three of bfloat16, or one of TF32; as float32 here.
    exponents : numpy.ndarray of int32, shape (rows,), optional
        Of `row_exponents`, where x is a stretch of k of its rows.

    Returns
    -------
    parts : numpy.ndarray of float32, shape (parts, rows, k)
    exponents : numpy.ndarray of int32, shape (rows,)
        x is the sum of the parts, times 2^exponents.
    """
    exponents = (row_exponents(x) if exponents is None else exponents) - BROAD_SHIFT
    y = _scaled(x, -exponents[:, None])
    y = np.where((np.abs(y) >= LEAST_BROAD) & np.isfinite(x), y, np.float32(0))
    if parts == 1:
        bits = y.view(np.uint32) + np.uint32(0x1000) & np.uint32(0xFFFFE000)
        return bits.view(np.float32)[None], exponents.astype(np.int32)
    found = []
    for _ in range(parts):
        bits = y.view(np.uint32)
        odd = bits >> np.uint32(16) & np.uint32(1)
        found.append(((bits + np.uint32(0x7FFF) + odd) & np.uint32(0xFFFF0000)).view(np.float32))
        y = y - found[-1]
    return np.stack(found), exponents.astype(np.int32)


def broad_tiles(x: Array, exponents: Array, parts: int) -> Array:
    """The tiles that kernels/broad_pack.cu writes, in 16 bits: all bytes as they lie in memory.

    Parameters
    ----------
    x, exponents, parts
        As for `broad_parts`.
    """
    rows, k = x.shape
    height, slabs = -(-rows // ROW_ALIGN) * ROW_ALIGN, -(-k // SLAB)
    padded = np.zeros((parts, height, slabs * SLAB), np.float32)
    padded[:, :rows, :k], _ = broad_parts(x, parts, exponents)
    if parts == 1:  # 32 k in 128 bytes
        halves = padded.reshape(height // SLAB, SLAB, slabs, 2, SLAB // 2).transpose(0, 2, 3, 1, 4)
        return swizzled(np.ascontiguousarray(halves).view(np.uint16))
    high = (padded.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    tiles = high.reshape(parts, height // SLAB, SLAB, slabs, SLAB).transpose(1, 3, 0, 2, 4)
    return swizzled(tiles)


class PackedReference(NamedTuple):
    """What split_pack.cu writes for one operand."""

    tiles: Array  #: float16, (R/64, S, parts, 64, 64), swizzled
    exponents: Array  #: int32, R
    nonfinite: int
    uncarried: int
    residuals: Array  #: (row, k, value) records, sorted by row and k


RESIDUAL = np.dtype([("row", np.int32), ("k", np.int32), ("value", np.float32)])


def pack_reference(x: Array, parts: int = 2) -> PackedReference:
    """Pack an operand, rows x k, to the last bit as kernels/split_pack.cu does.

    Parameters
    ----------
    x : numpy.ndarray of float32, shape (rows, k)
        op(A), or the transpose of op(B).
    parts : {2, 1}
    """
    rows, k = x.shape
    s = split(x, parts)
    height = -(-rows // ROW_ALIGN) * ROW_ALIGN
    slabs = -(-k // SLAB)
    padded = np.zeros((parts, height, slabs * SLAB), np.float16)
    for part, values in zip(padded, (s.high, s.low), strict=False):
        part[:rows, :k] = values
    tiles = padded.reshape(parts, height // SLAB, SLAB, slabs, SLAB).transpose(1, 3, 0, 2, 4)
    exponents = np.zeros(height, np.int32)
    exponents[:rows] = s.exponents
    at = np.nonzero(s.rest)
    residuals = np.empty(len(at[0]), RESIDUAL)
    residuals["row"], residuals["k"], residuals["value"] = *at, s.rest[at]
    return PackedReference(swizzled(tiles), exponents, s.nonfinite, len(residuals), residuals)


def swizzled(tiles: Array) -> Array:
    """Exchange the groups of 8 elements of each row as 128-byte swizzling does; its own inverse.

    Parameters
    ----------
    tiles : array, shape (..., 64, 64)
        NumPy or CuPy.

    Returns
    -------
    array
        New memory, C-contiguous.
    """
    *outer, height, width = tiles.shape
    groups = tiles.reshape(*outer, height // 8, 8, width // 8, 8)
    row = np.arange(8)[:, None]
    moved: Array = groups[..., row, row.T ^ row, :]
    return moved.reshape(tiles.shape)
