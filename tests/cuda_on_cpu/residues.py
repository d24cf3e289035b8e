"""Cases for residue_rows.cu, residue_pack.cu and residue_join.cu, against Python's integers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import numpy as np
from residue_reference import LookedAt, format_of, looked_at, packed, residues, summary

from cuda_on_cpu.operands import Operand, placed
from cuda_on_cpu.products import Case
from cuda_on_cpu.program import Buffer, Launch, Pointer, Struct
from multimm.gpu.residues.formats import FORMATS
from multimm.gpu.residues.moduli import MOST, norm_limit, product_of, weights

THREADS = 256
#: Rows, k, and what the lines are longer by; elements in front.
_SHAPES = ((1, 1, 0, 0), (3, 17, 5, 1), (130, 129, 2, 3), (33, 300, 0, 1), (5, 1100, 1, 0))


def reals(x: np.ndarray) -> np.ndarray:
    """A complex matrix as twice as many columns of real numbers."""
    return np.ascontiguousarray(x).view(x.real.dtype)


def stored(x: np.ndarray, along_k: bool, extra: int, offset: int) -> Operand:
    """Rows in lines, or across them; of real numbers, `offset` of which lie in front."""
    lines, parts = reals(x if along_k else x.T), format_of(x).system.parts
    empty = placed((1, *lines.shape), lines.dtype.str[1:], extra=parts * extra, offset=offset)
    return empty.holding(lines[None])


def _matrices(dtype: str) -> Iterator[tuple[str, np.ndarray, int, int]]:
    """Rows of many kinds, all to be taken."""
    parts, single = FORMATS[dtype].system.parts, FORMATS[dtype].single

    def made(x: np.ndarray) -> np.ndarray:
        return x.astype("f4" if single else "f8").view(dtype)

    # Of complex numbers what their parts add to it.
    for seed, (rows, k, extra, offset) in enumerate(_SHAPES if parts == 1 else _SHAPES[1:4]):
        rng = np.random.default_rng(seed)
        normal = rng.standard_normal((rows, k * parts))
        yield "normal", made(normal), extra, offset
        if rows < 99:  # of more rows nothing but their number is new
            integers = rng.integers(-99, 100, (rows, k * parts))
            yield "integers", made(integers.astype(float)), extra, offset
    far = 60 if single else 300
    mixed = np.ldexp(rng.standard_normal((40, 150)), rng.integers(-far, far, (40, 1)))
    mixed[::7] = 0  # whole rows
    mixed[3] = np.ldexp(rng.integers(-9, 9, 150).astype(float), -80 if single else -350)
    mixed[5] = np.where(np.arange(150) == 149, -(2.0 ** (90 if single else 399)), 0)
    mixed[6, 100:] = 1e-45 if single else 5e-324  # beside it no row is an integer of few bits
    yield "mixed", made(mixed), 3, 1
    yield "zeros", made(np.zeros((5, 140))), 0, 0


def row_cases(along_k: bool, dtype: str) -> Iterator[Case]:
    """Rows that are taken, and matrices with a row that is refused."""
    seed = 0
    for what, x, extra, offset in _matrices(dtype):
        yield _row_case(what, x, stored(x, along_k, extra, offset), along_k, seed := seed + 1)
    for odd in (np.inf, -np.inf, np.nan, *(() if FORMATS[dtype].single else (1e-200, 1e200))):
        x = np.random.default_rng(1).standard_normal((35, 40)).astype(dtype)
        x[34] = np.where(np.arange(40) == 39, odd, 0)
        x[:3] = 0
        yield _row_case(f"{odd}", x, stored(x, along_k, 1, 0), along_k, seed := seed + 1)


def _row_case(what: str, x: np.ndarray, given: Operand, along_k: bool, seed: int) -> Case:
    rows, k = x.shape
    found = looked_at(x, THREADS if along_k else 32)
    pointer, ld = _argument(x, given)
    before = [given.buffer, Buffer.of(np.full(rows, np.nan)), Buffer.of(np.full(rows, 7, "i4")),
              Buffer.of(summary())]  # fmt: skip
    words = summary(refused=found.refused, bits=found.bits, sum=found.sum)
    grid, threads = (rows, THREADS) if along_k else (-(-rows // 32), 1024)
    launch = Launch(
        "residue_rows", (grid, 1, 1), threads,
        [pointer, ld, rows, k, Pointer(1), Pointer(2), Pointer(3)], before, seed=seed,
        what=f"residue_rows {rows} x {k} {x.dtype}, {what}, {along_k=}",
    )  # fmt: skip
    after = [before[0], *map(Buffer.of, (found.squares, found.lowest, words))]
    return Case(launch, after)


def _argument(x: np.ndarray, given: Operand) -> tuple[Pointer, int]:
    """Where a matrix lies, and how many elements its lines are apart."""
    pointer, ld, _ = given.arguments(0)
    return pointer, ld // format_of(x).system.parts


def residue_pack_cases(along_k: bool, dtype: str) -> Iterator[Case]:
    """Of all rows that are taken: rounded for one modulus, for the usual ones and 16, and not."""
    of = FORMATS[dtype]
    for seed, (what, x, extra, offset) in enumerate(_matrices(dtype)):
        exact = what in ("integers", "zeros")
        some = (of.usual,) if x.size < 9999 else (2,)
        found = looked_at(x, THREADS)
        for count in (1, of.usual, MOST) if x.size < 3999 else some:
            limit = norm_limit(of.system, count, x.shape[1]) if count > 2 else 2.0**30
            if exact and count == of.usual:
                limit = 2.0**1000
            given = stored(x, along_k, extra, offset)
            yield from _pack_case(f"{what}, {count} moduli", x, found, given, count, limit, seed)
    if dtype == "float64":
        yield from _edge_cases(along_k)


def _edge_cases(along_k: bool) -> Iterator[Case]:
    """The largest integers; halves; and more rows than threads."""
    wide = np.random.default_rng(3).integers(-(2**52), 2**52, (5, 130)) * 2.0**9  # 62 bits
    wide[:, 0] = 2.0**9
    found, given = looked_at(wide, THREADS), stored(wide, along_k, 0, 1)
    yield from _pack_case("62 bits", wide, found, given, 16, 2.0**1000, 5)
    half = np.array([[0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 127.5, -127.5, 128, -128, 4.0]])
    whole = math.sqrt(float(half[0] @ half[0])) * 1.5
    found, given = looked_at(half, THREADS), stored(half, along_k, 0, 0)
    yield from _pack_case("ties", half, found, given, 3, whole, 6)
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
    what: str, x: np.ndarray, found: LookedAt, given: Operand, count: int, limit: float, seed: int
) -> Iterator[Case]:
    rows, k = x.shape
    made = packed(x, found, count, limit)
    pointer, ld = _argument(x, given)
    primes, roots = format_of(x).system
    doubles = [*primes, *(1 / p for p in primes), *(float(2**28 % p) for p in primes)]
    doubles += roots or (0.0,) * MOST
    moduli = Struct(tuple(np.array(doubles, "f8").view("i8").tolist()))
    looked: dict[str, Any] = {"bits": found.bits, "sum": found.sum}
    zeros = np.zeros_like(made.large)
    before = [*map(Buffer.of, (given.memory, found.squares, found.lowest,
                               np.full_like(made.tiles, 0x55), np.full(rows, 7, "i4"), zeros,
                               summary(**looked)))]  # fmt: skip
    launch = Launch(
        "residue_pack", (made.blocks, 1, 1), THREADS,
        [pointer, ld, rows, k, Pointer(1), Pointer(2), limit, count, moduli, Pointer(3),
         Pointer(4), Pointer(5), Pointer(6)], before, seed=seed,
        what=f"residue_pack {rows} x {k} {x.dtype}, {what}",
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
    (9, 391, 14, 2.0, 0.5, True, True, 1),
    (11, 131, 14, 1.0, 0.0, False, False, 0),
    (5, 200, 14, 1.1, -0.3, True, True, 5),
    (3, 64, 15, 1.0, 2.0, True, True, 0),
    (10, 133, 16, -1.0, 0.0, True, False, 1),
)


def join_cases(dtype: str) -> Iterator[Case]:
    """Integers up to the ends of what residues tell apart; scalars, P and C, given or not."""
    for seed, case in enumerate(_JOINED):
        yield _join_case(*case, dtype, seed=seed)


def _join_case(
    m: int, n: int, count: int, alpha: float, beta: float, has_p: bool, has_c: bool, extra: int,
    dtype: str, *, seed: int,
) -> Case:  # fmt: skip
    system, single = FORMATS[dtype].system, FORMATS[dtype].single
    parts, size = system.parts, m * n * system.parts
    rng = np.random.default_rng(seed)
    most = int(product_of(system, count) // 2 * (1 - 2.0**-15))
    numbers = [int(Fraction(share) * most) for share in rng.uniform(-1, 1, size).tolist()]
    edges = (most, -most, 0, 1, -1, most // 2**40, -most + 1, -(most >> 30))
    for at, edge in zip(rng.permutation(size).tolist(), edges, strict=False):
        numbers[at] = edge
    whole = np.array(numbers, object).reshape(m, n, parts)
    ldr, height = -(-n // 256) * 256, m + 3
    planes = np.full((parts * count, height, ldr), 0x80, np.uint8)
    found = residues(system, np.moveaxis(whole, -1, 0), count)
    planes[:, :m, :n] = (found & 255).astype(np.uint8)
    far = 20 if single else 100
    middle = most.bit_length() // 2 if single else 0  # results are within floats
    s, t = (rng.integers(middle - far, middle + far, size).astype("i4") for size in (m, n))
    if not single:
        s[0] = t[0] = 454 if seed % 2 else -400
    each, product, inverse = weights(system, count)
    limbs = np.zeros((parts, MOST, 3))
    limbs[:, :count] = each
    struct = Struct(tuple(np.array([*limbs.flat, *product, inverse], "f8").view("i8").tolist()))
    real = "f4" if single else "f8"
    p, c, d = (placed((1, m, parts * n), real, extra=parts * extra, offset=seed % 2) for _ in "pcd")
    p, c = (z.holding(np.ldexp(rng.standard_normal((1, m, parts * n)), 20)) for z in (p, c))
    buffers = [*map(Buffer.of, (planes.reshape(-1), s, t)), p.buffer, c.buffer, d.buffer]
    (to_p, ldp, _), (to_c, ldc, _), (to_d, ldd, _) = (
        x.arguments(at) for at, x in enumerate((p, c, d), 3)
    )
    launch = Launch(
        "residue_join", (-(-n // 128), min(2, -(-m // 8)), 1), THREADS,
        [m, n, count, struct, Pointer(0), height * ldr, ldr, Pointer(1), Pointer(2), alpha, beta,
         to_p if has_p else None, ldp // parts, to_c if has_c else None, ldc // parts, to_d,
         ldd // parts], buffers,
        seed=seed, what=f"residue_join {m} x {n} {dtype} of {count} moduli, P: {has_p}, C: {has_c}",
    )  # fmt: skip
    made = np.empty((m, n, parts))
    given, added = (x.view.reshape(m, n, parts) for x in (p, c))
    for at in np.ndindex(m, n, parts):
        row, col, _ = at
        scale = int(s[row] + t[col])  # quotients of integers are rounded once
        value = whole[at] / (1 << scale) if scale > 0 else float(whole[at] << -scale)
        value = (value + float(given[at]) if has_p else value) * alpha
        if has_c:
            value = float(Fraction(beta) * Fraction(float(added[at])) + Fraction(value))
        made[at] = value
    after = d.holding(made.reshape(1, m, -1)).buffer
    return Case(launch, [*buffers[:5], after])
