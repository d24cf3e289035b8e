// D = alpha * A * B + beta * C        float32, row-major        rung 4: a column per thread
//
//   A m x k, B k x n, C and D m x n; rows lie lda, ldb, ldc and ldd elements apart
//
//                 BLOCK_N              one thread
//               B +------+           THREAD_M values of D, one below the other, in registers:
//                 |b_tile| BLOCK_K
//                 +------+                 b_tile[kk][col]
//      BLOCK_K    |  :   |                   |
//   A +------+ .. +------+              a0 --*-- sum[0]     one value of B serves THREAD_M
//     |a_tile|    |block | BLOCK_M      a1 --*-- sum[1]     multiply-adds
//     +------+ .. +------+  of D        .. --*-- ..
//
//   one warp: 32 neighbouring columns, THREAD_M rows
//
// One idea: a value in a register is free to read. On rung 3 every multiply-add waited for
// shared memory; here THREAD_M of them share one read of B.
//
// Cost, per thread and k: THREAD_M = 8 fma, 1 shared read of B, and 8 of A that the compiler makes
// 2 (16 bytes hold 4 k; all lanes read the same): no bank conflicts. Per step one load and one
// shared write of each tile. (BLOCK_M + BLOCK_N) * BLOCK_K * 4 = 4096 bytes shared.

#ifdef __CLANGD__  // an editor sees this file alone
#define BLOCK_M 64
#define BLOCK_N 64
#define BLOCK_K 8
#define THREAD_M 8
#endif
#if !defined(BLOCK_M) || !defined(BLOCK_N) || !defined(BLOCK_K) || !defined(THREAD_M)
#error "BLOCK_M, BLOCK_N, BLOCK_K and THREAD_M must be defined: see multimm_benchmarks/ladder.py"
#endif

#include "common/ieee.cuh"
#include "common/index.cuh"

constexpr int THREADS = BLOCK_M / THREAD_M * BLOCK_N;  // 8 * 64 = 512
constexpr int ROWS_A = THREADS / BLOCK_K;  // rows of A that the block loads at once: 512 / 8 = 64
constexpr int ROWS_B = THREADS / BLOCK_N;  // 512 / 64 = 8
constexpr int BAND = 8;  // tile rows in flight together; arbitrary

static_assert(BLOCK_M % THREAD_M == 0, "the threads of a column share its rows evenly");
static_assert(THREADS <= 1024, "a thread block has at most 1024 threads");
static_assert(BLOCK_K % 4 == 0, "rows of a_tile begin on 16 bytes");
static_assert(THREADS % BLOCK_K == 0 && BLOCK_M % ROWS_A == 0 && THREADS % BLOCK_N == 0 &&
                  BLOCK_K % ROWS_B == 0,
              "every thread copies as many elements as any other, whole rows at a time");

extern "C" __global__ void __launch_bounds__(THREADS)
    sgemm_register_tile_1d(index_t m, index_t n, index_t k, float alpha,
                           const float* __restrict__ a, index_t lda, const float* __restrict__ b,
                           index_t ldb, float beta, const float* __restrict__ c, index_t ldc,
                           float* __restrict__ d, index_t ldd) {
  __shared__ __align__(16) float a_tile[BLOCK_M][BLOCK_K];
  __shared__ __align__(16) float b_tile[BLOCK_K][BLOCK_N];

  const TileIndex tile = banded_tile(blockIdx.x, ceil_div(m, BLOCK_M), ceil_div(n, BLOCK_N), BAND);
  const index_t row0 = tile.row * BLOCK_M;
  const index_t col0 = tile.col * BLOCK_N;
  const int rows = clip(m - row0, BLOCK_M);
  const int cols = clip(n - col0, BLOCK_N);
  const int thread = threadIdx.x;
  const int row = thread / BLOCK_N * THREAD_M;
  const int col = thread % BLOCK_N;
  // Where in the tiles this thread's first element of A and of B goes.
  const int a_row = thread / BLOCK_K, a_k = thread % BLOCK_K;
  const int b_k = thread / BLOCK_N, b_col = thread % BLOCK_N;
  a += (row0 + a_row) * lda + a_k;
  b += b_k * ldb + col0 + b_col;

  if (is_zero(alpha)) k = 0;  // A and B are not read
  if (k == 0) alpha = 0.0f;   // an infinite alpha times nothing is nothing
  float sum[THREAD_M] = {};
  for (index_t k0 = 0; k0 < k; k0 += BLOCK_K) {
    const int ks = clip(k - k0, BLOCK_K);
    // What lies outside of A and B counts as 0 in both, so the sums run over whole steps.
#pragma unroll
    for (int i = 0; i < BLOCK_M; i += ROWS_A) {
      a_tile[a_row + i][a_k] = a_row + i < rows && a_k < ks ? a[i * lda] : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < BLOCK_K; i += ROWS_B) {
      b_tile[b_k + i][b_col] = b_k + i < ks && b_col < cols ? b[i * ldb] : 0.0f;
    }
    a += BLOCK_K;
    b += BLOCK_K * ldb;
    __syncthreads();  // the tiles are written before anybody reads them
#pragma unroll
    for (int kk = 0; kk < BLOCK_K; ++kk) {
      const float b_value = b_tile[kk][col];
#pragma unroll
      for (int i = 0; i < THREAD_M; ++i) sum[i] = fma_rn(a_tile[row + i][kk], b_value, sum[i]);
    }
    __syncthreads();  // they are read by all before they are overwritten
  }

  if (!is_zero(beta)) c += row0 * ldc + col0;
  d += row0 * ldd + col0;
#pragma unroll
  for (int i = 0; i < THREAD_M; ++i) {
    if (row + i >= rows || col >= cols) continue;
    const float product = mul_rn(alpha, sum[i]);
    d[(row + i) * ldd + col] =
        is_zero(beta) ? product : fma_rn(alpha, sum[i], mul_rn(beta, c[(row + i) * ldc + col]));
  }
}
