// B = transpose(A)        any element of WORDS * WORD_BYTES bytes, row-major, batched
//
//   A  rows x cols   rows lda elements apart (no lower bound: 0 repeats one row)
//   B  cols x rows   rows ldb >= rows elements apart; does not overlap A
//
// Batch i of a matrix begins i * stride elements after its pointer. An element is moved as WORDS
// words; the word is the largest that divides the element and every address, so a complex number
// on a 4-byte boundary works too.
//
// One thread block turns a TILE x TILE tile, TILE_ROWS rows at a time:
//
//     A           tile, one plane per word        B
//   +------+ row by row  +-------+ column by   +------+
//   |  ij  | ----------> | ij   || ----------> |  ji  |
//   +------+             +-------+ column      +------+
//                         PITCH = TILE + PAD: rows are padded by one bank or one element, so
//                         the 32 elements of a column lie in 32 different banks (8-byte words:
//                         the 16 of a half warp). 32 neighbouring lanes read and write a row.
//
// Cost: every element is read once and written once; 32 * PITCH * element bytes shared.

// What TransposeConfig.defines() sets. An editor, which sees this file alone, gets float32.
#ifdef __CLANGD__
#define WORD_BYTES 4
#define WORDS 1
#endif
#if !defined(WORD_BYTES) || !defined(WORDS)
#error "WORD_BYTES and WORDS must be defined: see TransposeConfig.defines()"
#endif

#include "common/index.cuh"

constexpr int TILE = 32;      // lanes of a warp
constexpr int TILE_ROWS = 8;  // warps of a block; each moves TILE / TILE_ROWS = 4 rows
constexpr int PAD = WORD_BYTES < 4 ? 4 / WORD_BYTES : 1;  // elements in a bank, at least one
constexpr int PITCH = TILE + PAD;                         // 33 for float32
constexpr int BAND = 8;  // tile rows in flight together; arbitrary

// clang-format off
template <int BYTES> struct WordOf;
template <> struct WordOf<1> { using type = unsigned char; };
template <> struct WordOf<2> { using type = unsigned short; };
template <> struct WordOf<4> { using type = unsigned int; };
template <> struct WordOf<8> { using type = unsigned long long; };
// clang-format on
using word_t = WordOf<WORD_BYTES>::type;

static_assert(TILE * PITCH * WORDS * WORD_BYTES <= 49152,
              "statically declared shared memory stops at 48 KiB");

extern "C" __global__ void __launch_bounds__(TILE* TILE_ROWS)
    transpose(index_t rows, index_t cols, const word_t* __restrict__ a, index_t lda,
              index_t stride_a, word_t* __restrict__ b, index_t ldb, index_t stride_b) {
  __shared__ word_t tile[WORDS][TILE][PITCH];

  const TileIndex at = banded_tile(blockIdx.x, ceil_div(rows, TILE), ceil_div(cols, TILE), BAND);
  const index_t row0 = at.row * TILE;
  const index_t col0 = at.col * TILE;
  const int rows_left = clip(rows - row0, TILE);
  const int cols_left = clip(cols - col0, TILE);
  const int lane = threadIdx.x % TILE;
  const int warp = threadIdx.x / TILE;
  const index_t batch = blockIdx.z;

  a += (batch * stride_a + row0 * lda + col0) * WORDS;
  b += (batch * stride_b + col0 * ldb + row0) * WORDS;
#pragma unroll
  for (int i = 0; i < TILE; i += TILE_ROWS) {
    const int row = warp + i;
    if (row < rows_left && lane < cols_left) {
#pragma unroll
      for (int w = 0; w < WORDS; ++w) tile[w][row][lane] = a[(row * lda + lane) * WORDS + w];
    }
  }
  __syncthreads();  // the tile is written before its columns are read
#pragma unroll
  for (int i = 0; i < TILE; i += TILE_ROWS) {
    const int col = warp + i;
    if (col < cols_left && lane < rows_left) {
#pragma unroll
      for (int w = 0; w < WORDS; ++w) b[(col * ldb + lane) * WORDS + w] = tile[w][lane][col];
    }
  }
}
