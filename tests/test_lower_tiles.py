"""How the tiles of a square D that reach its diagonal are numbered, by the kernels' own code.

What becomes of sums is in the cases of sgemm_split_mma: `cuda_on_cpu/split_products.py`.
"""

from __future__ import annotations

import functools

import numpy as np
import pytest
from cuda_on_cpu.program import Buffer, Launch, Pointer, Program, started

from multimm.gpu.arch import tiles_of
from multimm.gpu.runtime.kernel_source import kernel_text

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
