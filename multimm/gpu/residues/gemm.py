"""float64 products by residues: when, and with how many moduli.

Rows become integers, and these are known by their remainders for some moduli: products of bytes,
which INT8 tensor cores sum exactly. The host waits for the GPU twice: for the number of moduli, and
for the proof that no element errs by more than its bound (`certificate`).

Source: Ozaki, Uchino, Imamura, "Ozaki Scheme II: A GEMM-oriented emulation of floating-point matrix
multiplication using an integer modular technique" (2025). The proof is our own.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np

from multimm.gpu.emulated.configs import WGMMA
from multimm.gpu.kernel_selection import Choice, note
from multimm.gpu.residues.certificate import keeps_bound
from multimm.gpu.residues.launch import (
    STRETCH,
    WORDS,
    Operand,
    joined,
    looked_at,
    multiplied,
    packed,
    rows_of,
)
from multimm.gpu.residues.moduli import MODULI, fewest, norm_limit
from multimm.gpu.runtime.driver_launch import capturing
from multimm.gpu.runtime.launch import device_of
from multimm.gpu.subproducts import along_k, of_a_stack

logger = logging.getLogger(__name__)

Array = Any

#: With so many moduli integers have 54 bits: a product of normal or uniform numbers errs less than
#: cuBLAS's. More of them where the proof fails.
USUAL = 14
#: Multiplications from which on residues are faster than an H200's FP64 units: 4096 squares take
#: it 0.80 to 0.87 times as long, 3072 1.17.
LARGE = 2**35
#: The same of each side: what is packed is read for a product of many rows or columns. Arbitrary.
LONG = 1024
#: Bits of the integers that residue_pack.cu takes apart.
_INTEGER_BITS = 62
#: Further than any row is scaled.
_NO_LIMIT = 2.0**1000


def takes(a: Array, b: Array, shape: tuple[int, ...], k: int) -> bool:
    """Whether CuPy arrays are of float64, and a product of `shape` may be faster by residues."""
    m, n = shape[-2:]
    large = min(m, n, k) >= LONG and m * n * k >= LARGE
    if not (a.dtype == b.dtype == np.float64 and large):
        return False
    # Of a graph that is captured the host cannot wait for what packing finds.
    return device_of(a.device.id).limits.capability == WGMMA and not capturing()


def gemm(
    a: Array,
    b: Array,
    shape: tuple[int, ...],
    *,
    trans: tuple[bool, bool] = (False, False),
    alpha: float = 1.0,
    beta: float = 0.0,
    c: Array = None,
    partial: Array = None,
    lower: bool = False,
) -> Array | None:
    """D = alpha (op(A) op(B) + P) + beta C, no element of which errs by more than its bound.

    The bound is that of a sum of float64 products in any order, (k + 2) u |A||B| before P, alpha,
    beta and C, which round once each; u = 2^-53.

    Parameters
    ----------
    a, b : cupy.ndarray of float64
        Of any layout, on a GPU of compute capability 9.0; never changed.
    shape : tuple of int
        Of the result; neither it nor k is 0.
    trans : (bool, bool)
        Whether they are stored transposed.
    alpha, beta : float
    c, partial : cupy.ndarray of float64, shape (..., m, n), optional
    lower : bool
        m and n are equal, and what is above the diagonal may be anything.

    Returns
    -------
    cupy.ndarray of float64, or None
        In the order of the current stream. None where the bound is not proved, where numbers are
        not finite or beyond 2^-400 and 2^400, or where memory is short.
    """
    import cupy

    more: dict[str, Any] = {"alpha": alpha, "beta": beta, "lower": lower}
    try:
        with cupy.cuda.Device(a.device.id):
            if len(shape) == 2:
                return _matrix(a, b, trans, c=c, partial=partial, **more)
            made = cupy.empty(shape)
            for at, (x, y, own, p) in of_a_stack(shape[:-2], a, b, c, partial):
                one = _matrix(x, y, trans, c=own, partial=p, **more)
                if one is None:
                    return None
                made[at] = one
            return made
    except MemoryError:  # of CuPy's pool, or RMM's
        logger.warning("no memory is left for residues of float64 operands: a product runs with "
                       "cuBLAS, slower and with other bits")  # fmt: skip
        return None


def _matrix(
    a: Array, b: Array, trans: tuple[bool, bool], *, alpha: float, beta: float, c: Array,
    partial: Array, lower: bool,
) -> Array | None:  # fmt: skip
    """A single product, stretch after stretch of k."""
    stretches = [*along_k(a, b, trans, STRETCH)]
    plain: dict[str, Any] = {"alpha": 1.0, "beta": 0.0, "c": None}
    for left, right in stretches[:-1]:
        partial = _stretch(left, right, trans, lower, partial=partial, **plain)
        if partial is None:
            return None
    last = {"alpha": alpha, "beta": beta, "c": c}
    return _stretch(*stretches[-1], trans, lower, partial=partial, **last)


def _stretch(
    a: Array, b: Array, trans: tuple[bool, bool], lower: bool, **more: Any
) -> Array | None:
    import cupy

    summaries = cupy.zeros((2, WORDS), np.uint64)
    operands = [looked_at(a, "a", trans[0], summaries[0])]
    if a is not b or trans[0] == trans[1]:
        operands.append(looked_at(b, "b", trans[1], summaries[1]))
    if (made := _planes(operands, summaries)) is None:
        return None
    tiles, how = made
    left, right, count = operands[0], operands[-1], len(tiles[0])
    residues = multiplied(left, right, (tiles[0], tiles[-1]), count, lower=lower)
    tiles.clear()
    note(Choice("residues", how, f"{count} products of bytes"))
    return joined(left, right, residues, **more)


def _planes(operands: list[Operand], summaries: Array) -> tuple[list[Array], str] | None:
    """Residues of one or two operands, and what their product is proved to be; None if nothing."""
    found = summaries.get()[: len(operands)]
    bits = [int(found[at, 1]) for at in (0, -1)]
    if found[:, 0].any():
        return None
    few = fewest(sum(bits))
    if few is not None and few <= USUAL and max(bits) <= _INTEGER_BITS:
        return [packed(x, few, _NO_LIMIT) for x in operands], "exact"
    count: int | None = USUAL
    while count is not None:
        limit = norm_limit(count, operands[0].k)
        tiles = [packed(x, count, limit) for x in operands]
        if (wanted := _moduli_for(operands, summaries.get(), count)) == count:
            return tiles, "float64"
        tiles.clear()
        count = wanted
    return None


def _moduli_for(operands: list[Operand], words: np.ndarray[Any, Any], count: int) -> int | None:
    """How many moduli keep the bound, as far as is known of rows that are packed for `count`."""
    k = operands[0].k
    rows = [rows_of(own, k) for own in words[: len(operands)]]
    for other in range(count, len(MODULI) + 1):
        factor = norm_limit(other, k) / norm_limit(count, k)
        if keeps_bound(rows[0].scaled(factor), rows[-1].scaled(factor), k):
            return other
    return None
