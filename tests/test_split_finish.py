"""How sgemm_split stores its results and numbers its tiles, by its own code on the CPU.

Scales, P, C, ragged edges, every alignment. The kernel itself needs tensor cores; what happens to
its sums is plain CUDA C++.
"""

from __future__ import annotations

import functools
import itertools

import numpy as np
import pytest
from cuda_on_cpu.program import Buffer, Launch, Pointer, Program, started

from multimm.gpu.arch import tiles_of
from multimm.gpu.runtime.kernel_source import kernel_text

TILE_N = 64
# One warpgroup takes its part of a tile of sums from memory, and finishes it as the kernel does.
ENTRY = """
extern "C" __global__ void finish(index_t m, index_t n, float alpha, float beta, const float* sums,
                                  const float* more, const int* ea, const int* eb, const float* c,
                                  index_t ldc, const float* p, index_t ldp, float* d,
                                  index_t ldd) {
  const int thread = threadIdx.x, rows = 64;
  const index_t row = blockIdx.x * rows + thread / 32 * 16 + thread % 32 / 4;
  const index_t col = blockIdx.y * TILE_N + thread % 4 * 2;
  const index_t width = gridDim.y * TILE_N;
  constexpr int SUMS = TILE_N / 2;
  const Finish<SUMS> end{ea ? ea + row : ea, eb ? eb + col : eb,
                         c ? c + row * ldc + col : c, p ? p + row * ldp + col : p,
                         d + row * ldd + col, ldc, ldp, ldd, clip(m - row, rows),
                         clip(n - col, TILE_N), alpha, beta};
  const float* given[2] = {sums, more};
  float own[SUMS] = {};
  for (int turn = more ? 0 : 1; turn < 2; ++turn) {  // laid down in D, then taken up again
    for (int i = 0; i < SUMS; ++i) {
      own[i] = given[more ? turn : 0][(row + i / 2 % 2 * 8) * width + col + i / 4 * 8 + i % 2];
    }
    if (turn == 0) end.keep(own);
  }
  if (more) end.add_kept(own);
  if (p || c) {
    end.store<false>(own);
  } else {
    end.store<true>(own);
  }
}
"""
CANARY = np.float32(-12345)


@functools.cache
def program() -> Program:
    text = kernel_text("common/split_finish.cuh", {"TILE_N": TILE_N})
    return started(text + ENTRY).result()


def placed(values: np.ndarray, ld: int, offset: int) -> np.ndarray:
    """Rows `ld` apart, the first one `offset` floats after a multiple of 256 bytes."""
    whole = np.full(offset + len(values) * ld, CANARY, np.float32)
    whole[offset:].reshape(-1, ld)[:, : values.shape[1]] = values
    return whole


def finished(m, n, *, alpha=1.0, beta=0.0, c=False, p=False, kept=False, extra=0, offset=0,
             exponents=(0, 0)):  # fmt: skip
    """One launch: what D's memory holds afterwards, and what it should."""
    rng = np.random.default_rng(m * 1000 + n)
    grid = -(-m // 64), -(-n // TILE_N)
    shape = grid[0] * 64, grid[1] * TILE_N
    sums, more = (rng.integers(-99, 100, shape).astype(np.float32) for _ in "ab")
    cv, pv = (rng.integers(-9, 10, (m, n)).astype(np.float32) for _ in "cp")
    ea, eb = (rng.integers(low, low + 6, size) for low, size in zip(exponents, shape, strict=True))
    ld = n + extra
    memory = [sums, more, ea.astype(np.int32), eb.astype(np.int32), placed(cv, ld + 1, offset),
              placed(pv, ld, 1), placed(np.full((m, n), np.nan), ld, offset)]  # fmt: skip
    there = (True, kept, True, True, c, p, True)
    at = [Pointer(i, 4 * (0, 0, 0, 0, offset, 1, offset)[i]) if there[i] else None
          for i in range(7)]  # fmt: skip
    launch = Launch(
        "finish", (*grid, 1), 128,
        [m, n, alpha, beta, *at[:4], at[4], ld + 1, at[5], ld, at[6], ld],
        [Buffer.of(x) for x in memory],
    )  # fmt: skip
    ((*_, out),) = program().run([launch]).buffers
    total = (sums + more if kept else sums)[:m, :n].astype(np.float64)
    exact = np.ldexp(total, ea[:m, None] + eb[None, :n]) + (pv if p else 0)
    return out.spans[0], placed(alpha * exact + (beta * cv if c else 0), ld, offset)


@pytest.mark.parametrize(("extra", "offset"), list(itertools.product((0, 1, 2, 3), (0, 1, 2))))
def test_every_alignment_and_edge(extra, offset):
    for m, n in ((1, 1), (3, 2), (64, 64), (65, 63), (9, 130), (70, 129), (8, 7), (50, 66)):
        found, expected = finished(m, n, extra=extra, offset=offset)
        np.testing.assert_array_equal(found, expected, f"{m=} {n=}")


@pytest.mark.parametrize(("c", "p"), [(False, True), (True, False), (True, True)])
@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize(("m", "n", "extra", "offset"), [(66, 67, 0, 0), (64, 70, 2, 2)])
def test_addends_and_sums_that_were_laid_down(m, n, extra, offset, c, p, kept):
    found, expected = finished(
        m, n, alpha=2.0, beta=-3.0, c=c, p=p, kept=kept, extra=extra, offset=offset
    )
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    "exponents", [(-60, 55), (-163, 108), (108, -163), (-70, -66), (50, 60), (-163, -163)]
)
def test_scales_over_all_of_float32(exponents):
    found, expected = finished(20, 30, exponents=exponents)
    with np.errstate(over="ignore", under="ignore"):
        np.testing.assert_array_equal(found, expected.astype(np.float32))


# How the tiles of a triangle are numbered -----------------------------------------------


# Tiles of 128 x TILE_N in bands of 4 rows.
WALK = """
extern "C" __global__ void walk(index_t rows, index_t cols, unsigned* found) {
  const LowerTiles<128, TILE_N, 4> tiles{unsigned(rows), unsigned(cols)};
  found[0] = tiles.count();
  for (unsigned i = 0; i < found[0]; ++i) {
    const TileIndex tile = tiles.at(i);
    found[2 * i + 1] = unsigned(tile.row);
    found[2 * i + 2] = unsigned(tile.col);
  }
}
"""


@functools.cache
def walker(width: int) -> Program:
    return started(kernel_text("common/lower_tiles.cuh", {"TILE_N": width}) + WALK).result()


def walked(size: int, width: int) -> list[tuple[int, int]]:
    """Row and column of each tile, in the order of their numbers."""
    rows, cols = -(-size // 128), -(-size // width)
    room = np.zeros(2 * rows * cols + 1, np.uint32)
    launch = Launch("walk", (1, 1, 1), 1, [rows, cols, Pointer(0)], [Buffer.of(room)])
    ((memory,),) = walker(width).run([launch]).buffers
    count, *tiles = memory.spans[0].view(np.uint32).tolist()
    return list(zip(tiles[0 : 2 * count : 2], tiles[1 : 2 * count : 2], strict=True))


@pytest.mark.parametrize("width", [64, 128, 192, 256])
@pytest.mark.parametrize("size", [1, 64, 65, 128, 129, 512, 513, 1000, 1345, 2560])
def test_every_tile_that_reaches_the_diagonal_has_one_number(size, width):
    tiles = walked(size, width)
    assert len(set(tiles)) == len(tiles) == tiles_of(size, size, 128, width, lower=True)
    wanted = {(row, col) for row in range(-(-size // 128)) for col in range(-(-size // width))
              if col * width < (row + 1) * 128}  # fmt: skip
    assert set(tiles) == wanted


def test_bands_are_walked_column_by_column():
    """So that tiles in flight share few rows of A and few of B."""
    tiles = walked(1280, 128)  # ten rows of tiles
    assert tiles[:4] == [(0, 0), (1, 0), (2, 0), (3, 0)]
    assert [row // 4 for row, _ in tiles] == sorted(row // 4 for row, _ in tiles)
    for band in range(3):
        inside = [(col, row) for row, col in tiles if row // 4 == band]
        assert inside == sorted(inside)
