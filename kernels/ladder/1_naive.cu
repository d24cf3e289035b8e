// D = alpha * A * B + beta * C        float32, row-major        rung 1: the definition
//
//   A m x k, B k x n, C and D m x n; rows lie lda, ldb, ldc and ldd elements apart
//
//   D[row][col] = alpha * (A[row][0] * B[0][col] + ... + A[row][k-1] * B[k-1][col]) + ...
//
//       D          BLOCK            one block             one thread
//    +----+----+                  +------------+       one value of D: a walk along a row
//    | b0 | b1 |  BLOCK           | t0 t32     |       of A and down a column of B
//    +----+----+                  | t1 t33 ... |
//    | b2 | b3 |                  | ..         |       one warp: a column of the block
//    +----+----+                  +------------+
//
// Neighbouring threads take neighbouring rows, as the formula counts: first i, then j.
//
// Cost, per warp and k: 32 fma, 2 loads. The load of A touches 32 rows, in 32 sectors of 32 bytes
// of which 4 bytes are used; that of B is one value for all lanes. Every element of A is read n
// times, every element of B m times.

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
    sgemm_naive(index_t m, index_t n, index_t k, float alpha, const float* __restrict__ a,
                index_t lda, const float* __restrict__ b, index_t ldb, float beta,
                const float* __restrict__ c, index_t ldc, float* __restrict__ d, index_t ldd) {
  const TileIndex tile = banded_tile(blockIdx.x, ceil_div(m, BLOCK), ceil_div(n, BLOCK), BAND);
  const int thread = threadIdx.x;
  const index_t row = tile.row * BLOCK + thread % BLOCK;
  const index_t col = tile.col * BLOCK + thread / BLOCK;
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
