// What sgemm_split.cu and sgemm_split_mma.cu share: packed operands, the tiles of D, stretches of k.
//
// Both define TILE_N, BAND and PARTS, and LOWER where only the lower triangle of D is computed.
#pragma once

#include "common/index.cuh"
#include "common/lower_tiles.cuh"

constexpr int SLAB = 64;       // k of a packed tile
constexpr int TILE_ROWS = 64;  // rows of a packed tile
constexpr int TILE_BYTES = TILE_ROWS * SLAB * 2;
constexpr int TILE_M = 128;               // rows of a tile of D
constexpr int A_TILES = TILE_M / TILE_ROWS;
constexpr int B_TILES = TILE_N / TILE_ROWS;
constexpr int FOLD = 32;               // slabs: 2048 k
#ifdef BROAD
constexpr int FLUSH = 1 << 30;  // never: in D is the product of the stretch of k before, which is P
#else
constexpr int FLUSH = 128;  // slabs: 8192 k
#endif
constexpr int PROMOTE = 48;            // slabs: 3072 k

#ifdef BROAD
static_assert(PARTS == 1 || PARTS == 3, "one product of TF32, or six of bfloat16");
#else
static_assert(PARTS == 1 || PARTS == 2, "one product, or three");
#endif
static_assert(TILE_N % TILE_ROWS == 0, "B is packed in tiles of 64 rows");

// The tiles of D, slice by slice: thread block i takes number i, then i + gridDim.x, and so on.
// Numbers are 32-bit: whatever D fits a GPU's memory has fewer tiles.
struct Work {
  unsigned tile_rows, tile_cols, slices;
  index_t slabs, slab_step;
#ifdef LOWER
  unsigned tiles;  // of a slice

  __device__ __forceinline__ unsigned per_slice() const { return tiles; }
  __device__ __forceinline__ TileIndex tile(unsigned item) const {
    return LowerTiles<TILE_M, TILE_N, BAND>{tile_rows, tile_cols}.at(in_slice(item));
  }
#else
  __device__ __forceinline__ unsigned per_slice() const { return tile_rows * tile_cols; }
  // Bands of BAND rows of tiles are walked column by column: what is multiplied at one time shares
  // few rows of A and few of B, which then come from L2.
  __device__ __forceinline__ TileIndex tile(unsigned item) const {
    const unsigned tile = in_slice(item);
    const unsigned above = tile / (BAND * tile_cols) * BAND;
    const unsigned rest = tile - above * tile_cols;
    const unsigned rows = tile_rows - above < BAND ? tile_rows - above : BAND;
    return {above + rest % rows, rest / rows};
  }
#endif
  __device__ __forceinline__ unsigned count() const { return per_slice() * slices; }
  __device__ __forceinline__ unsigned slice(unsigned item) const {
    return slices == 1 ? 0 : item / per_slice();
  }
  __device__ __forceinline__ unsigned in_slice(unsigned item) const {
    return slices == 1 ? item : item % per_slice();
  }
  __device__ __forceinline__ index_t first_slab(unsigned item) const {
    return slice(item) * slab_step;
  }
  __device__ __forceinline__ index_t slab_count(unsigned item) const {
    const index_t left = slabs - first_slab(item);
    return left < slab_step ? left : slab_step;
  }
};

__device__ __forceinline__ Work work_of(index_t m, index_t n, index_t slabs, index_t slab_step,
                                        float alpha) {
  const unsigned tile_rows = static_cast<unsigned>(ceil_div(m, TILE_M));
  const unsigned tile_cols = static_cast<unsigned>(ceil_div(n, TILE_N));
  return {tile_rows, tile_cols,
          static_cast<unsigned>(slab_step ? ceil_div(slabs, slab_step) : 1),
          alpha == 0.0f ? 0 : slabs, slab_step ? slab_step : slabs,
#ifdef LOWER
          LowerTiles<TILE_M, TILE_N, BAND>{tile_rows, tile_cols}.count()
#endif
  };
}

// An operand as it is copied; `last` is its last row of packed tiles. Of rows of tiles beyond it
// nothing is stored: the last one stands in for them.
struct Packed {
  const char* tiles;
  index_t slabs, last;
  __device__ __forceinline__ const char* at(index_t row, index_t slab) const {
    return tiles + ((row < last ? row : last) * slabs + slab) * (PARTS * TILE_BYTES);
  }
};
__device__ __forceinline__ Packed packed_of(const char* tiles, index_t rows, index_t slabs) {
  return {tiles, slabs, ceil_div(rows, 128) * 2 - 1};
}
