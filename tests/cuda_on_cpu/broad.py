"""Cases for broad_pack.cu, bit by bit: both operands, and what it finds that nothing carries."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from pack_reference import BROAD_SHIFT, LEAST_BROAD, broad_tiles, row_exponents

from cuda_on_cpu.packing import THREADS, Matrix, numbers, stored
from cuda_on_cpu.products import COUNTS, Case
from cuda_on_cpu.program import Buffer, Launch, Pointer, Struct

_UNWRITTEN = 0x7BCD


def _pairs() -> list[tuple[Matrix, Matrix | None]]:
    return [
        (Matrix(1, 1), Matrix(3, 2, "wide", along_k=False)),
        (Matrix(64, 64, "broad", wide=True), Matrix(64, 64, "wide", along_k=False, wide=True)),
        (Matrix(70, 150, "broad", extra=3, offset=1), Matrix(67, 150, "tiny", False, offset=3)),
        (Matrix(130, 131, "broad", False, True), None),
        (Matrix(2, 3, "broad", far=True), Matrix(3, 3, along_k=False, far=True)),
        (Matrix(5, 90, "odd"), Matrix(7, 90, "sparse")),
        (Matrix(5, 90, "broad"), Matrix(70, 90, "widest", wide=True)),
    ]


def broad_cases(parts: int) -> Iterator[Case]:
    """Each operand pair where it is needed, and one for all else that may have been counted."""
    every = [some for several in COUNTS.values() for some in several]
    for seed, matrices in enumerate(_pairs()):
        for some in every if seed == 0 else ((0, 0, 0, 99, 0, 0),):
            yield _case(matrices, some, seed, parts)


def _case(
    matrices: tuple[Matrix, Matrix | None], some: tuple[int, ...], seed: int, parts: int
) -> Case:
    rng = np.random.default_rng(seed)
    needed = some[0] == some[2] == 0 and max(some[1], some[3]) > 5
    members: list[object] = []
    given, expected, tasks, lost = [], [], 0, []
    for m in matrices:
        if m is None:  # one operand for both
            members += [None, 0, 0, 0, 0, 0, None, None]
            continue
        x = _values(m, rng)
        memory, ld = stored(m, x)
        height, slabs = -(-m.rows // 128) * 128, -(-m.k // 64)
        finite = np.where(np.isfinite(x), x, np.float32(0))
        # Of whole rows, of which this is a stretch: the largest of some lie beyond it.
        exponents = np.zeros(height, np.int32)
        exponents[: m.rows] = row_exponents(finite) + rng.integers(0, 3, m.rows)
        tiles = broad_tiles(x, exponents[: m.rows], parts).reshape(-1)
        pointer, *_ = memory.arguments(len(given))
        members += [pointer, ld, m.rows, m.k, int(m.along_k), int(m.wide)]
        members += [Pointer(len(given) + 1), Pointer(len(given) + 2)]
        before = Buffer.of(np.full_like(tiles, _UNWRITTEN))
        given += [memory.buffer, before, Buffer.of(exponents)]
        expected += [memory.buffer, Buffer.of(tiles) if needed else before, given[-1]]
        y = np.ldexp(finite.astype(np.float64), BROAD_SHIFT - exponents[: m.rows, None])
        rows, ks = np.nonzero(~np.isfinite(x) | ((x != 0) & (abs(y) < LEAST_BROAD)))
        panels, slab = rows // 64, ks // 64
        lost += [tasks + (panels * slabs + slab if m.along_k else slab * (height // 64) + panels)]
        tasks += height // 64 * slabs
    blocks = -(-tasks // (1 + seed % 3))  # each packs as many tiles
    counts = np.array(some, np.uint64)
    given.append(Buffer.of(counts.copy()))
    if needed:
        counts[4:] = 1, counts[5] + np.uint64(len({*np.concatenate(lost) % blocks}))
    expected.append(Buffer.of(counts))
    launch = Launch(
        "broad_pack", (blocks, 1, 1), THREADS, [Struct(tuple(members)), Pointer(len(given) - 1)],
        given, 0, seed, what=f"broad_pack {matrices} {some}",
    )  # fmt: skip
    return Case(launch, expected)


def _values(m: Matrix, rng: np.random.Generator) -> np.ndarray:
    if m.kind == "broad":
        x = rng.standard_normal((m.rows, m.k)) * 2.0 ** rng.integers(-40, 41, (m.rows, m.k))
    elif m.kind == "widest":
        x = rng.standard_normal((m.rows, m.k)) * 2.0 ** rng.integers(-120, 121, (m.rows, m.k))
    else:
        return numbers(m.kind, m.rows, m.k, rng)
    return x.astype(np.float32)
