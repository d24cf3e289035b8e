// D = alpha * A * B + beta * C        float32, row-major        rung 5: a square per thread
//
//   A m x k, B k x n, C and D m x n; rows lie lda, ldb, ldc and ldd elements apart
//
//                 BLOCK_N              one thread
//               B +------+           THREAD_M x THREAD_N values of D in registers
//                 |b_tile| BLOCK_K
//                 +------+                  b0 b1 .. b7
//      BLOCK_K    |  :   |             a0 |  *  *     *     an outer product per k:
//   A +------+ .. +------+             a1 |  *  *     *     THREAD_M + THREAD_N values read,
//     |a_tile|    |block | BLOCK_M     .. |                 THREAD_M * THREAD_N multiply-adds
//     +------+ .. +------+  of D       a7 |  *  *     *
//
//   one warp: 2 x 16 such squares, 16 rows and all 128 columns of the block
//
// One idea: what a thread reads grows with the edge of its square, what it computes with the area.
//
// Cost, per thread and k: THREAD_M * THREAD_N = 64 fma, 16 words from shared memory. Reads of A
// are the same for half a warp, and 16 bytes of them hold 4 k. Reads of B by neighbouring lanes
// begin 8 words apart, so that those 4 words wide hit each bank twice. Per step 4 loads and 4
// shared writes of each tile. (BLOCK_M + BLOCK_N) * BLOCK_K * 4 = 8192 bytes shared. MIN_BLOCKS
// thread blocks on a multiprocessor leave 128 registers per thread.

#ifdef __CLANGD__  // an editor sees this file alone
#define BLOCK_M 128
#define BLOCK_N 128
#define BLOCK_K 8
#define THREAD_M 8
#define THREAD_N 8
#define MIN_BLOCKS 2
#endif
#if !defined(BLOCK_M) || !defined(BLOCK_N) || !defined(BLOCK_K)
#error "BLOCK_M, BLOCK_N and BLOCK_K must be defined: see multimm_benchmarks/ladder.py"
#endif
#if !defined(THREAD_M) || !defined(THREAD_N) || !defined(MIN_BLOCKS)
#error "THREAD_M, THREAD_N and MIN_BLOCKS must be defined: see multimm_benchmarks/ladder.py"
#endif

#include "common/ieee.cuh"
#include "common/index.cuh"

constexpr int THREADS = BLOCK_M / THREAD_M * (BLOCK_N / THREAD_N);  // 16 * 16 = 256
constexpr int ROWS_A = THREADS / BLOCK_K;  // rows of A that the block loads at once: 256 / 8 = 32
constexpr int ROWS_B = THREADS / BLOCK_N;  // 256 / 128 = 2
constexpr int BAND = 8;  // tile rows in flight together; arbitrary

static_assert(BLOCK_M % THREAD_M == 0 && BLOCK_N % THREAD_N == 0, "whole squares fill the block");
static_assert(THREADS <= 1024, "a thread block has at most 1024 threads");
static_assert(THREADS % BLOCK_K == 0 && BLOCK_M % ROWS_A == 0 && THREADS % BLOCK_N == 0 &&
                  BLOCK_K % ROWS_B == 0,
              "every thread copies as many elements as any other, whole rows at a time");

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    sgemm_register_tile_2d(index_t m, index_t n, index_t k, float alpha,
                           const float* __restrict__ a, index_t lda, const float* __restrict__ b,
                           index_t ldb, float beta, const float* __restrict__ c, index_t ldc,
                           float* __restrict__ d, index_t ldd) {
  __shared__ float a_tile[BLOCK_M][BLOCK_K];
  __shared__ float b_tile[BLOCK_K][BLOCK_N];

  const TileIndex tile = banded_tile(blockIdx.x, ceil_div(m, BLOCK_M), ceil_div(n, BLOCK_N), BAND);
  const index_t row0 = tile.row * BLOCK_M;
  const index_t col0 = tile.col * BLOCK_N;
  const int rows = clip(m - row0, BLOCK_M);
  const int cols = clip(n - col0, BLOCK_N);
  const int thread = threadIdx.x;
  const int row = thread / (BLOCK_N / THREAD_N) * THREAD_M;
  const int col = thread % (BLOCK_N / THREAD_N) * THREAD_N;
  // Where in the tiles this thread's first element of A and of B goes.
  const int a_row = thread / BLOCK_K, a_k = thread % BLOCK_K;
  const int b_k = thread / BLOCK_N, b_col = thread % BLOCK_N;
  a += (row0 + a_row) * lda + a_k;
  b += b_k * ldb + col0 + b_col;

  if (is_zero(alpha)) k = 0;  // A and B are not read
  if (k == 0) alpha = 0.0f;   // an infinite alpha times nothing is nothing
  float sum[THREAD_M][THREAD_N] = {};
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
      float a_frag[THREAD_M], b_frag[THREAD_N];
#pragma unroll
      for (int i = 0; i < THREAD_M; ++i) a_frag[i] = a_tile[row + i][kk];
#pragma unroll
      for (int j = 0; j < THREAD_N; ++j) b_frag[j] = b_tile[kk][col + j];
#pragma unroll
      for (int i = 0; i < THREAD_M; ++i) {
#pragma unroll
        for (int j = 0; j < THREAD_N; ++j) sum[i][j] = fma_rn(a_frag[i], b_frag[j], sum[i][j]);
      }
    }
    __syncthreads();  // they are read by all before they are overwritten
  }

  if (!is_zero(beta)) c += row0 * ldc + col0;
  d += row0 * ldd + col0;
#pragma unroll
  for (int i = 0; i < THREAD_M; ++i) {
#pragma unroll
    for (int j = 0; j < THREAD_N; ++j) {
      const int y = row + i, x = col + j;
      if (y >= rows || x >= cols) continue;
      const float product = mul_rn(alpha, sum[i][j]);
      d[y * ldd + x] =
          is_zero(beta) ? product : fma_rn(alpha, sum[i][j], mul_rn(beta, c[y * ldc + x]));
    }
  }
}
