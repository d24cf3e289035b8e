"""Cases for sgemm_split_mma.cu: sums that are exact in any order, of both parts of the operands."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from pack_reference import pack_reference

from cuda_on_cpu.operands import Operand, placed
from cuda_on_cpu.products import Case, below
from cuda_on_cpu.program import Buffer, Launch, Pointer
from multimm.gpu.arch import tiles_of

THREADS, TILE_M, SLAB = 256, 128, 64
#: Places of D, P and C among the buffers of a launch.
_D, _P, _C = 4, 5, 6


@dataclass(frozen=True)
class Product:
    """A product of packed operands, and how it is launched."""

    m: int
    n: int
    k: int
    alpha: float = 1.0
    beta: float = 0.0
    c: bool = False
    p: bool = False
    step: int = 0  #: slabs of a slice
    blocks: int = 3  #: of threads, at most
    extra: int = 0  #: leading dimensions - n
    offset: int = 0  #: of the first elements of D, P and C
    counts: tuple[int, int, int, int] | None = None  #: what packing has counted
    scales: tuple[int, int] = (0, 0)  #: least exponents of rows of A and of B
    # Of integers: the largest, slabs between promotions, what is returned, and whether all are
    # as large as they can be.
    most: int = 128
    promote: int = 16
    as_float: bool = False
    extreme: bool = False

    @property
    def slabs(self) -> int:
        """Of all of k."""
        return -(-self.k // SLAB)

    @property
    def slices(self) -> int:
        """Products that are computed."""
        return -(-self.slabs // self.step) if self.step else 1

    def sums(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """A B' of each slice of k, as exactly as their dtype has it."""
        length = self.step * SLAB or self.k
        return np.stack([
            a[:, start : start + length] @ b[:, start : start + length].T
            for start in range(0, self.k, length)
        ])  # fmt: skip

    def launch(
        self, arguments: list[object], buffers: list[Buffer], defines: Mapping[str, int], seed: int
    ) -> Launch:
        """Of sgemm_split_mma, whose operands have so many parts."""
        tile_n, parts = defines["TILE_N"], defines["PARTS"]
        tiles = tiles_of(self.m, self.n, TILE_M, tile_n, "LOWER" in defines) * self.slices
        shared = defines["SLOTS"] * parts * (TILE_M + tile_n) * 64
        return Launch(
            "sgemm_split_mma", (min(tiles, self.blocks), 1, 1), THREADS, arguments, buffers,
            shared, seed, what=f"sgemm_split_mma {self}",
        )  # fmt: skip

    def written(
        self, made: np.ndarray, before: np.ndarray, defines: Mapping[str, int]
    ) -> np.ndarray:
        """The result; tiles above the diagonal as they were."""
        if "LOWER" not in defines:
            return made
        return np.where(below(self.m, self.n, TILE_M, defines["TILE_N"]), made, before)


def _products(tile_n: int, cap: int) -> tuple[Product, ...]:
    m, n = TILE_M, tile_n
    return (
        Product(1, 1, 1),
        Product(m, n, 64, p=True, c=True, beta=2.0),
        Product(2 * m + 1, n + 1, 130, 2.0, -1.0, True, True, extra=3, offset=1),
        Product(70, 3 * n - 1, 200, -1.0, extra=1, blocks=2),
        Product(m + 5, n - 3, 64 * 5, blocks=1, extra=2, offset=3, p=True),
        Product(5, 7, 9, 0.0, 2.0, True, True, extra=1),
        Product(5, 7, 9, 0.0, 0.0, True),
        Product(100, n, 64 * 5 - 9, 2.0, step=2, blocks=2),
        Product(9 * m, 2, 64, blocks=4),  # more rows of tiles than walk as one band
        Product(10, 13, 64 * 6 + 7, blocks=1, p=True, extra=1),  # longer than any sum lives
        Product(20, 30, 70, counts=(0, cap, 0, cap)),
        Product(20, 30, 70, counts=(0, 0, 0, cap + 1)),
        Product(20, 30, 70, counts=(1, 0, 0, 0)),
        # Over all of float32: results are subnormal, too, or infinite.
        *(Product(10, 14, 40, scales=scales)
          for scales in ((-50, 60), (-149, 110), (110, -149), (-75, -70), (55, 60), (-149, -149))),
    )  # fmt: skip


def split_cases(defines: Mapping[str, int]) -> Iterator[Case]:
    """Products that meet every edge of a tile; of squares the lower tiles alone."""
    made = _products(defines["TILE_N"], defines["CAP"])
    if "LOWER" in defines:
        made = (Product(1, 1, 1), Product(300, 300, 70, 2.0, 3.0, True, True, extra=1),
                Product(140, 140, 64 * 5, step=2, blocks=2))  # fmt: skip
    for seed, product in enumerate(made):
        yield _case(product, seed, defines)


def _case(x: Product, seed: int, defines: Mapping[str, int]) -> Case:
    rng = np.random.default_rng(seed)
    wide = defines["PARTS"] == 2
    a, b = _factor(x.m, x.k, 0, wide, rng), _factor(x.n, x.k, 1, wide, rng)
    assert np.abs(x.sums(a.astype("f8"), b.astype("f8"))).max(initial=0) < 2**24
    if x.scales != (0, 0):
        a, b = (
            np.ldexp(z, rng.integers(least, least + 6, (len(z), 1)))
            for z, least in zip((a, b), x.scales, strict=True)
        )
    buffers: list[Buffer] = []
    arguments: list[object] = [x.m, x.n, x.slabs, x.step, x.alpha, x.beta]
    for z in (a, b):
        made = pack_reference(z, defines["PARTS"])
        assert made.uncarried == 0
        arguments += [Pointer(len(buffers)), Pointer(len(buffers) + 1)]
        tiles = made.tiles.reshape(-1).view(np.uint16)
        buffers += [Buffer.of(tiles), Buffer.of(made.exponents)]
    shape = 1, x.m, x.n
    apart = x.m * (x.n + x.extra) + 5
    d = placed((x.slices, x.m, x.n), "f4", extra=x.extra, offset=x.offset, gap=5)
    assert d.stride in (apart, x.m * d.ld + 5)
    others = [
        placed(shape, "f4", extra=extra, offset=x.offset).holding(
            rng.integers(-5, 6, shape).astype(np.float32)
        )
        for extra in (x.extra, x.extra + 1)
    ]
    buffers += [matrix.buffer for matrix in (d, *others)]
    for there, at, matrix in ((x.c, _C, others[1]), (x.p, _P, others[0])):
        pointer, ld, _ = matrix.arguments(at)
        arguments += [pointer if there else None, ld if there else 0]
    pointer, ldd, stride = d.arguments(_D)
    arguments += [pointer, ldd, stride if x.step else 0]
    if x.counts is not None:
        buffers.append(Buffer.of(np.array((*x.counts, 0, 0), np.uint64)))
    arguments.append(Pointer(len(buffers) - 1) if x.counts is not None else None)
    launch = x.launch(arguments, buffers, defines, seed)
    expected = list(buffers)
    if x.counts is None or not (x.counts[0] or x.counts[2] or max(x.counts) > defines["CAP"]):
        expected[_D] = d.holding(_result(x, a, b, d, others, defines)).buffer
    return Case(launch, expected)


def _factor(rows: int, k: int, side: int, wide: bool, rng: np.random.Generator) -> np.ndarray:
    """Integers; wide ones, of 13 bits, meet small ones alone, and sums stay below 2^24."""
    x = rng.integers(-4, 5, (rows, k))
    if wide:
        at = np.arange(k) % 16 == side * 5
        x[:, at] = rng.integers(-4095, 4096, (rows, at.sum()))
    return x.astype(np.float32)


def _result(
    x: Product, a: np.ndarray, b: np.ndarray, d: Operand, others: list[Operand],
    defines: Mapping[str, int],
) -> np.ndarray:  # fmt: skip
    """Exactly, in float64, and rounded once."""
    sums = x.sums(a.astype("f8"), b.astype("f8"))
    p, c = (matrix.view[0].astype("f8") for matrix in others)
    made = x.alpha * (sums + p if x.p else sums) if x.alpha != 0 else np.zeros_like(sums)
    made = made + x.beta * c if x.c and x.beta != 0 else made
    with np.errstate(over="ignore", under="ignore"):
        return x.written(made.astype(np.float32), d.view, defines)
