// D = alpha * A * B + beta * C        float32, row-major        rung 3: tiles in shared memory
//
//   A m x k, B k x n, C and D m x n; rows lie lda, ldb, ldc and ldd elements apart
//
//                  BLOCK                one thread
//               B +------+           one value of D; copies one element of A and one of B per
//                 |b_tile|  BLOCK    step of k
//                 +------+
//       BLOCK     |  :   |           one warp: a row of the block, as before
//   A +------+ .. +------+
//     |a_tile|    |block |  BLOCK    A step of k: copy a tile of A and one of B to shared memory,
//     +------+ .. +------+  of D     barrier, multiply from there, barrier.
//
// One idea: the threads of a block need the same BLOCK rows of A and columns of B. They fetch
// them together, a tile at a time, and read each element BLOCK times from shared memory.
//
// Cost, per warp and k: 32 fma; 1 shared read of B, and 1 of A that the compiler makes one for 4 k
// (16 bytes, the same for all lanes): no bank conflicts. Global memory is read BLOCK times less
// often than before. 2 * BLOCK * BLOCK * 4 = 8192 bytes shared.

#ifdef __CLANGD__  // an editor sees this file alone
#define BLOCK 32
#endif
#ifndef BLOCK
#error "BLOCK must be defined: see multimm_benchmarks/ladder.py"
#endif

#include "common/ieee.cuh"
#include "common/index.cuh"

static_assert(BLOCK * BLOCK <= 1024, "a thread block has at most 1024 threads");
static_assert(BLOCK % 4 == 0, "rows of a tile begin on 16 bytes");

constexpr int BAND = 8;  // tile rows in flight together; arbitrary

extern "C" __global__ void __launch_bounds__(BLOCK* BLOCK)
    sgemm_shared_tile(index_t m, index_t n, index_t k, float alpha, const float* __restrict__ a,
                      index_t lda, const float* __restrict__ b, index_t ldb, float beta,
                      const float* __restrict__ c, index_t ldc, float* __restrict__ d,
                      index_t ldd) {
  __shared__ __align__(16) float a_tile[BLOCK][BLOCK];
  __shared__ __align__(16) float b_tile[BLOCK][BLOCK];

  const TileIndex tile = banded_tile(blockIdx.x, ceil_div(m, BLOCK), ceil_div(n, BLOCK), BAND);
  const int y = threadIdx.x / BLOCK;
  const int x = threadIdx.x % BLOCK;
  const index_t row = tile.row * BLOCK + y;
  const index_t col = tile.col * BLOCK + x;

  if (is_zero(alpha)) k = 0;  // A and B are not read
  if (k == 0) alpha = 0.0f;   // an infinite alpha times nothing is nothing
  float sum = 0.0f;
  // Threads outside of D help to copy and wait at every barrier: k0 is the same for all.
  for (index_t k0 = 0; k0 < k; k0 += BLOCK) {
    // What lies outside of A and B counts as 0 in both, so the sums run over whole steps.
    a_tile[y][x] = row < m && k0 + x < k ? a[row * lda + k0 + x] : 0.0f;
    b_tile[y][x] = col < n && k0 + y < k ? b[(k0 + y) * ldb + col] : 0.0f;
    __syncthreads();  // the tiles are written before anybody reads them
#pragma unroll
    for (int kk = 0; kk < BLOCK; ++kk) sum = fma_rn(a_tile[y][kk], b_tile[kk][x], sum);
    __syncthreads();  // they are read by all before they are overwritten
  }
  if (row >= m || col >= n) return;
  const float product = mul_rn(alpha, sum);
  d[row * ldd + col] =
      is_zero(beta) ? product : fma_rn(alpha, sum, mul_rn(beta, c[row * ldc + col]));
}
