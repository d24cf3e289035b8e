// D = alpha * A * B + beta * C        float32, row-major        rung 7: tiles for warps
//
//   A m x k, B k x n, C and D m x n; rows lie lda, ldb, ldc and ldd elements apart
//
//        one block                     one warp                     one thread
//        BLOCK_N                       WARP_N
//      +----+----+              +--+--+- -+--+--+- -         THREAD_M x THREAD_N values of D,
//      | w0 | w1 | WARP_M       |l0|l1|   |l0|l1|            in strips of STRIP x STRIP that lie
//      +----+----+              +--+--+   +--+--+            STRIDE_M rows, STRIDE_N columns
//      | w2 | w3 |              |l2|l3|   |l2|l3|            apart
//      +----+----+              +- -+- - - - - - - -
//      | .. | .. |                LANES_M x LANES_N lanes
//
// One idea: a level between block and thread. A warp computes a square of D, and so reads the
// fewest words of shared memory for its multiply-adds: WARP_M + WARP_N for WARP_M * WARP_N. On
// rung 6 a warp computed 16 x 128, from 144 words; here 64 x 64, from 128, twice the values.
// With so many values per thread few warps fit, and none is left to compute while others load. So
// while one step is multiplied, the next is on its way from global memory into registers, then
// into the other one of two buffers, which leaves one barrier per step.
//
// Cost, per thread and k: 128 fma, 6 shared reads of 16 bytes. Per step 3 loads of 16 bytes and 9
// shared writes. Of 8 neighbouring lanes, which are served together, 4 read different strips of A
// and 2 of B: no bank conflicts. 2 * BLOCK_K * (BLOCK_M + 4 + BLOCK_N) * 4 = 24832 bytes shared,
// some 220 registers per thread: one block on a multiprocessor.

#ifdef __CLANGD__  // an editor sees this file alone
#define BLOCK_M 256
#define BLOCK_N 128
#define BLOCK_K 8
#define WARP_M 64
#define WARP_N 64
#define THREAD_M 16
#define THREAD_N 8
#define MIN_BLOCKS 1
#endif
#if !defined(BLOCK_M) || !defined(BLOCK_N) || !defined(BLOCK_K) || !defined(MIN_BLOCKS)
#error "BLOCK_M, BLOCK_N, BLOCK_K and MIN_BLOCKS must be defined: see multimm_benchmarks/ladder.py"
#endif
#if !defined(WARP_M) || !defined(WARP_N) || !defined(THREAD_M) || !defined(THREAD_N)
#error "WARP_M, WARP_N, THREAD_M and THREAD_N must be defined: see multimm_benchmarks/ladder.py"
#endif

#include "common/ieee.cuh"
#include "common/index.cuh"

constexpr int STRIP = 4;                                     // floats in 16 bytes
constexpr int LANES_M = WARP_M / THREAD_M;                   // 64 / 16 = 4
constexpr int LANES_N = WARP_N / THREAD_N;                   // 64 / 8 = 8
constexpr int STRIDE_M = LANES_M * STRIP;                    // 4 * 4 = 16
constexpr int STRIDE_N = LANES_N * STRIP;                    // 8 * 4 = 32
constexpr int WARPS_N = BLOCK_N / WARP_N;                    // 128 / 64 = 2
constexpr int THREADS = BLOCK_M / WARP_M * WARPS_N * 32;     // 4 * 2 * 32 = 256
constexpr int PITCH_A = BLOCK_M + STRIP;                     // words from k to k in a_tile
constexpr int ROWS_A = THREADS / 2;                          // rows of A that one load covers
constexpr int LOADS_A = BLOCK_M * BLOCK_K / STRIP / THREADS; // 256 * 8 / 4 / 256 = 2
constexpr int LOADS_B = BLOCK_K * BLOCK_N / STRIP / THREADS; // 1
constexpr int BAND = 8;  // tile rows in flight together; arbitrary

static_assert(LANES_M * LANES_N == 32, "the lanes of a warp share its tile");
static_assert(LANES_N % 2 == 0, "lanes are numbered in pairs along n");
static_assert(THREAD_M % STRIP == 0 && THREAD_N % STRIP == 0, "a thread owns whole strips");
static_assert(BLOCK_M % WARP_M == 0 && BLOCK_N % WARP_N == 0, "whole warps fill the block");
static_assert(THREADS <= 1024, "a thread block has at most 1024 threads");
static_assert(BLOCK_K % 8 == 0 && BLOCK_M % ROWS_A == 0,
              "two threads load one sector of A, 8 neighbours along k");
static_assert(BLOCK_K * BLOCK_N % (STRIP * THREADS) == 0,
              "every thread copies as many strips of B as any other");
static_assert(2 * BLOCK_K * (PITCH_A + BLOCK_N) * sizeof(float) <= 49152,
              "statically declared shared memory stops at 48 KiB");

// Whether every row of a matrix begins on 16 bytes.
__device__ __forceinline__ bool rows_aligned(const float* first, index_t ld) {
  return reinterpret_cast<unsigned long long>(first) % 16 == 0 && ld % STRIP == 0;
}

// Four neighbours, of which `left` exist; what does not exist is 0.
__device__ __forceinline__ float4 load_elements(const float* from, int left) {
  return {left > 0 ? from[0] : 0.0f, left > 1 ? from[1] : 0.0f, left > 2 ? from[2] : 0.0f,
          left > 3 ? from[3] : 0.0f};
}

__device__ __forceinline__ float4 load_strip(const float* from) {
  return *reinterpret_cast<const float4*>(from);
}

// A thread's share of the next step, on its way from global to shared memory.
struct Step {
  float4 a[LOADS_A], b[LOADS_B];

  // Where in the tiles a thread's strips are: A's along k, in sectors of 8; B's along n.
  static __device__ int a_row(int i) { return threadIdx.x / 2 + i % (BLOCK_M / ROWS_A) * ROWS_A; }
  static __device__ int a_k(int i) { return threadIdx.x % 2 * STRIP + i / (BLOCK_M / ROWS_A) * 8; }
  static __device__ int b_k(int i) { return (i * THREADS + threadIdx.x) / (BLOCK_N / STRIP); }
  static __device__ int b_col(int i) {
    return (i * THREADS + threadIdx.x) % (BLOCK_N / STRIP) * STRIP;
  }

  // What lies outside of A and B counts as 0 in both, so the sums run over whole steps.
  __device__ __forceinline__ void fetch(const float* from_a, index_t lda, const float* from_b,
                                        index_t ldb, int rows, int cols, int ks, bool strips) {
#pragma unroll
    for (int i = 0; i < LOADS_A; ++i) {
      const float* from = from_a + a_row(i) * lda + a_k(i);
      a[i] = strips ? load_strip(from) : load_elements(from, a_row(i) < rows ? ks - a_k(i) : 0);
    }
#pragma unroll
    for (int i = 0; i < LOADS_B; ++i) {
      const float* from = from_b + b_k(i) * ldb + b_col(i);
      b[i] = strips ? load_strip(from) : load_elements(from, b_k(i) < ks ? cols - b_col(i) : 0);
    }
  }

  __device__ __forceinline__ void store(float (&a_tile)[BLOCK_K][PITCH_A],
                                        float (&b_tile)[BLOCK_K][BLOCK_N]) const {
#pragma unroll
    for (int i = 0; i < LOADS_A; ++i) {
      a_tile[a_k(i) + 0][a_row(i)] = a[i].x;
      a_tile[a_k(i) + 1][a_row(i)] = a[i].y;
      a_tile[a_k(i) + 2][a_row(i)] = a[i].z;
      a_tile[a_k(i) + 3][a_row(i)] = a[i].w;
    }
#pragma unroll
    for (int i = 0; i < LOADS_B; ++i) *reinterpret_cast<float4*>(&b_tile[b_k(i)][b_col(i)]) = b[i];
  }
};

template <int SIZE, int STRIDE>
__device__ __forceinline__ void read_strips(float (&frag)[SIZE], const float* first) {
#pragma unroll
  for (int s = 0; s < SIZE / STRIP; ++s) {
    const float4 strip = load_strip(first + s * STRIDE);
    frag[s * STRIP + 0] = strip.x;
    frag[s * STRIP + 1] = strip.y;
    frag[s * STRIP + 2] = strip.z;
    frag[s * STRIP + 3] = strip.w;
  }
}

__device__ __forceinline__ float combine(float sum, float alpha, float beta, const float* c,
                                         index_t at) {
  return is_zero(beta) ? mul_rn(alpha, sum) : fma_rn(alpha, sum, mul_rn(beta, c[at]));
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    sgemm_warp_tile(index_t m, index_t n, index_t k, float alpha, const float* __restrict__ a,
                    index_t lda, const float* __restrict__ b, index_t ldb, float beta,
                    const float* __restrict__ c, index_t ldc, float* __restrict__ d,
                    index_t ldd) {
  __shared__ __align__(16) float a_tile[2][BLOCK_K][PITCH_A];
  __shared__ __align__(16) float b_tile[2][BLOCK_K][BLOCK_N];

  const TileIndex tile = banded_tile(blockIdx.x, ceil_div(m, BLOCK_M), ceil_div(n, BLOCK_N), BAND);
  const index_t row0 = tile.row * BLOCK_M;
  const index_t col0 = tile.col * BLOCK_N;
  const int rows = clip(m - row0, BLOCK_M);
  const int cols = clip(n - col0, BLOCK_N);
  const bool whole = rows == BLOCK_M && cols == BLOCK_N;
  const bool strips_in = whole && rows_aligned(a, lda) && rows_aligned(b, ldb);
  const bool strips_out = whole && rows_aligned(d, ldd);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  // Lanes are numbered in pairs along n, then along m: 0 1 8 9 ..
  //                                                    2 3 10 11 ..
  const int row = warp / WARPS_N * WARP_M + lane / 2 % LANES_M * STRIP;
  const int col = warp % WARPS_N * WARP_N + (lane / 2 / LANES_M * 2 + lane % 2) * STRIP;
  a += row0 * lda;
  b += col0;

  if (is_zero(alpha)) k = 0;  // A and B are not read
  if (k == 0) alpha = 0.0f;   // an infinite alpha times nothing is nothing
  float sum[THREAD_M][THREAD_N] = {};
  Step step;
  // k, and with it every branch around a barrier, is the same for the whole block.
  if (k > 0) {
    step.fetch(a, lda, b, ldb, rows, cols, clip(k, BLOCK_K), strips_in && k >= BLOCK_K);
    step.store(a_tile[0], b_tile[0]);
    __syncthreads();  // step 0 is written before anybody reads it
  }
  for (int buffer = 0; k > 0; buffer ^= 1) {
    k -= BLOCK_K;
    a += BLOCK_K;
    b += BLOCK_K * ldb;
    if (k > 0) step.fetch(a, lda, b, ldb, rows, cols, clip(k, BLOCK_K), strips_in && k >= BLOCK_K);
#pragma unroll
    for (int kk = 0; kk < BLOCK_K; ++kk) {
      float a_frag[THREAD_M], b_frag[THREAD_N];
      read_strips<THREAD_M, STRIDE_M>(a_frag, &a_tile[buffer][kk][row]);
      read_strips<THREAD_N, STRIDE_N>(b_frag, &b_tile[buffer][kk][col]);
#pragma unroll
      for (int i = 0; i < THREAD_M; ++i) {
#pragma unroll
        for (int j = 0; j < THREAD_N; ++j) sum[i][j] = fma_rn(a_frag[i], b_frag[j], sum[i][j]);
      }
    }
    if (k > 0) step.store(a_tile[buffer ^ 1], b_tile[buffer ^ 1]);
    // The next step is written before anybody reads it, and this one is read by all before it is
    // overwritten by the step after the next.
    __syncthreads();
  }

  if (!is_zero(beta)) c += row0 * ldc + col0;
  d += row0 * ldd + col0;
#pragma unroll
  for (int i = 0; i < THREAD_M; ++i) {
    const int y = row + i / STRIP * STRIDE_M + i % STRIP;
#pragma unroll
    for (int s = 0; s < THREAD_N; s += STRIP) {
      const int x = col + s / STRIP * STRIDE_N;
      float value[STRIP];
#pragma unroll
      for (int j = 0; j < STRIP; ++j) {
        if (y < rows && x + j < cols) {
          value[j] = combine(sum[i][s + j], alpha, beta, c, y * ldc + x + j);
          if (!strips_out) d[y * ldd + x + j] = value[j];
        }
      }
      if (strips_out) {
        *reinterpret_cast<float4*>(d + y * ldd + x) = {value[0], value[1], value[2], value[3]};
      }
    }
  }
}
