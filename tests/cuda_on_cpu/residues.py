"""Cases for residue_rows.cu, residue_pack.cu and residue_join.cu, against Python's integers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import numpy as np
from residue_reference import looked_at, packed, summary

from cuda_on_cpu.operands import Operand, placed
from cuda_on_cpu.products import Case
from cuda_on_cpu.program import Buffer, Launch, Pointer, Struct
from multimm.gpu.residues.moduli import MODULI, norm_limit, product_of, residues, weights

THREADS = 256
#: Rows, k, and what the lines are longer by; elements in front.
_SHAPES = ((1, 1, 0, 0), (3, 17, 5, 1), (130, 129, 2, 3), (33, 300, 0, 1), (70, 1100, 1, 0))


def stored(x: np.ndarray, along_k: bool, extra: int, offset: int) -> Operand:
    """Rows in lines, or across them."""
    lines = x if along_k else x.T
    return placed((1, *lines.shape), "f8", extra=extra, offset=offset).holding(lines[None])


def _matrices() -> Iterator[tuple[str, np.ndarray, int, int]]:
    """Rows of many kinds, all to be taken."""
    for seed, (rows, k, extra, offset) in enumerate(_SHAPES):
        rng = np.random.default_rng(seed)
        normal = rng.standard_normal((rows, k))
        yield "normal", normal, extra, offset
        yield "integers", rng.integers(-99, 100, (rows, k)).astype(float), extra, offset
    mixed = np.ldexp(rng.standard_normal((40, 150)), rng.integers(-300, 300, (40, 1)))
    mixed[::7] = 0  # whole rows
    mixed[3] = np.ldexp(rng.integers(-9, 9, 150).astype(float), -350)
    mixed[5] = np.where(np.arange(150) == 149, -(2.0**399), 0)
    mixed[6, 100:] = 5e-324  # beside it no row is an integer of few bits
    yield "mixed", mixed, 3, 1
    yield "zeros", np.zeros((5, 140)), 0, 0


def row_cases(along_k: bool) -> Iterator[Case]:
    """Rows that are taken, and matrices with a row that is refused."""
    seed = 0
    for what, x, extra, offset in _matrices():
        yield _row_case(what, x, stored(x, along_k, extra, offset), along_k, seed := seed + 1)
    for odd in (np.inf, -np.inf, np.nan, 1e-200, 1e200):
        x = np.random.default_rng(1).standard_normal((35, 40))
        x[34] = np.where(np.arange(40) == 39, odd, 0)
        x[:3] = 0
        yield _row_case(f"{odd}", x, stored(x, along_k, 1, 0), along_k, seed := seed + 1)


def _row_case(what: str, x: np.ndarray, given: Operand, along_k: bool, seed: int) -> Case:
    rows, k = x.shape
    found = looked_at(x, THREADS if along_k else 32)
    pointer, ld, _ = given.arguments(0)
    before = [given.buffer, Buffer.of(np.full(rows, np.nan)), Buffer.of(np.full(rows, 7, "i4")),
              Buffer.of(summary())]  # fmt: skip
    words = summary(refused=found.refused, bits=found.bits, sum=found.sum)
    grid, threads = (rows, THREADS) if along_k else (-(-rows // 32), 1024)
    launch = Launch(
        "residue_rows", (grid, 1, 1), threads,
        [pointer, ld, rows, k, Pointer(1), Pointer(2), Pointer(3)], before, seed=seed,
        what=f"residue_rows {rows} x {k}, {what}, {along_k=}",
    )  # fmt: skip
    after = [before[0], *map(Buffer.of, (found.squares, found.lowest, words))]
    return Case(launch, after)


def residue_pack_cases(along_k: bool) -> Iterator[Case]:
    """Of all rows that are taken: rounded for one modulus, for 14 and 16, and not at all."""
    for seed, (what, x, extra, offset) in enumerate(_matrices()):
        exact = what in ("integers", "zeros")
        for count in (1, 14, 16) if x.size < 9999 else (2,):
            limit = norm_limit(count, x.shape[1]) if count > 2 else 2.0**30
            if exact and count == 14:
                limit = 2.0**1000
            given = stored(x, along_k, extra, offset)
            yield from _pack_case(f"{what}, {count} moduli", x, given, count, limit, seed)
    wide = np.random.default_rng(3).integers(-(2**52), 2**52, (5, 130)) * 2.0**9  # 62 bits
    wide[:, 0] = 2.0**9
    yield from _pack_case("62 bits", wide, stored(wide, along_k, 0, 1), 16, 2.0**1000, 5)
    half = np.array([[0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 127.5, -127.5, 128, -128, 4.0]])
    whole = math.sqrt(float(half[0] @ half[0])) * 1.5
    yield from _pack_case("ties", half, stored(half, along_k, 0, 0), 3, whole, 6)
    yield _fewest_case()


def _fewest_case() -> Case:
    """More rows than threads, zeros among them."""
    rng = np.random.default_rng(7)
    squares, counts = rng.uniform(1, 2, 700), rng.integers(2**14, 2**15, (700, 3))
    squares[690], counts[690], counts[[3, 400, 699], [0, 1, 2]] = 0, 0, (5, 6, 7)
    large = (counts << np.array([0, 21, 42])).sum(axis=1).astype(np.uint64)
    buffers = [*map(Buffer.of, (squares, large, summary()))]
    launch = Launch("residue_fewest", (1, 1, 1), THREADS, [700, *map(Pointer, range(3))], buffers,
                    what="residue_fewest of 700 rows")  # fmt: skip
    return Case(launch, [*buffers[:2], Buffer.of(summary(large=(5, 6, 7)))])


def _pack_case(
    what: str, x: np.ndarray, given: Operand, count: int, limit: float, seed: int
) -> Iterator[Case]:
    rows, k = x.shape
    found = looked_at(x, THREADS)
    made = packed(x, found, count, limit)
    pointer, ld, _ = given.arguments(0)
    doubles = [*MODULI, *(1 / p for p in MODULI), *(float(2**28 % p) for p in MODULI)]
    moduli = Struct(tuple(np.array(doubles, "f8").view("i8").tolist()))
    looked: dict[str, Any] = {"bits": found.bits, "sum": found.sum}
    zeros = np.zeros(rows, np.uint64)
    before = [*map(Buffer.of, (given.memory, found.squares, found.lowest,
                               np.full_like(made.tiles, 0x55), np.full(rows, 7, "i4"), zeros,
                               summary(**looked)))]  # fmt: skip
    launch = Launch(
        "residue_pack", (made.blocks, 1, 1), THREADS,
        [pointer, ld, rows, k, Pointer(1), Pointer(2), limit, count, moduli, Pointer(3),
         Pointer(4), Pointer(5), Pointer(6)], before, seed=seed,
        what=f"residue_pack {rows} x {k}, {what}",
    )  # fmt: skip
    looked |= {"rounded": made.rounded, "norm": made.norm}
    told = summary(**looked)
    after = [*before[:3], *map(Buffer.of, (made.tiles, made.scales, made.large, told))]
    yield Case(launch, after)
    given_to_it = [Buffer.of(found.squares), Buffer.of(made.large), Buffer.of(told)]
    launch = Launch(
        "residue_fewest", (min(2, -(-rows // 64)), 1, 1), THREADS,
        [rows, Pointer(0), Pointer(1), Pointer(2)], given_to_it, seed=seed,
        what=f"residue_fewest of {rows} rows, {what}",
    )  # fmt: skip
    yield Case(launch, [*given_to_it[:2], Buffer.of(summary(**looked, large=made.fewest))])


#: m, n, how many moduli, alpha, beta, P, C, and what rows of P, C and D are longer by.
_JOINED = (
    (1, 1, 1, 1.0, 0.0, False, False, 0),
    (9, 130, 2, 1.0, 0.0, False, False, 0),
    (17, 5, 2, -0.5, 3.0, True, True, 1),
    (8, 128, 3, 1.0, 1.0, True, False, 2),
    (20, 257, 8, 0.1, 0.7, False, True, 3),
    (9, 1031, 14, 2.0, 0.5, True, True, 1),
    (11, 131, 14, 1.0, 0.0, False, False, 0),
    (5, 200, 14, 1.1, -0.3, True, True, 5),
    (3, 64, 15, 1.0, 2.0, True, True, 0),
    (10, 133, 16, -1.0, 0.0, True, False, 1),
)


def join_cases() -> Iterator[Case]:
    """Integers up to the ends of what residues tell apart; scalars, P and C, given or not."""
    for seed, case in enumerate(_JOINED):
        yield _join_case(*case, seed=seed)


def _join_case(
    m: int, n: int, count: int, alpha: float, beta: float, has_p: bool, has_c: bool, extra: int,
    *, seed: int,
) -> Case:  # fmt: skip
    rng = np.random.default_rng(seed)
    most = int(product_of(count) // 2 * (1 - 2.0**-15))
    numbers = [int(Fraction(share) * most) for share in rng.uniform(-1, 1, m * n).tolist()]
    edges = (most, -most, 0, 1, -1, most // 2**40, -most + 1, -(most >> 30))
    for at, edge in zip(rng.permutation(m * n).tolist(), edges, strict=False):
        numbers[at] = edge
    whole = np.array(numbers, object).reshape(m, n)
    ldr, height = -(-n // 256) * 256, m + 3
    planes = np.full((count, height, ldr), 0x80, np.uint8)
    planes[:, :m, :n] = (residues(whole, count) & 255).astype(np.uint8)
    s, t = (rng.integers(-100, 100, size).astype("i4") for size in (m, n))
    s[0] = t[0] = 454 if seed % 2 else -400
    each, product, inverse = weights(count)
    flat = [limb for one in each for limb in one] + [0.0] * 3 * (len(MODULI) - count)
    struct = Struct(tuple(np.array([*flat, *product, inverse], "f8").view("i8").tolist()))
    p, c, d = (placed((1, m, n), "f8", extra=extra, offset=seed % 2) for _ in "pcd")
    p, c = (z.holding(np.ldexp(rng.standard_normal((1, m, n)), 20)) for z in (p, c))
    buffers = [*map(Buffer.of, (planes.reshape(-1), s, t)), p.buffer, c.buffer, d.buffer]
    to_p, ldp, _ = p.arguments(3)
    to_c, ldc, _ = c.arguments(4)
    to_d, ldd, _ = d.arguments(5)
    launch = Launch(
        "residue_join", (-(-n // 128), min(2, -(-m // 8)), 1), THREADS,
        [m, n, count, struct, Pointer(0), height * ldr, ldr, Pointer(1), Pointer(2), alpha, beta,
         to_p if has_p else None, ldp, to_c if has_c else None, ldc, to_d, ldd], buffers,
        seed=seed, what=f"residue_join {m} x {n} of {count} moduli, P: {has_p}, C: {has_c}",
    )  # fmt: skip
    made = np.empty((m, n))
    for row, col in np.ndindex(m, n):
        value = float(Fraction(whole[row, col]) * Fraction(2) ** -int(s[row] + t[col]))
        value = (value + p.view[0, row, col] if has_p else value) * alpha
        if has_c:
            value = float(Fraction(beta) * Fraction(c.view[0, row, col]) + Fraction(value))
        made[row, col] = value
    return Case(launch, [*buffers[:5], d.holding(made[None]).buffer])
