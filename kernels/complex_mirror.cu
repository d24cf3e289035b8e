// D = alpha (H + P), of which one triangle is given: Hermitian, or symmetric
//
//   H_ij = R_ij + i (S_ij + sign S_ji)    for j <= i, and sign H_ij's imaginary part in H_ji
//
//   R, S   n x n, row-major, contiguous. R is read below the diagonal and on it, S everywhere
//   P, D   n x n complex numbers, row-major, ldp and ldd of them from row to row, each at a multiple
//          of 8 bytes. P is read where R is; it may be null
//
// With sign = -1 and X = Xr + i Xi that is X^H X, for R = Xr' Xr + Xi' Xi and S = Xr' Xi; with sign =
// 1 it is X' X, for R = Xr' Xr - Xi' Xi. R and S take half of the operations of a complex product.
//
// One thread block computes a TILE x TILE tile of D below the diagonal, or on it, and stores it
// twice. It needs the tile of S and the mirrored one, which it turns in shared memory; so it does
// with what it stores in the mirrored place:
//
//     I > J          S  J,I turned           D  I,J                  D  J,I
//   +------------+      +-----------+        +-----------+           +-----------+
//   | t0  t1 ..  |  +   | shared    |   ->   | shared    |  turned   | rows, lane|
//   | rows       |      | memory    |        | memory    |    ->     | by lane   |
//   +------------+      +-----------+        +-----------+           +-----------+
//
// Blocks are numbered so that rows of tiles r and t - 1 - r follow each other: all such pairs have
// t + 1 tiles. Of an odd t, the middle row is its own partner; the second time nothing is done.
//
// Cost: 12 bytes read (20 with P) and 16 written for each pair of elements.

// What multimm/gpu/elementwise/complex_parts.py sets. An editor, which sees this file alone, gets
// these.
#ifdef __CLANGD__
#define THREADS 256
#define TILE 32
#endif
#if !defined(THREADS) || !defined(TILE)
#error "THREADS and TILE must be defined: see multimm/gpu/elementwise/complex_parts.py"
#endif

#include "common/ieee.cuh"
#include "common/index.cuh"

constexpr int ROWS_AT_ONCE = THREADS / TILE;
static_assert(THREADS % TILE == 0 && TILE % ROWS_AT_ONCE == 0, "threads cover whole rows of a tile");

// Which tile thread block `block` computes, of t rows of tiles; false if another one does.
__device__ __forceinline__ bool lower_tile(index_t block, index_t t, TileIndex& at) {
  const index_t r = block / (t + 1), c = block % (t + 1);
  const bool second = c >= t - r;
  at = second ? TileIndex{r, c - (t - r)} : TileIndex{t - 1 - r, c};
  return !(second && 2 * r == t - 1);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    mirror_complex(index_t n, const float* __restrict__ re, const float* __restrict__ s, float sign,
                   float alpha, const float2* __restrict__ p, index_t ldp, float2* __restrict__ d,
                   index_t ldd) {
  __shared__ float turned[TILE][TILE + 1];
  __shared__ float2 made[TILE][TILE + 1];

  TileIndex at;
  if (!lower_tile(blockIdx.x, ceil_div(n, TILE), at)) return;  // the same in all threads
  const index_t row0 = at.row * TILE, col0 = at.col * TILE;
  const int rows = clip(n - row0, TILE), cols = clip(n - col0, TILE);
  const int lane = threadIdx.x % TILE, first = threadIdx.x / TILE;

#pragma unroll
  for (int u = 0; u < TILE / ROWS_AT_ONCE; ++u) {
    const int i = first + u * ROWS_AT_ONCE;
    if (i < cols && lane < rows) turned[i][lane] = s[(col0 + i) * n + row0 + lane];
  }
  __syncthreads();  // the mirrored tile of S is there before its columns are read
#pragma unroll
  for (int u = 0; u < TILE / ROWS_AT_ONCE; ++u) {
    const int i = first + u * ROWS_AT_ONCE;
    if (i >= rows || lane >= cols || row0 + i < col0 + lane) continue;
    const index_t from = (row0 + i) * n + col0 + lane;
    float2 h = {re[from], add_rn(s[from], sign * turned[lane][i])};
    if (p) {
      const float2 more = p[(row0 + i) * ldp + col0 + lane];
      h = float2{add_rn(h.x, more.x), add_rn(h.y, more.y)};
    }
    h = float2{mul_rn(alpha, h.x), mul_rn(alpha, h.y)};
    made[i][lane] = h;
    d[(row0 + i) * ldd + col0 + lane] = h;
  }
  __syncthreads();  // the tile of D is there before its columns are read
#pragma unroll
  for (int u = 0; u < TILE / ROWS_AT_ONCE; ++u) {
    const int i = first + u * ROWS_AT_ONCE;
    if (i >= cols || lane >= rows || row0 + lane <= col0 + i) continue;
    const float2 h = made[lane][i];
    d[(col0 + i) * ldd + row0 + lane] = float2{h.x, sign * h.y};
  }
}
