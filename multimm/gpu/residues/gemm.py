"""Products of float64, complex128 and complex64 by residues: when, and with how many moduli.

Rows become integers, and these are known by their remainders for some moduli: products of bytes,
which INT8 tensor cores sum exactly. The host waits for the GPU twice: for the number of moduli, and
for the proof that no element errs by more than its bound (`certificate`). Before all rows are
packed, a few are: data for which these prove nothing costs little.

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
from multimm.gpu.residues.formats import FORMATS
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
from multimm.gpu.residues.moduli import fewest, norm_limit
from multimm.gpu.runtime.launch import device_of
from multimm.gpu.runtime.workspace import capturing
from multimm.gpu.subproducts import along_k, of_a_stack

logger = logging.getLogger(__name__)

Array = Any

#: Bits of the integers that residue_pack.cu takes apart.
_INTEGER_BITS = 62
#: Further than any row is scaled.
_NO_LIMIT = 2.0**1000
#: The precision that the proof is for: of doubles, and of floats.
_PROVED = ("float64", "float32")

Turns = tuple[tuple[bool, bool], tuple[bool, bool]]  #: which operands are transposed, conjugated


def takes(a: Array, b: Array, shape: tuple[int, ...], k: int, precision: str) -> bool:
    """Whether CuPy arrays are of one of the dtypes, and their product may be faster by residues."""
    known, (m, n) = FORMATS.get(a.dtype.name), shape[-2:]
    if known is None or a.dtype != b.dtype or not (known.keeps(precision) and known.pays(m, n, k)):
        return False
    # Of a graph that is captured the host cannot wait for what packing finds.
    return device_of(a.device.id).limits.capability == WGMMA and not capturing()


def gemm(
    a: Array,
    b: Array,
    shape: tuple[int, ...],
    *,
    trans: tuple[bool, bool] = (False, False),
    conj: tuple[bool, bool] = (False, False),
    alpha: float = 1.0,
    beta: float = 0.0,
    c: Array = None,
    partial: Array = None,
    lower: bool = False,
) -> Array | None:
    """D = alpha (op(A) op(B) + P) + beta C, no element of which errs by more than its bound.

    The bound is that of a sum of products in any order, (k + 2) u |A||B| before P, alpha, beta and
    C, which round once each; u = 2^-53, or 2^-24 of complex64. It holds for both parts of a complex
    number, each of which is a sum of 2 k real products.

    Parameters
    ----------
    a, b : cupy.ndarray of float64, complex128 or complex64, both of one
        Of any layout, on a GPU of compute capability 9.0; never changed.
    shape : tuple of int
        Of the result; neither it nor k is 0.
    trans : (bool, bool)
        Whether they are stored transposed.
    conj : (bool, bool)
        Whether op conjugates as well.
    alpha, beta : float
    c, partial : cupy.ndarray of the same dtype, shape (..., m, n), optional
    lower : bool
        m and n are equal, and what is above the diagonal may be anything.

    Returns
    -------
    cupy.ndarray of the same dtype, or None
        In the order of the current stream. None where the bound is not proved, where numbers are
        not finite or beyond 2^-400 and 2^400, or where memory is short.
    """
    import cupy

    more: dict[str, Any] = {"alpha": alpha, "beta": beta, "lower": lower}
    turns = trans, conj if a.dtype.kind == "c" else (False, False)
    try:
        with cupy.cuda.Device(a.device.id):
            if len(shape) == 2:
                return _matrix(a, b, turns, c=c, partial=partial, **more)
            made = cupy.empty(shape, a.dtype)
            for at, (x, y, own, p) in of_a_stack(shape[:-2], a, b, c, partial):
                one = _matrix(x, y, turns, c=own, partial=p, **more)
                if one is None:
                    return None
                made[at] = one
            return made
    except MemoryError:  # of CuPy's pool, or RMM's
        logger.warning("no memory is left for residues of %s operands: a product runs another way, "
                       "slower and with other bits", a.dtype)  # fmt: skip
        return None


def _matrix(
    a: Array, b: Array, turns: Turns, *, alpha: float, beta: float, c: Array, partial: Array,
    lower: bool,
) -> Array | None:  # fmt: skip
    """A single product, stretch after stretch of k."""
    k = a.shape[0 if turns[0][0] else 1]
    # Of much the same length: of a few elements nothing could be proved.
    stretches = [*along_k(a, b, turns[0], -(-k // -(-k // STRETCH)))]
    plain: dict[str, Any] = {"alpha": 1.0, "beta": 0.0, "c": None}
    for left, right in stretches[:-1]:
        partial = _stretch(left, right, turns, lower, partial=partial, **plain)
        if partial is None:
            return None
    last = {"alpha": alpha, "beta": beta, "c": c}
    return _stretch(*stretches[-1], turns, lower, partial=partial, **last)


def _stretch(a: Array, b: Array, turns: Turns, lower: bool, **more: Any) -> Array | None:
    import cupy

    trans, conj = turns
    summaries = cupy.zeros((2, 2, WORDS), np.uint64)  # of all rows, and of the first ones
    operands = [looked_at(a, "a", trans[0], summaries[0, 0])]
    if a is not b or trans[0] == trans[1]:
        operands.append(looked_at(b, "b", trans[1], summaries[0, 1]))
    if (made := _planes(operands, summaries)) is None:
        return None
    tiles, how = made
    left, right, count = operands[0], operands[-1], len(tiles[0])
    residues = multiplied(left, right, (tiles[0], tiles[-1]), conj=conj, lower=lower)
    tiles.clear()
    note(Choice("residues", how, f"{count} products of bytes"))
    return joined(left, right, residues, **more)


def _planes(operands: list[Operand], summaries: Array) -> tuple[list[Array], str] | None:
    """Residues of one or two operands, and what their product is proved to be; None if nothing."""
    of, k = operands[0].format, operands[0].k
    for x, summary in zip(operands, summaries[1], strict=False):
        packed(x.first_rows(summary), of.usual, norm_limit(of.system, of.usual, k))
    whole, first = summaries.get()[:, : len(operands)]
    bits = [int(whole[at, 1]) for at in (0, -1)]
    if whole[:, 0].any():
        return None
    few = fewest(of.system, sum(bits))
    if few is not None and few <= of.usual and max(bits) <= _INTEGER_BITS:
        return [packed(x, few, _NO_LIMIT) for x in operands], "exact"
    first[:, 1:3] = whole[:, 1:3]
    count = _moduli_for(operands, first, of.usual)
    while count is not None:
        limit = norm_limit(of.system, count, k)
        tiles = [packed(x, count, limit) for x in operands]
        if (wanted := _moduli_for(operands, summaries[0].get(), count)) == count:
            return tiles, _PROVED[of.single]
        tiles.clear()
        count = wanted
    return None


def _moduli_for(operands: list[Operand], words: np.ndarray[Any, Any], count: int) -> int | None:
    """How many moduli keep the bound, as far as is known of rows that are packed for `count`."""
    of, k = operands[0].format, operands[0].k
    rows = [rows_of(own, k) for own in words[: len(operands)]]
    for other in range(count, of.most + 1):
        factor = norm_limit(of.system, other, k) / norm_limit(of.system, count, k)
        scaled = [x.scaled(factor) for x in rows]
        if keeps_bound(scaled[0], scaled[-1], k * of.system.parts, of.unit):
            return other
    return None
