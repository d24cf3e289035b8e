// D = alpha * A * B + beta * C        float32, row-major        rung 6: 16 bytes at a time
//
//   A m x k, B k x n, C and D m x n; rows lie lda, ldb, ldc and ldd elements apart
//
//                 BLOCK_N             one thread: THREAD_M x THREAD_N values of D, as squares of
//               B +------+          STRIP x STRIP that lie STRIDE_M rows, STRIDE_N columns apart
//                 |b_tile| BLOCK_K
//                 +------+             +--+ - - +--+ - -
//      BLOCK_K    |  :   |             |t0|t1   |t0|t1      one warp: 2 rows of 16 threads;
//   A +------+ .. +------+             +--+ - - +--+        the strips of neighbours touch
//     |a_tile|    |block | BLOCK_M     |     :     :
//     | [k][m]    | of D |             +--+     +--+
//     +------+ .. +------+             |t0|     |t0|
//
// One idea: an instruction moves 16 bytes as quickly as 4. From global memory threads load, and
// to D store, float4 where the block is whole and its rows begin on 16 bytes; else, elements. In
// shared memory A is laid out [k][m], so that 4 neighbouring rows of one k are one float4, and
// the strips of a thread are apart, so that those of its neighbours touch.
//
// Cost, per thread and k: 64 fma, 4 shared reads of 16 bytes. Per step 2 loads of 16 bytes and 5
// shared writes: 4 for the float4 of A, which is turned, 1 for that of B. No bank conflicts: a
// warp reads 2 strips of A, each the same for 16 lanes, and 16 touching strips of B; it writes 16
// rows of 2 float4 of A into banks that the 4 extra words of a_tile's rows keep apart.
// BLOCK_K * (BLOCK_M + 4 + BLOCK_N) * 4 = 8320 bytes shared.

#ifdef __CLANGD__  // an editor sees this file alone
#define BLOCK_M 128
#define BLOCK_N 128
#define BLOCK_K 8
#define THREAD_M 8
#define THREAD_N 8
#endif
#if !defined(BLOCK_M) || !defined(BLOCK_N) || !defined(BLOCK_K)
#error "BLOCK_M, BLOCK_N and BLOCK_K must be defined: see multimm_benchmarks/ladder.py"
#endif
#if !defined(THREAD_M) || !defined(THREAD_N)
#error "THREAD_M and THREAD_N must be defined: see multimm_benchmarks/ladder.py"
#endif

#include "common/ieee.cuh"
#include "common/index.cuh"

constexpr int STRIP = 4;                                            // floats in 16 bytes
constexpr int THREADS = BLOCK_M / THREAD_M * (BLOCK_N / THREAD_N);  // 16 * 16 = 256
constexpr int STRIDE_M = BLOCK_M / THREAD_M * STRIP;                // 16 * 4 = 64
constexpr int STRIDE_N = BLOCK_N / THREAD_N * STRIP;                // 16 * 4 = 64
constexpr int PITCH_A = BLOCK_M + STRIP;                            // words from k to k in a_tile
constexpr int LOADS_A = BLOCK_M * BLOCK_K / STRIP / THREADS;        // 128 * 8 / 4 / 256 = 1
constexpr int LOADS_B = BLOCK_K * BLOCK_N / STRIP / THREADS;        // 1
constexpr int BAND = 8;  // tile rows in flight together; arbitrary

static_assert(THREAD_M % STRIP == 0 && THREAD_N % STRIP == 0, "a thread owns whole strips");
static_assert(BLOCK_M % THREAD_M == 0 && BLOCK_N % THREAD_N == 0, "threads fill the block");
static_assert(BLOCK_K % STRIP == 0, "A is loaded in strips along k");
static_assert(THREADS <= 1024, "a thread block has at most 1024 threads");
static_assert(BLOCK_M * BLOCK_K % (STRIP * THREADS) == 0 &&
                  BLOCK_K * BLOCK_N % (STRIP * THREADS) == 0,
              "every thread copies as many strips as any other");

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

extern "C" __global__ void __launch_bounds__(THREADS)
    sgemm_vectorized(index_t m, index_t n, index_t k, float alpha, const float* __restrict__ a,
                     index_t lda, const float* __restrict__ b, index_t ldb, float beta,
                     const float* __restrict__ c, index_t ldc, float* __restrict__ d,
                     index_t ldd) {
  __shared__ __align__(16) float a_tile[BLOCK_K][PITCH_A];
  __shared__ __align__(16) float b_tile[BLOCK_K][BLOCK_N];

  const TileIndex tile = banded_tile(blockIdx.x, ceil_div(m, BLOCK_M), ceil_div(n, BLOCK_N), BAND);
  const index_t row0 = tile.row * BLOCK_M;
  const index_t col0 = tile.col * BLOCK_N;
  const int rows = clip(m - row0, BLOCK_M);
  const int cols = clip(n - col0, BLOCK_N);
  const int thread = threadIdx.x;
  const int row = thread / (BLOCK_N / THREAD_N) * STRIP;
  const int col = thread % (BLOCK_N / THREAD_N) * STRIP;
  const bool whole = rows == BLOCK_M && cols == BLOCK_N;
  const bool strips_in = whole && rows_aligned(a, lda) && rows_aligned(b, ldb);
  const bool strips_out = whole && rows_aligned(d, ldd);
  a += row0 * lda;
  b += col0;

  if (is_zero(alpha)) k = 0;  // A and B are not read
  if (k == 0) alpha = 0.0f;   // an infinite alpha times nothing is nothing
  float sum[THREAD_M][THREAD_N] = {};
  for (index_t k0 = 0; k0 < k; k0 += BLOCK_K) {
    const int ks = clip(k - k0, BLOCK_K);
    const bool strips = strips_in && ks == BLOCK_K;  // the same for the whole block
    // What lies outside of A and B counts as 0 in both, so the sums run over whole steps.
#pragma unroll
    for (int i = 0; i < LOADS_A; ++i) {
      const int y = (i * THREADS + thread) / (BLOCK_K / STRIP);
      const int x = (i * THREADS + thread) % (BLOCK_K / STRIP) * STRIP;
      const float4 v = strips ? load_strip(a + y * lda + x)
                              : load_elements(a + y * lda + x, y < rows ? ks - x : 0);
      a_tile[x + 0][y] = v.x;
      a_tile[x + 1][y] = v.y;
      a_tile[x + 2][y] = v.z;
      a_tile[x + 3][y] = v.w;
    }
#pragma unroll
    for (int i = 0; i < LOADS_B; ++i) {
      const int y = (i * THREADS + thread) / (BLOCK_N / STRIP);
      const int x = (i * THREADS + thread) % (BLOCK_N / STRIP) * STRIP;
      *reinterpret_cast<float4*>(&b_tile[y][x]) =
          strips ? load_strip(b + y * ldb + x)
                 : load_elements(b + y * ldb + x, y < ks ? cols - x : 0);
    }
    a += BLOCK_K;
    b += BLOCK_K * ldb;
    __syncthreads();  // the tiles are written before anybody reads them
#pragma unroll
    for (int kk = 0; kk < BLOCK_K; ++kk) {
      float a_frag[THREAD_M], b_frag[THREAD_N];
      read_strips<THREAD_M, STRIDE_M>(a_frag, &a_tile[kk][row]);
      read_strips<THREAD_N, STRIDE_N>(b_frag, &b_tile[kk][col]);
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
