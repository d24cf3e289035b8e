"""Cases for split_residuals.cu, bit by bit: the order of its sums is modelled."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
from pack_reference import PackedReference, joined, pack_reference, split

from cuda_on_cpu.operands import Operand, placed
from cuda_on_cpu.packing import THREADS, places
from cuda_on_cpu.products import Case
from cuda_on_cpu.program import Buffer, Launch, Pointer

#: m, n, k, and how many elements of A and of B are to be too small for their rows.
_SHAPES = (
    (1, 1, 3, 1, 0),
    (70, 66, 66, 9, 12),
    (64, 64, 200, 0, 7),
    (129, 5, 64, 20, 0),
    (3, 190, 130, 0, 0),
    (66, 67, 68, 33, 38),
)
_BIG = np.float32(2.0**29)


def operand(rows: int, k: int, tiny: int, big_at: int, rng: np.random.Generator) -> np.ndarray:
    """Small integers, every row with one large element that few others are too small for."""
    x = rng.integers(-3, 4, (rows, k)).astype(np.float32) * 64
    x[:, big_at] = _BIG
    at = rng.choice(rows * (k - 2), min(tiny, rows * (k - 2)), replace=False)
    x[at // (k - 2), at % (k - 2) + 2] = rng.choice([-1.0, 1.0], len(at))
    if tiny > 3 and rows > 5:  # sums of these depend on their order: by k, and R before S
        huge = 2.0**24
        x[1, 2:5] = (1, 1, 1) if big_at == 0 else (huge, 1, -huge)
        x[2:6, 2:5] = (1, 0, -huge) if big_at == 0 else (huge, 0, 1)
    return x


def residual_cases(defines: Mapping[str, int]) -> Iterator[Case]:
    """Products that lack what the parts do not carry, and some that are refused."""
    for seed, (m, n, k, tiny_a, tiny_b) in enumerate(_SHAPES):
        rng = np.random.default_rng(seed)
        x, y = operand(m, k, tiny_a, 0, rng), operand(n, k, tiny_b, 1, rng)
        yield from _overflows(x, y, seed, defines)
        yield from _largest(m, n, k, seed, defines)
        packed = [pack_reference(z, defines["PARTS"]) for z in (x, y)]
        assert max(z.uncarried for z in packed) <= defines["CAP"]
        before = rng.integers(-5, 6, (1, m, n)).astype(np.float32)
        before[0, 1:6, 1:6] = 1
        for refused in (None, False, True):
            alpha = np.float32((-2.0, 1.0)[seed % 2])
            d = placed((1, m, n), "f4", extra=seed, offset=seed % 3).holding(before)
            after = before[0] if refused else _added(before[0], x, y, packed, alpha, defines)
            yield _case((m, n, k), alpha, packed, d, d.holding(after[None]), refused, seed, defines)


def _overflows(
    x: np.ndarray, y: np.ndarray, seed: int, defines: Mapping[str, int]
) -> Iterator[Case]:
    """D and sums of residuals of any sign, either infinite: what D has is not made a NaN."""
    x, y = (z * np.float32(2.0**61) for z in (x, y))
    packed = [pack_reference(z, defines["PARTS"]) for z in (x, y)]
    values = np.array([-np.inf, np.inf, np.nan, 0, 1], "f4")
    d = np.random.default_rng(seed).choice(values, (1, len(x), len(y)))
    for alpha in map(np.float32, (1.0, -2.0, np.inf)):
        before = d if alpha < np.inf else np.where(np.isfinite(d), np.float32(np.inf), d)
        given = placed(before.shape, "f4").holding(before)
        after = _added(before[0], x, y, packed, alpha, defines)
        assert (np.isnan(after) == np.isnan(before[0])).all()
        sizes = len(x), len(y), x.shape[1]
        yield _case(sizes, alpha, packed, given, given.holding(after[None]), None, seed, defines)


def _largest(m: int, n: int, k: int, seed: int, defines: Mapping[str, int]) -> Iterator[Case]:
    """Residuals meet elements that one part rounds up to 2^128: every sum is far from that."""
    most = np.finfo(np.float32).max
    rng = np.random.default_rng(seed)
    x, y = np.zeros((m, k), np.float32), np.zeros((n, k), np.float32)
    x[:, 0] = 1
    x[:20, 1:3] = rng.choice([-1e-10, 1e-10], x[:20, 1:3].shape)
    y[:, 1:3] = rng.choice([-most, most], (n, 2))
    for one, other in ((x, y), (y, x)):
        packed = [pack_reference(z, defines["PARTS"]) for z in (one, other)]
        sizes = len(one), len(other), k
        before = rng.integers(-5, 6, (1, *sizes[:2])).astype(np.float32)
        after = _added(before[0], one, other, packed, np.float32(1), defines)
        assert np.isfinite(after).all()
        d = placed(before.shape, "f4").holding(before)
        yield _case(sizes, np.float32(1), packed, d, d.holding(after[None]), None, seed, defines)


def _case(
    sizes: tuple[int, int, int], alpha: np.float32, packed: list[PackedReference], d: Operand,
    after: Operand, refused: bool | None, seed: int, defines: Mapping[str, int],
) -> Case:  # fmt: skip
    buffers: list[Buffer] = []
    arguments: list[object] = [*sizes, float(alpha)]
    for z in packed:
        shuffled = z.residuals[np.random.default_rng(seed).permutation(z.uncarried)]
        lists = np.zeros(defines["CAP"], np.uint64), np.zeros(defines["CAP"], np.float32)
        lists[0][: z.uncarried], lists[1][: z.uncarried] = places(shuffled), shuffled["value"]
        first = len(buffers)
        tiles = z.tiles.reshape(-1).view(np.uint16)
        buffers += map(Buffer.of, (tiles, z.exponents, *lists))
        known = z.uncarried if refused is None else 0
        arguments += [Pointer(first), Pointer(first + 1), known, Pointer(first + 2),
                      Pointer(first + 3)]  # fmt: skip
    counts = [bool(refused), packed[0].uncarried, 0, packed[1].uncarried, 0, 0]
    buffers += [d.buffer, Buffer.of(np.array(counts, np.uint64))]
    pointer, ldd, _ = d.arguments(len(buffers) - 2)
    arguments += [pointer, ldd, None if refused is None else Pointer(len(buffers) - 1)]
    launch = Launch(
        "split_residuals", (3, 1, 1), THREADS, arguments, buffers, seed=seed,
        what=f"split_residuals {sizes} refused={refused}",
    )  # fmt: skip
    return Case(launch, [*buffers[:-2], after.buffer, buffers[-1]])


def _added(
    d: np.ndarray, x: np.ndarray, y: np.ndarray, packed: list[PackedReference], alpha: np.float32,
    defines: Mapping[str, int],
) -> np.ndarray:  # fmt: skip
    """D with R B and then A' S added to it, line by line, in the order of k."""
    d = d.copy()
    parts_a, parts_b = (split(z, defines["PARTS"]) for z in (x, y))
    a, b = np.where(parts_a.rest != 0, np.float32(0), joined(parts_a)), joined(parts_b)
    for listed, other, lines in ((packed[0].residuals, b, d), (packed[1].residuals, a, d.T)):
        for line in np.unique(listed["row"]):
            total = np.zeros(len(other), np.float32)
            for entry in listed[listed["row"] == line]:
                total = _fma(entry["value"], other[:, entry["k"]], total)
            finite = np.isfinite(lines[line])
            lines[line, finite] = _fma(alpha, total[finite], lines[line, finite])
    return d


def _fma(x: np.float32, y: np.ndarray, z: np.ndarray) -> np.ndarray:
    """One rounding: products of float32 are exact in float64, and so are these sums."""
    with np.errstate(over="ignore", invalid="ignore"):
        return (np.float64(x) * y.astype("f8") + z.astype("f8")).astype("f4")
