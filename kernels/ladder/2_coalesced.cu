// D = alpha * A * B + beta * C        float32, row-major        rung 2: lanes along a row
//
//   A m x k, B k x n, C and D m x n; rows lie lda, ldb, ldc and ldd elements apart
//
//       D          BLOCK            one block             one thread
//    +----+----+                  +------------+       one value of D, as before
//    | b0 | b1 |  BLOCK           | t0 t1 ..   |
//    +----+----+                  | t32 t33 .. |       one warp: a row of the block
//    | b2 | b3 |                  | ..         |
//    +----+----+                  +------------+
//
// One idea: the 32 lanes of a warp take 32 neighbouring columns. What they read of B, and write
// of D, is then one run of 128 bytes, and what they read of A is one value.
//
// Cost, per warp and k: 32 fma, 2 loads. That of B touches 4 sectors, all 128 bytes of them used;
// that of A is one value for all lanes. Elements are read as often as before, but the sectors of
// A are read once per warp and not once per lane.

#ifdef __CLANGD__  // an editor sees this file alone
#define BLOCK 32
#endif
#ifndef BLOCK
#error "BLOCK must be defined: see multimm_benchmarks/ladder.py"
#endif

#include "common/ieee.cuh"
#include "common/index.cuh"

static_assert(BLOCK * BLOCK <= 1024, "a thread block has at most 1024 threads");

constexpr int BAND = 8;  // tile rows in flight together; arbitrary

extern "C" __global__ void __launch_bounds__(BLOCK* BLOCK)
    sgemm_coalesced(index_t m, index_t n, index_t k, float alpha, const float* __restrict__ a,
                    index_t lda, const float* __restrict__ b, index_t ldb, float beta,
                    const float* __restrict__ c, index_t ldc, float* __restrict__ d, index_t ldd) {
  const TileIndex tile = banded_tile(blockIdx.x, ceil_div(m, BLOCK), ceil_div(n, BLOCK), BAND);
  const int thread = threadIdx.x;
  const index_t row = tile.row * BLOCK + thread / BLOCK;
  const index_t col = tile.col * BLOCK + thread % BLOCK;
  if (row >= m || col >= n) return;

  if (is_zero(alpha)) k = 0;  // A and B are not read
  if (k == 0) alpha = 0.0f;   // an infinite alpha times nothing is nothing
  float sum = 0.0f;
  for (index_t kk = 0; kk < k; ++kk) {
    sum = fma_rn(a[row * lda + kk], b[kk * ldb + col], sum);
  }
  const float product = mul_rn(alpha, sum);
  d[row * ldd + col] =
      is_zero(beta) ? product : fma_rn(alpha, sum, mul_rn(beta, c[row * ldc + col]));
}
