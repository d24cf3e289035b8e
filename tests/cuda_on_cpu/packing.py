"""Cases for split_pack.cu and split_unpack.cu, bit by bit; residuals in any order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from pack_reference import joined, pack_reference, row_exponents, split

from cuda_on_cpu.operands import Far, Operand, placed
from cuda_on_cpu.products import Case
from cuda_on_cpu.program import Buffer, Launch, Pointer, Struct
from multimm.gpu.emulated.pack import pack_shared_bytes

THREADS = 256
_BUFFERS = 8  # of an operand
#: What a launch does, and how often a block looks for what the others, which run before it or after
#: it, have found.
_ALL, _LEAVE, _TAKE = range(3)
_PATIENCE = (3, 0, 1)


@dataclass(frozen=True)
class Matrix:
    """An operand: what it holds, and how it lies in memory."""

    rows: int
    k: int
    kind: str = "normal"
    along_k: bool = True
    wide: bool = False
    run: int = 2
    extra: int = 0
    offset: int = 0
    far: bool = False


def numbers(kind: str, rows: int, k: int, rng: np.random.Generator) -> np.ndarray:
    """Float32 of a distribution by name; "odd" is everything that a kernel may stumble over."""
    x = rng.standard_normal((rows, k))
    if kind == "wide":  # most elements need more than the parts can carry
        x *= 2.0 ** rng.integers(-60, 61, (rows, k))
    elif kind == "sparse":
        x *= rng.random((rows, k)) < 0.5
    elif kind == "tiny":  # 2^-e, or the least that parts carry, are not always normal numbers
        x *= 2.0 ** -rng.integers(90, 131, (rows, 1)) * np.where(
            rng.random((rows, k)) < 0.05, 2.0**-28, 1
        )
    elif kind == "integers":
        x = np.rint(8 * x)
    x = x.astype(np.float32)
    if kind == "odd" and x.size:
        scales = np.array([0, 2.0**-149, 2.0**-140, 2.0**-126, 2.0**-30, 1, 2.0**126], np.float32)
        with np.errstate(over="ignore", under="ignore"):
            x *= scales[np.arange(rows) % len(scales), None]
        flat = x.reshape(-1)
        odd = [np.inf, -np.inf, np.nan, -0.0, 1e-45, -3.4e38, 65519.0, 2.0**-24]
        at = rng.choice(flat.size, min(flat.size, 9 * rows), replace=False)
        flat[at] = np.array(odd, np.float32)[rng.integers(0, len(odd), len(at))]
    return x


@dataclass(frozen=True)
class PackCase(Case):
    """A launch whose residuals, the last two buffers of each operand, come in any order."""

    cap: int

    def wrong(self, found: list[Buffer]) -> str:
        """What differs; empty if nothing does."""
        found = list(found)
        for i in range(0, len(found), _BUFFERS):
            wanted, got = self.expected[i + 6 : i + 8], found[i + 6 : i + 8]
            found[i + 6 : i + 8] = wanted
            pairs, seen = (_pairs(*buffers, self.cap) for buffers in (wanted, got))
            count = int(self.expected[i + 5].spans[0][1])
            if len(seen) != len(set(seen)) or len(seen) != min(count, self.cap):
                return f"{self.launch.what}: {len(seen)} residuals of {count}"
            if not set(seen) <= set(pairs):
                return f"{self.launch.what}: residuals {sorted(set(seen) - set(pairs))[:3]}"
        return super().wrong(found)


def places(listed: np.ndarray) -> np.ndarray:
    """Where residuals belong, as the kernels have it in one word."""
    return listed["row"].astype(np.uint64) << np.uint64(32) | listed["k"].astype(np.uint64)


_UNWRITTEN = 2**64 - 1


def _pairs(at: Buffer, values: Buffer, cap: int) -> list[tuple[int, bytes]]:
    keys, rests = at.spans[0], values.spans[0]
    return [
        (int(key), rest.tobytes()) for key, rest in zip(keys, rests, strict=True)
        if key != _UNWRITTEN
    ]  # fmt: skip


def _lists() -> list[tuple[Matrix, Matrix]]:
    none, full = Matrix(0, 5), {"wide": True, "extra": 4, "offset": 8}
    return [
        (Matrix(1, 1), none),
        (none, Matrix(3, 2, "odd", along_k=False)),
        (Matrix(64, 64, wide=True), Matrix(64, 64, along_k=False, wide=True)),
        (Matrix(130, 200, "odd", **full), Matrix(131, 132, along_k=False, **full, run=1)),
        (
            Matrix(65, 190, "odd", extra=3, offset=1),
            Matrix(67, 65, "odd", False, offset=3, extra=2),
        ),
        (Matrix(200, 131, "odd", False, True, 1), Matrix(3, 333, "odd", True, True, 3)),
        (Matrix(66, 321, "sparse", offset=2, run=3), Matrix(129, 70, "integers", False)),
        (Matrix(5, 90, "wide"), Matrix(4, 77, "wide", False)),
        (Matrix(70, 150, "tiny", wide=True), Matrix(40, 70, "tiny", False)),
        (Matrix(2, 3, far=True), Matrix(3, 2, along_k=False, far=True)),
        (Matrix(7, 0), Matrix(2, 64, "wide", wide=True)),
        (Matrix(70, 260, along_k=False, wide=True), Matrix(68, 388, "wide", wide=True, run=3)),
    ]


def pack_cases(defines: Mapping[str, int]) -> Iterator[Case]:
    """Both operands of a product in one launch; or in two, of which each is a case."""
    for seed, matrices in enumerate(_lists()):
        for stage in (_ALL, _LEAVE, _TAKE):
            rng = np.random.default_rng(seed)
            members: list[object] = []
            given, expected, tasks = [], [], 0
            for matrix in matrices:
                more, before, after = _operand(matrix, stage, defines, len(given), rng)
                members += more
                given += before
                expected += after
                tasks += -(-matrix.rows // 128) * 2 * _blocks(matrix)
            patience = _PATIENCE[seed % len(_PATIENCE)]
            launch = Launch(
                "split_pack", (tasks, 1, 1), THREADS, [Struct(tuple(members)), stage, patience, 1],
                given, pack_shared_bytes(defines["HELD"]), seed,
                what=f"split_pack {stage} {matrices}",
            )  # fmt: skip
            yield PackCase(launch, expected, defines["CAP"])


def _blocks(m: Matrix) -> int:
    """How many share a panel."""
    slabs = -(-m.k // 64)
    return -(-slabs // m.run)


def _operand(
    m: Matrix, stage: int, defines: Mapping[str, int], first: int, rng: np.random.Generator
) -> tuple[list[object], list[Buffer], list[Buffer]]:
    """The members of an operand's struct, its buffers, and what they hold afterwards."""
    x = numbers(m.kind, m.rows, m.k, rng)
    packed = pack_reference(x, defines["PARTS"])
    memory, ld = stored(m, x)
    pointer = memory.arguments(first)[0] if x.size else None
    height, room = len(packed.exponents), (len(packed.residuals), defines["CAP"])
    assert (row_exponents(x) == packed.exponents[: m.rows]).all()
    padded = np.zeros((height, m.k), np.float32)
    padded[: m.rows] = np.where(np.isfinite(x), np.abs(x), 0)
    shared = _blocks(m) > 1  # by several blocks
    maxima = padded.max(axis=1, initial=0).view(np.uint32) * np.uint32(shared)
    arrived = np.full(height, _blocks(m) * shared * (stage == _ALL), np.uint32)
    nothing = [
        np.full(packed.tiles.size, 0x7BCD, np.uint16), np.full_like(packed.exponents, 99),
        maxima if stage == _TAKE else np.zeros_like(maxima), np.zeros_like(arrived),
        np.zeros(2, np.uint64), np.full(room[1], _UNWRITTEN, np.uint64),
        np.zeros(room[1], np.float32),
    ]  # fmt: skip
    exponents = packed.exponents if m.k else nothing[1]
    counts = np.array([packed.nonfinite, packed.uncarried], np.uint64)
    everything = [
        packed.tiles.reshape(-1).view(np.uint16), exponents, maxima, arrived, counts,
        places(packed.residuals), packed.residuals["value"].copy(),
    ]  # fmt: skip
    if stage == _LEAVE:
        everything = [*nothing[:2], maxima, *nothing[3:]]
    before, after = ([memory.buffer, *map(Buffer.of, x)] for x in (nothing, everything))
    pointers = [Pointer(first + i) for i in range(1, _BUFFERS)]
    return [pointer, ld, m.rows, m.k, int(m.along_k), int(m.wide), m.run, *pointers], before, after


def stored(m: Matrix, x: np.ndarray) -> tuple[Operand | Far, int]:
    """A matrix in memory, and how far its lines lie apart."""
    lines = x if m.along_k else x.T
    if m.far:
        return Far(np.ascontiguousarray(lines), 2**31 + 4), 2**31 + 4
    width = lines.shape[1]
    extra = m.extra + (-(width + m.extra) % 4 if m.wide else 0)
    made = placed((1, *lines.shape), "f4", extra=extra, offset=m.offset).holding(lines[None])
    return made, made.ld


def unpack_cases(defines: Mapping[str, int]) -> Iterator[Case]:
    """The way back: the whole matrix, and its residuals."""
    shapes = ((1, 1), (64, 64), (130, 201), (65, 63), (3, 132), (5, 322))
    for seed, (rows, k) in enumerate(shapes):
        rng = np.random.default_rng(seed)
        x = numbers(("wide", "normal")[seed % 2], rows, k, rng)
        x[-1, -1] = -np.finfo(np.float32).max  # one part is rounded up to 2^128
        packed, parts = pack_reference(x, defines["PARTS"]), split(x, defines["PARTS"])
        listed = packed.residuals
        whole = joined(parts)
        carried = np.where(parts.rest != 0, np.float32(0), whole)
        given = [Buffer.of(packed.tiles.reshape(-1).view(np.uint16)), Buffer.of(packed.exponents)]
        blocks = len(packed.exponents) // 64 * -(-k // 64)
        yield _unpack("unpack", blocks, [rows, k], given, np.full_like(x, np.nan), carried)
        if len(listed):
            lists = [Buffer.of(places(listed)), Buffer.of(listed["value"].copy())]
            many = -(-len(listed) // THREADS)
            yield _unpack("put_residuals", many, [len(listed), k], lists, carried, whole)


def _unpack(
    entry: str, blocks: int, sizes: list[int], given: list[Buffer], y: np.ndarray,
    result: np.ndarray,
) -> Case:  # fmt: skip
    buffers = [*given, Buffer.of(np.ascontiguousarray(y).reshape(-1))]
    arguments = [*sizes, *(Pointer(i) for i in range(len(buffers)))]
    launch = Launch(entry, (blocks, 1, 1), THREADS, arguments, buffers, what=f"{entry} {y.shape}")
    return Case(launch, [*given, Buffer.of(np.ascontiguousarray(result).reshape(-1))])
