"""What residue_rows.cu and residue_pack.cu find and make, by NumPy and Python's integers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from multimm.gpu.residues import moduli
from multimm.gpu.residues.certificate import LEVELS, Rows
from multimm.gpu.residues.formats import FORMATS, Format
from multimm.gpu.residues.moduli import System

_REST = 2**64 - 1
_NO_BIT = 1 << 20


def _bits(x: float) -> int:
    return int(np.float64(x).view(np.uint64))


def summary(
    *, refused: int = 0, bits: int = 0, sum: float = 0.0, rounded: int = 0,
    norm: float | None = None, large: tuple[int, ...] | None = None,
) -> np.ndarray:  # fmt: skip
    """The words of a summary: minima are complements, of which 0 says that there is none."""
    least = [None if norm is None else _bits(norm), *(large or (None,) * 3)]
    complements = [0 if x is None else _REST ^ x for x in least]
    return np.array([refused, bits, _bits(sum), rounded, *complements], np.uint64)


@dataclass
class LookedAt:
    """What is known of rows before they are scaled."""

    squares: np.ndarray
    lowest: np.ndarray
    refused: int
    bits: int
    sum: float


def format_of(x: np.ndarray) -> Format:
    """How an array's products run."""
    return FORMATS[x.dtype.name]


def doubles(x: np.ndarray) -> np.ndarray:
    """Elements' parts along another axis, shape (rows, k, parts)."""
    wide = x.astype("f8" if x.dtype.kind == "f" else "c16")
    return wide.view("f8").reshape(*x.shape, -1)


def looked_at(x: np.ndarray, lanes: int) -> LookedAt:
    """As residue_rows.cu does, to the bit, where `lanes` threads share a row (256, or 32 warps)."""
    x = doubles(x)
    squares, lowest = np.empty(len(x)), np.empty(len(x), np.int32)
    refused, bits, largest_sum = 0, 0, 0.0
    for r, row in enumerate(x):
        squares[r], total = _sums(row, lanes)
        lowest[r] = _lowest_bits(row[row != 0]).min(initial=_NO_BIT)
        largest = np.abs(row).max(initial=0)
        if largest == 0:
            continue
        if not 2.0**-400 <= largest < 2.0**401:  # NaNs, too
            refused = 1
            continue
        norm = norm_of(squares[r])
        bits = max(bits, math.frexp(norm)[1] - int(lowest[r]))
        largest_sum = max(largest_sum, total / norm * (1 + 2.0**-19))
    return LookedAt(squares, lowest, refused, bits, largest_sum)


def norm_of(squares: float) -> float:
    """A little more than the root."""
    return float(math.sqrt(squares) * (1 + 2.0**-20))


def _square_added(x: float, z: float) -> float:
    """x x + z, rounded once."""
    square = x * x
    if not (2.0**-960 < square < 2.0**1020 and z < 2.0**1020):
        return z if not math.isfinite(z) else _rounded(Fraction(x) ** 2 + Fraction(z))
    # What rounding took from the square: Dekker, A floating-point technique (1971).
    high = 134217729.0 * x - (134217729.0 * x - x)
    low = x - high
    lost = low * low - ((square - high * high) - 2 * high * low)
    return math.fsum((square, lost, z))


def _rounded(x: Fraction) -> float:
    try:
        return float(x)
    except OverflowError:
        return math.inf


def _lowest_bits(x: np.ndarray) -> np.ndarray:
    fractions, exponents = np.frexp(np.where(np.isfinite(x), x, 1))
    numbers = np.ldexp(fractions, 53).astype(np.int64)
    found = exponents - 54 + np.frexp((numbers & -numbers).astype("f8"))[1]
    return np.select([np.isnan(x), np.isinf(x)], [1023, 1024], found)  # of these nobody asks it


def _sums(row: np.ndarray, lanes: int) -> tuple[float, float]:
    """Of squares and of sizes: a thread's, a warp's in pairs, then one warp after the other."""
    if not np.isfinite(row).all():
        return (math.nan if np.isnan(row).any() else math.inf), 0.0
    parts = []
    for lane in range(lanes):
        square, size = 0.0, 0.0
        for value in row[lane::lanes].ravel().tolist():
            if value:
                square = _square_added(value, square)
                size += abs(value)
        parts.append((square, size))
    both = np.array(parts).T
    if lanes > 32:
        warps = both.reshape(2, -1, 32)
        while warps.shape[-1] > 1:
            warps = warps[..., ::2] + warps[..., 1::2]
        both = warps[..., 0]
    total = both[:, 0]
    for other in both.T[1:]:
        total = total + other
    return float(total[0]), float(total[1])


@dataclass
class Packed:
    """Rows as integers, and these as tiles of bytes."""

    integers: np.ndarray  #: Python's, shape (parts, rows, k)
    scales: np.ndarray
    large: np.ndarray
    rounded: int
    norm: float | None  #: of rounded rows, the smallest
    fewest: tuple[int, ...] | None
    tiles: np.ndarray
    blocks: int


def packed(x: np.ndarray, found: LookedAt, count: int, limit: float) -> Packed:
    """As residue_pack.cu does, of `count` moduli."""
    of, (rows, k) = format_of(x), x.shape
    system = of.system
    parts = np.moveaxis(doubles(x), -1, 0)
    integers = np.zeros(parts.shape, object)
    scales, counts = np.zeros(rows, np.int32), np.zeros((system.parts, rows, 3), object)
    norms = []
    for r in range(rows):
        if not found.squares[r]:
            continue
        norm, low = norm_of(found.squares[r]), int(found.lowest[r])
        with np.errstate(over="ignore"):
            ratio = float(np.float64(limit) / norm)
        scale = min(-low, math.frexp(ratio)[1] - 1 if ratio < math.inf else 1024)
        scales[r], norm = scale, math.ldexp(norm, scale)
        if scale < -low:
            norms.append(norm)
        mean = norm / math.sqrt(k * system.parts)
        for part in range(system.parts):
            own = [round(math.ldexp(value, scale)) for value in parts[part, r].tolist()]
            integers[part, r] = own
            counts[part, r] = [sum(abs(z) >= mean * level for z in own) for level in LEVELS]
    own = counts[:, found.squares != 0].reshape(-1, 3)
    panels, slabs = -(-rows // 128) * 2, -(-k // 128)
    planes = np.zeros((system.parts * count, panels * 64, slabs * 128), np.uint8)
    planes[:, :rows, :k] = residues(system, integers, count) & 255
    return Packed(
        integers, scales,
        np.array([a + (b << 21) + (c << 42) for a, b, c in counts.reshape(-1, 3)], np.uint64),
        int(bool(norms)), min(norms, default=None),
        tuple(map(min, own.T)) if len(own) else None, in_tiles(planes.view(np.int8)),
        panels * slabs,
    )  # fmt: skip


def in_tiles(planes: np.ndarray) -> np.ndarray:
    """Tiles of 64 x 128 bytes: element (r, c) lies at byte 128 r + (c ^ 16 (r % 8))."""
    count, height, width = planes.shape
    tiles = planes.reshape(count, height // 64, 64, width // 128, 128).swapaxes(2, 3)
    r, c = np.ogrid[:64, :128]
    swizzled = np.empty_like(tiles)
    swizzled[..., r, c ^ 16 * (r % 8)] = tiles
    return swizzled.reshape(-1)


def statistics(found: LookedAt, made: Packed) -> Rows:
    """What the host knows of an operand's rows."""
    shares = tuple(few / made.integers.shape[-1] for few in made.fewest)
    return Rows(bool(made.rounded), made.norm or 0.0, found.sum, shares)


def residues(system: System, parts: Sequence[np.ndarray], count: int) -> np.ndarray:
    """The residues of Python's integers, nearest to 0: a plane or two for each modulus.

    `parts` are one array of integers, or the real and the imaginary ones.
    """
    planes = []
    for at, modulus in enumerate(system.moduli[:count]):
        numbers = [parts[0]]
        if system.roots:
            turned = system.roots[at] * parts[1]
            numbers = [parts[0] + turned, parts[0] - turned]
        for number in numbers:
            rest = number % modulus
            planes.append(np.where(2 * rest > modulus, rest - modulus, rest))
    return np.array(planes, dtype=object)


def joined(system: System, planes: np.ndarray) -> list[np.ndarray]:
    """The opposite: parts between -P / 2 and P / 2, from their residues."""
    count = len(planes) // system.parts
    whole = moduli.product_of(system, count)
    totals: list[np.ndarray] = []
    for part in range(system.parts):
        total = 0
        for at in range(count):
            own = planes[system.parts * at].astype(object)
            if system.roots:
                other = planes[2 * at + 1].astype(object)
                own = own - other if part else own + other
            total = total + own * moduli._weight(system, whole, part, at)
        total = total % whole
        totals.append(np.where(2 * total > whole, total - whole, total))
    return totals
