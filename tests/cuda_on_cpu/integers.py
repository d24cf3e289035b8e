"""Cases for integer_pack.cu, and for sgemm_split_mma.cu with INTEGER, whose sums are exact."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import ceil

import numpy as np
from pack_reference import swizzled
from residue_reference import in_tiles

from cuda_on_cpu.operands import placed
from cuda_on_cpu.products import Case
from cuda_on_cpu.program import Buffer, Launch, Pointer
from cuda_on_cpu.split_products import SLAB, THREADS, TILE_M, Product

THREADS_OF_PACK = 256


def integer_tiles(x: np.ndarray) -> np.ndarray:
    """Rows along k as the kernels read them: FP16 tiles of 64 x 64, swizzled; rows are padded."""
    rows, k = x.shape
    padded = np.zeros((-(-rows // TILE_M) * TILE_M, -(-k // SLAB) * SLAB), np.float16)
    padded[:rows, :k] = x
    tiles = padded.reshape(padded.shape[0] // SLAB, SLAB, -1, SLAB).swapaxes(1, 2)
    return swizzled(tiles).reshape(-1)


def byte_tiles(x: np.ndarray, slices: int, slabs: int) -> np.ndarray:
    """Rows along k as byte_mma.cu reads them: tiles of each slice of k, swizzled; zeros around."""
    rows, k = x.shape
    padded = np.zeros((-(-rows // 128) * 128, slices * slabs * 128), np.uint8)
    padded[:rows, :k] = x
    parts = padded.reshape(len(padded), slices, -1).swapaxes(0, 1)
    return in_tiles(parts)


def unpacked_bytes(tiles: np.ndarray, slices: int, slabs: int) -> np.ndarray:
    """The opposite, with the zeros around: slices, rows, and k."""
    r, c = np.ogrid[:64, :128]
    swizzled = tiles.reshape(slices, -1, slabs, 64, 128)
    plain = swizzled[..., r, c ^ 16 * (r % 8)].swapaxes(2, 3)
    return plain.reshape(slices, -1, slabs * 128)


def byte_pack_cases() -> Iterator[Case]:
    """Rows in lines or across them, at any address; in one slice and in several."""
    rng = np.random.default_rng(0)
    for rows, k, extra, offset, slices in (
        (1, 1, 0, 0, 1), (64, 128, 0, 0, 1), (130, 129, 4, 8, 1), (33, 700, 3, 1, 3),
        (200, 512, 0, 2, 2), (129, 260, 8, 4, 3),
    ):  # fmt: skip
        x = rng.integers(0, 256, (rows, k)).astype(np.uint8)
        slabs = ceil(ceil(k / 128) / slices)
        for along_k in (False, True):
            lines = x if along_k else x.T
            line = lines.shape[1] + extra
            memory = np.full(offset + len(lines) * line - extra, 0x55, np.uint8)
            step = np.lib.stride_tricks.as_strided(memory[offset:], lines.shape, (line, 1))
            step[...] = lines
            tiles = byte_tiles(x, slices, slabs)
            for wide in {False, offset % 4 == 0 and line % 4 == 0}:
                before = [Buffer.of(memory), Buffer.of(np.full_like(tiles, 0x55))]
                launch = Launch(
                    "byte_pack", (len(tiles) // (64 * 128), 1, 1), THREADS_OF_PACK,
                    [Pointer(0, offset), line, rows, k, int(along_k), int(wide), slabs, Pointer(1)],
                    before, what=f"byte_pack {rows} x {k}, {along_k=}, {wide=}, {slices=}",
                )  # fmt: skip
                yield Case(launch, [before[0], Buffer.of(tiles)])


def _products(tile_n: int) -> tuple[Product, ...]:
    m, n = TILE_M, tile_n
    return (
        Product(1, 1, 1),
        Product(m, n, 64, p=True),
        Product(2 * m + 1, n + 1, 130, p=True, extra=3, offset=1),
        Product(70, 3 * n - 1, 200, extra=1, blocks=2, as_float=True),
        Product(m + 5, n - 3, 64 * 5, promote=1, most=512, blocks=1, extra=2, offset=3, p=True),
        Product(9, n, 64 * 33 + 5, extreme=True),  # 2^24 in the tensor cores, beyond it in all
        Product(9, 20, 64 * 9, most=255, promote=4, extreme=True, p=True, as_float=True),
        Product(100, n, 64 * 5 - 9, step=2, blocks=2),
        Product(9 * m, 2, 64, blocks=4),
    )


def integer_cases(defines: Mapping[str, int]) -> Iterator[Case]:
    """Products that meet every edge of a tile; of squares the lower tiles alone."""
    made = _products(defines["TILE_N"])
    if "LOWER" in defines:
        made = (Product(1, 1, 1), Product(300, 300, 70, p=True, extra=1),
                Product(140, 140, 64 * 5, step=2, blocks=2))  # fmt: skip
    for seed, product in enumerate(made):
        yield _case(product, seed, defines)


def _case(x: Product, seed: int, defines: Mapping[str, int]) -> Case:
    rng = np.random.default_rng(seed)
    a, b = (
        np.full((rows, x.k), -x.most) if x.extreme else rng.integers(-x.most, x.most, (rows, x.k))
        for rows in (x.m, x.n)
    )
    assert x.promote * SLAB * x.most**2 <= 2**24
    buffers = [Buffer.of(integer_tiles(z).view(np.uint16)) for z in (a, b)]
    d = placed((x.slices, x.m, x.n), "i4", extra=x.extra, offset=x.offset, gap=5)
    p = placed((1, x.m, x.n), "i4", extra=x.extra, offset=x.offset)
    p = p.holding(rng.integers(-(2**31), 2**31, (1, x.m, x.n)).astype(np.int32))
    buffers += [d.buffer, p.buffer]
    to_p, ldp, _ = p.arguments(3)
    to_d, ldd, stride = d.arguments(2)
    arguments: list[object] = [
        x.m, x.n, x.slabs, x.step, 1.0, 0.0, Pointer(0), None, Pointer(1), None, None, 0,
        to_p if x.p else None, ldp if x.p else 0, to_d, ldd, stride if x.step else 0, None,
        x.promote, int(x.as_float),
    ]  # fmt: skip
    launch = x.launch(arguments, buffers, defines, seed)
    expected = list(buffers)
    expected[2] = d.holding(_result(x, a, b, d.view, p.view, defines)).buffer
    return Case(launch, expected)


def _result(
    x: Product, a: np.ndarray, b: np.ndarray, before: np.ndarray, p: np.ndarray,
    defines: Mapping[str, int],
) -> np.ndarray:  # fmt: skip
    """In 64 bits, then modulo 2^32; the bits of a float32."""
    sums = x.sums(a, b)
    made = (sums + p if x.p else sums).astype(np.int32)
    if x.as_float:
        made = made.astype(np.float32).view(np.int32)
    return x.written(made, before, defines)


def integer_pack_cases(defines: Mapping[str, int]) -> Iterator[Case]:
    """Rows and columns, at any address; what FP16 carries of the dtype."""
    dtype = np.dtype(f"{'i' if defines['SIGNED'] else 'u'}{defines['BYTES']}")
    info = np.iinfo(dtype)
    low, high = max(-2048, int(info.min)), min(2048, int(info.max))
    shapes = ((1, 1, 0, 0), (64, 64, 0, 0), (130, 201, 3, 1), (65, 64, 0, 4), (3, 132, 4, 2),
              (200, 7, 1, 0))  # fmt: skip
    for seed, (rows, k, extra, offset) in enumerate(shapes):
        for along_k in (True, False):
            rng = np.random.default_rng(seed)
            x = rng.integers(low, high, (rows, k), endpoint=True).astype(dtype)
            lines = x if along_k else x.T
            stored = placed((1, *lines.shape), dtype.str[1:], extra=extra, offset=offset)
            stored = stored.holding(lines[None])
            aligned = offset * dtype.itemsize % (4 * dtype.itemsize) == 0
            wide = aligned and stored.ld % 4 == 0
            tiles = integer_tiles(x).view(np.uint16)
            before = [stored.buffer, Buffer.of(np.full_like(tiles, 0x7BCD))]
            pointer, ld, _ = stored.arguments(0)
            launch = Launch(
                "integer_pack", (tiles.size // SLAB**2, 1, 1), THREADS,
                [pointer, ld, rows, k, int(along_k), int(wide), Pointer(1)], before,
                what=f"integer_pack {rows} x {k} of {dtype}, {along_k=}, {wide=}",
            )  # fmt: skip
            yield Case(launch, [stored.buffer, Buffer.of(tiles)])
