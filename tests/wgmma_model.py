"""Products of packed operands as Hopper's tensor cores sum them, in NumPy.

One instruction adds 16 products of FP16 numbers to a float32 in one go, each addend cut off below
25 fractional bits of the largest, the sum rounded toward zero. So the accuracy of
kernels/sgemm_split.cu is tested where there is no GPU, and its bits where there is one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from pack_reference import LOW_UNIT, Split, broad_parts, joined, split

from multimm.gpu.emulated.configs import SLAB

Array = NDArray[Any]


STEP = 32  #: elements of k after which products of high parts are added to a float32, to nearest
FOLD = 2048  #: after which corrections, which have sums of their own, are added to it
FLUSH = 8192  #: after which that sum is added to another one
PROMOTE = 3072  #: of one part: after which the sum is rounded to bfloat16 and put aside


def wgmma(acc: Array, a: Array, b: Array, least: int = -14) -> Array:
    """acc + a @ b for 16 elements of k, as one instruction adds them.

    Each addend, `acc` too, is cut off after 25 fractional bits of the largest one's exponent, that
    of a product being the sum of its factors' exponents. The sum of what is left is exact, and
    rounded toward zero.

    Parameters
    ----------
    acc : numpy.ndarray of float32, shape (m, n)
    a : numpy.ndarray of float16, shape (m, 16)
    b : numpy.ndarray of float16, shape (n, 16)
    least : int, optional
        Least exponent of the factors: -126 for bfloat16 and TF32 as float32, of TF32 8 at a time.
    """
    exponent = np.where(acc != 0, np.maximum(_exponent(acc), -126), _NONE)
    ea = np.where(a != 0, np.maximum(_exponent(a), least), _NONE)
    eb = np.where(b != 0, np.maximum(_exponent(b), least), _NONE)
    top = np.maximum(exponent, (ea[:, None, :] + eb[None, :, :]).max(axis=2))
    unit = np.ldexp(1.0, np.maximum(top, -400) - 25)
    products = a[:, None, :].astype(np.float64) * b[None, :, :].astype(np.float64)
    total = np.trunc(products / unit[..., None]).sum(axis=2) + np.trunc(acc / unit)
    return _toward_zero(total * unit)


_NONE = -1000  # the exponent of zero


def _exponent(x: Array) -> Array:
    return np.frexp(x.astype(np.float64))[1] - 1


def _toward_zero(x: Array) -> Array:
    """float64 to float32, toward zero."""
    near: Array = x.astype(np.float32)
    beyond = np.abs(near.astype(np.float64)) > np.abs(x)
    return np.where(beyond, np.nextafter(near, np.float32(0)), near)


def _steps(acc: Array, a: Array, b: Array) -> Array:
    """One `wgmma` after the other over the elements of k, 16 at a time."""
    for k in range(0, a.shape[1], 16):
        acc = wgmma(acc, a[:, k : k + 16], b[:, k : k + 16])
    return acc


def wgmma_model(a: Array, b: Array, parts: int = 2) -> Array:
    """a @ b.T as kernels/sgemm_split.cu computes it from packed operands.

    Parameters
    ----------
    a : numpy.ndarray of float32, shape (m, k)
    b : numpy.ndarray of float32, shape (n, k)
        The transpose of op(B).
    parts : {2, 1}
        2 for ``precision="float32"``; 1 for ``"tf32"``, one product.

    Returns
    -------
    numpy.ndarray of float32, shape (m, n)
        Products with elements that the parts do not carry are added in float32, one by one.
    """
    left, right = split(a, parts), split(b, parts)
    (m, k), n = a.shape, len(b)
    pad = [(0, 0), (0, -k % SLAB)]
    high, low = ([np.pad(x[i], pad) for x in (left, right)] for i in (0, 1))
    zero = np.zeros((m, n), np.float32)
    total = _single_product(high, zero) if parts == 1 else _split_product(high, low, zero)
    product = _unscaled(total, left.exponents[:, None], right.exponents[None, :])
    return product + _rests(left, right)


def _unscaled(total: Array, ea: Array, eb: Array) -> Array:
    """total * 2^(ea + eb): the halves of both exponents first, then the rest of both."""
    one = np.float32(1)
    first = np.ldexp(one, ea >> 1) * np.ldexp(one, eb >> 1)
    second = np.ldexp(one, ea - (ea >> 1)) * np.ldexp(one, eb - (eb >> 1))
    with np.errstate(under="ignore", over="ignore"):
        scaled: Array = total * first * second
    return scaled


def _single_product(high: list[Array], zero: Array) -> Array:
    aside, total = zero, zero
    length = high[0].shape[1]
    for k in range(0, length, PROMOTE):
        total = _steps(total, *(x[:, k : k + PROMOTE] for x in high)) + aside
        if k + PROMOTE < length:
            aside = bfloat16(total)
            total = total - aside
    return total


def bfloat16(x: Array) -> Array:
    """Finite float32 numbers rounded to 8 significant bits, to nearest and ties to even.

    Parameters
    ----------
    x : numpy.ndarray of float32

    Returns
    -------
    numpy.ndarray of float32
    """
    bits = x.view(np.uint32)
    odd = bits >> np.uint32(16) & np.uint32(1)
    rounded: Array = (bits + np.uint32(0x7FFF) + odd) & np.uint32(0xFFFF0000)
    return rounded.view(np.float32)


def _split_product(high: list[Array], low: list[Array], zero: Array) -> Array:
    kept, total, corrections = None, zero, zero
    length = high[0].shape[1]
    for k in range(0, length, STEP):
        (ah, bh), (al, bl) = ([x[:, k : k + STEP] for x in pair] for pair in (high, low))
        end = k + STEP
        corrections = _corrected(corrections, ah, bh, al, bl)
        total = total + _steps(zero, ah, bh)
        if end % FOLD == 0 or end >= length:
            total, corrections = total + corrections * LOW_UNIT, zero
        if end % FLUSH == 0 or end >= length:
            kept, total = total if kept is None else total + kept, zero
    return zero if kept is None else kept


def _corrected(acc: Array, ah: Array, bh: Array, al: Array, bl: Array) -> Array:
    """acc + low * high + high * low, in units of the low part."""
    for k in range(0, ah.shape[1], 16):
        here = slice(k, k + 16)
        acc = wgmma(acc, al[:, here], bh[:, here])
        acc = wgmma(acc, ah[:, here], bl[:, here])
    return acc


def broad_model(
    a: Array, b: Array, parts: int = 3, exponents: tuple[Array | None, Array | None] = (None, None)
) -> Array:
    """a @ b.T as kernels/sgemm_split.cu with BROAD computes it, k in one piece.

    Parameters
    ----------
    a : numpy.ndarray of float32, shape (m, k)
    b : numpy.ndarray of float32, shape (n, k)
    parts : {3, 1}
        3 for ``precision="float32"``, six products of bfloat16; 1 for ``"tf32"``.
    exponents : (numpy.ndarray of int32 or None, likewise), optional
        Of the rows of both, where they are stretches of longer ones.
    """
    (left, ea), (right, eb) = (
        broad_parts(x, parts, e) for x, e in zip((a, b), exponents, strict=True)
    )
    pad = [(0, 0), (0, 0), (0, -a.shape[1] % SLAB)]
    left, right = np.pad(left, pad), np.pad(right, pad)
    zero = np.zeros((len(a), len(b)), np.float32)
    total = (_tf32_product if parts == 1 else _six_products)(left, right, zero)
    return _unscaled(total, ea[:, None], eb[None, :])


def _tf32_product(left: Array, right: Array, zero: Array) -> Array:
    """A slab is 32 k: sums are put aside twice as often as those of FP16."""
    aside, total, length, step = zero, zero, left.shape[2], PROMOTE // 2
    for first in range(0, length, step):
        for k in range(first, min(first + step, length), 8):
            total = wgmma(total, left[0, :, k : k + 8], right[0, :, k : k + 8], -126)
        total = total + aside
        if first + step < length:
            aside = bfloat16(total)
            total = total - aside
    return total


def _six_products(left: Array, right: Array, zero: Array) -> Array:
    total, small = zero, zero
    length, pairs = left.shape[2], ((1, 0), (0, 1), (1, 1))
    for k in range(0, length, STEP):
        steps = [slice(at, at + 16) for at in range(k, k + STEP, 16)]
        fresh = zero
        for at in steps:
            fresh = wgmma(fresh, left[0, :, at], right[0, :, at], -126)
        for group in (pairs, ((2, 0), (0, 2))):
            for at in steps:
                for i, j in group:
                    small = wgmma(small, left[i, :, at], right[j, :, at], -126)
        total, end = total + fresh, k + STEP
        if end % FOLD == 0 or end >= length:
            total, small = total + small, zero
    return total


def _rests(left: Split, right: Split) -> Array:
    """What the rests add to the product: R B + A' S."""
    total = np.zeros((len(left.rest), len(right.rest)), np.float32)
    b, carried = joined(right), np.where(left.rest != 0, np.float32(0), joined(left))
    for row, k in zip(*np.nonzero(left.rest), strict=True):
        total[row] += left.rest[row, k] * b[:, k]
    for row, k in zip(*np.nonzero(right.rest), strict=True):
        total[:, row] += right.rest[row, k] * carried[:, k]
    return total
