// Sizes, and how a one-dimensional grid walks a matrix of tiles.
//
// Sizes, leading dimensions and the offset of a tile's first element are 64-bit: a matrix may hold
// more than 2^31 elements. What counts threads, or elements inside one tile, is a plain int.
#pragma once

typedef long long index_t;

__device__ __forceinline__ index_t ceil_div(index_t a, index_t b) { return (a + b - 1) / b; }

// How many of `wanted` elements exist when only `left` do.
__device__ __forceinline__ int clip(index_t left, int wanted) {
  return left < wanted ? static_cast<int>(left) : wanted;
}

struct TileIndex {
  index_t row, col;
};

// Which tile thread block number `block` computes. Bands of `band` tile rows are walked column by
// column, so that the blocks in flight at one time share few rows of A and few columns of B:
//
//   band 0   0 2 4 6      band = 2, five tile rows of four: the numbers are blockIdx.x.
//            1 3 5 7      gridDim.x takes 2^31 - 1 blocks; gridDim.y would stop at 65535.
//   band 1   8 10 ...
__device__ __forceinline__ TileIndex banded_tile(index_t block, index_t tile_rows,
                                                 index_t tile_cols, int band) {
  const index_t first_row = block / (band * tile_cols) * band;
  const index_t rest = block % (band * tile_cols);
  const int rows = clip(tile_rows - first_row, band);  // the last band may be lower
  return {first_row + rest % rows, rest / rows};
}
