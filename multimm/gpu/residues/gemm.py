"""Products of float64, complex128 and complex64 by residues: when, and with how many moduli.

Rows become integers, and these are known by their remainders for some moduli: products of bytes,
which INT8 tensor cores sum exactly. The host waits for the GPU twice: for the number of moduli, and
for the proof that no element errs by more than its bound (`certificate`). Before all rows are
packed, a few are: data for which these prove nothing costs little. One kernel after the other:

residue_rows   how large the rows of an operand are, and how many bits they have
residue_pack   each row as integers, and these as bytes: a plane for each modulus, or two
byte_mma       products of bytes, all planes in one launch
residue_join   integers from their residues, and numbers from these

Source: Ozaki, Uchino, Imamura, "Ozaki Scheme II: A GEMM-oriented emulation of floating-point matrix
multiplication using an integer modular technique" (2025). The proof is our own.
"""

from __future__ import annotations

import functools
import logging
from typing import Any, NamedTuple

import numpy as np

from multimm.gpu import byte_products
from multimm.gpu.byte_products import COLUMNS, ROWS, TILE_BYTES
from multimm.gpu.emulated.configs import WGMMA
from multimm.gpu.emulated.pack import source_of
from multimm.gpu.kernel_selection import Choice, note
from multimm.gpu.residues.certificate import Rows, keeps_bound
from multimm.gpu.residues.formats import FORMATS, Format
from multimm.gpu.residues.moduli import COMPLEX, MOST, System, fewest, norm_limit, weights
from multimm.gpu.runtime.launch import by_value, device_of, kernel_for
from multimm.gpu.runtime.workspace import capturing
from multimm.gpu.subproducts import along_k, of_a_stack

logger = logging.getLogger(__name__)

Array = Any
Void = np.ndarray[Any, Any]

#: Bits of the integers that residue_pack.cu takes apart.
_INTEGER_BITS = 62
#: Further than any row is scaled.
_NO_LIMIT = 2.0**1000
#: The precision that the proof is for: of doubles, and of floats.
_PROVED = ("float64", "float32")

Turns = tuple[tuple[bool, bool], tuple[bool, bool]]  #: which operands are transposed, conjugated
#: The longest k of a launch.
STRETCH = 2**15
#: Threads of a block: usual ones, and those of residue_rows.cu across rows.
_THREADS, _ACROSS = 256, 1024
#: Rows of a thread block of residue_join.cu, its columns, and rows of its grid.
_JOINED_ROWS, _JOINED_COLUMNS, _MOST_ROWS = 8, 128, 1024
#: 64-bit words of a summary (kernels/common/residues.cuh), and which of them packing writes.
WORDS, _BY_PACKING = 8, slice(3, 8)
#: Files, their compile-time parameters, and whether instructions are those of one chip alone: of
#: float64. What complex numbers need besides is compiled when they are met.
KERNELS = (
    *(("byte_mma.cu", byte_products.defines(lower=lower), True) for lower in (False, True)),
    *((f"residue_{name}.cu", (("ALONG_K", along), *FORMATS["float64"].defines), False)
      for name in ("rows", "pack") for along in (0, 1)),
    ("residue_join.cu", FORMATS["float64"].defines, False),
)  # fmt: skip


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


class Operand(NamedTuple):
    """A matrix whose rows lie along k, op(A) or the transpose of op(B), and what is known of it."""

    x: Array
    address: int
    ld: int
    along_k: bool  #: in memory
    rows: int
    k: int
    format: Format
    squares: Array  #: of each row: the sum
    lowest: Array  #: the lowest bit
    scales: Array
    large: Array
    summary: Array  #: of all rows

    @property
    def panels(self) -> int:
        """Tiles along the rows."""
        return byte_products.panels(self.rows)

    @property
    def slabs(self) -> int:
        """Tiles along k."""
        return byte_products.slabs(self.k)

    @property
    def defines(self) -> tuple[tuple[str, int], ...]:
        """The parameters of kernels that read it."""
        return (("ALONG_K", int(self.along_k)), *self.format.defines)

    def first_rows(self, summary: Array) -> Operand:
        """A few of its rows: what is found of them goes elsewhere."""
        return self._replace(rows=min(self.rows, ROWS), summary=summary)


def looked_at(x: Array, side: str, trans: bool, summary: Array) -> Operand:
    """An operand, once residue_rows has seen it; `summary` holds zeros before."""
    import cupy

    of = FORMATS[x.dtype.name]
    x, source = source_of(x, side, trans)
    rows, stack = source.rows, source.stack
    found = Operand(
        x, stack.pointer, stack.ld, source.along_k, rows, source.k, of, cupy.empty(rows),
        cupy.empty(rows, np.int32), cupy.empty(rows, np.int32),
        cupy.empty(of.system.parts * rows, np.uint64), summary,
    )  # fmt: skip
    kernel = kernel_for(x.device.id, "residue_rows.cu", "residue_rows", found.defines)
    grid, threads = (rows, _THREADS) if found.along_k else (-(-rows // 32), _ACROSS)
    kernel((grid, 1, 1), (threads, 1, 1), (
        found.address, found.ld, rows, found.k, found.squares.data.ptr, found.lowest.data.ptr,
        summary.data.ptr,
    ))  # fmt: skip
    return found


def packed(x: Operand, count: int, limit: float) -> Array:
    """The planes of an operand's residues, for so many moduli."""
    import cupy

    planes = count * x.format.system.parts
    tiles = cupy.empty((planes, x.panels * x.slabs * TILE_BYTES), np.int8)
    x.large.fill(0)
    x.summary[_BY_PACKING] = 0
    device = tiles.device.id
    kernel = kernel_for(device, "residue_pack.cu", "residue_pack", x.defines)
    kernel((x.panels * x.slabs, 1, 1), (_THREADS, 1, 1), (
        x.address, x.ld, x.rows, x.k, x.squares.data.ptr, x.lowest.data.ptr, np.float64(limit),
        np.int32(count), _moduli_of_packing(x.format.system), tiles.data.ptr, x.scales.data.ptr,
        x.large.data.ptr, x.summary.data.ptr,
    ))  # fmt: skip
    kernel = kernel_for(device, "residue_pack.cu", "residue_fewest", x.defines)
    kernel((min(-(-x.rows // _THREADS), 64), 1, 1), (_THREADS, 1, 1), (
        x.rows, x.squares.data.ptr, x.large.data.ptr, x.summary.data.ptr,
    ))  # fmt: skip
    return tiles


def rows_of(words: Void, k: int) -> Rows:
    """What a summary says, once the operand is packed."""
    least = ~words
    (most,), (norm,) = words[2:3].view(np.float64), least[4:5].view(np.float64)
    return Rows(bool(words[3]), float(norm), float(most), tuple(float(x) / k for x in least[5:]))


def multiplied(
    a: Operand, b: Operand, tiles: tuple[Array, Array], *,
    conj: tuple[bool, bool] = (False, False), lower: bool = False,
) -> Array:  # fmt: skip
    """Residues of A B': shape (planes, rows, columns), of which m rows and n columns count.

    `conj`: whose conjugates are multiplied. `lower`: what is above the diagonal may be anything.
    """
    import cupy

    m, n, count = a.rows, b.rows, len(tiles[0])
    made = cupy.empty((count, -(-m // ROWS) * ROWS, -(-n // COLUMNS) * COLUMNS), np.uint8)
    arguments = (
        a.slabs, np.int32(count), _moduli_of_products(a.format.system), tiles[0].data.ptr,
        np.int32(conj[0]), tiles[1].data.ptr, np.int32(conj[1]), made.data.ptr, made.shape[2],
    )  # fmt: skip
    byte_products.launch(made.device.id, m, n, count, arguments, lower=lower)
    return made


def joined(
    a: Operand, b: Operand, residues: Array, *, alpha: float, beta: float, c: Array, partial: Array
) -> Array:
    """D = alpha (A B' + P) + beta C, of residues of A B'."""
    import cupy

    m, n, system = a.rows, b.rows, a.format.system
    d = cupy.empty((m, n), a.x.dtype)
    p, added = (None if x is None else cupy.ascontiguousarray(x, d.dtype) for x in (partial, c))
    kernel = kernel_for(d.device.id, "residue_join.cu", "residue_join", a.format.defines)
    grid = -(-n // _JOINED_COLUMNS), min(-(-m // _JOINED_ROWS), _MOST_ROWS), 1
    planes, height, width = residues.shape
    count = planes // system.parts
    kernel(grid, (_THREADS, 1, 1), (
        m, n, np.int32(count), _weights(system, count), residues.data.ptr, height * width, width,
        a.scales.data.ptr, b.scales.data.ptr, np.float64(alpha), np.float64(beta),
        0 if p is None else p.data.ptr, n, 0 if added is None else added.data.ptr, n, d.data.ptr, n,
    ))  # fmt: skip
    return d


# What kernels take by value is the same in each launch.
@functools.cache
def _moduli_of_packing(system: System) -> Void:
    moduli = system.moduli
    roots = system.roots or (0,) * MOST
    inverses, halves = [1 / x for x in moduli], [2**28 % x for x in moduli]
    return by_value(np.array([*moduli, *inverses, *halves, *roots], np.float64))


@functools.cache
def _moduli_of_products(system: System) -> Void:
    of_planes = np.ones(COMPLEX.parts * MOST, np.int32)
    given = np.repeat(system.moduli, system.parts)
    of_planes[: len(given)] = given
    inverses = (1 / of_planes).astype(np.float32)
    return by_value(np.concatenate([of_planes, inverses.view(np.int32)]))


@functools.cache
def _weights(system: System, count: int) -> Void:
    parts, whole, inverse = weights(system, count)
    limbs = np.zeros((system.parts, MOST, len(whole)))
    limbs[:, :count] = parts
    return by_value(np.array([*limbs.flat, *whole, inverse]))
