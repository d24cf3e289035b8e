// D = alpha * (op(A) * op(B) + P) + beta * C        float32, row-major, batched
//
//   op(A) m x k   stored m x k (TRANS_A 0) or k x m (TRANS_A 1), rows lda apart
//   op(B) k x n   stored k x n (TRANS_B 0) or n x k (TRANS_B 1), rows ldb apart
//   P     m x n   rows ldp apart; null: no partial result to go on from
//   C     m x n   rows ldc apart; null: beta is taken as 0
//   D     m x n   rows ldd apart; overlaps no operand
//
// A leading dimension counts elements, is always used, and has no lower bound for what is only
// read (0 repeats one row). Batch i of an operand begins i * stride elements after its pointer;
// stride 0 broadcasts. Any m, n, k >= 0. As in BLAS, beta == 0 never reads C and alpha == 0 never
// reads A, B or P; k == 0 without P is beta * C.
//
// One thread block computes a BLOCK_M x BLOCK_N tile of D and walks k in steps of BLOCK_K.
// While it multiplies one step out of shared memory, the next is on its way into registers:
//
//   global --(LOADS per thread)--> registers --> shared [k][x], 2 buffers --> strips --> fma
//
//   step t      | multiply buffer t%2 ...............| barrier | multiply buffer (t+1)%2
//   step t + 1  | load to registers .. store to (t+1)%2 |      | load ...
//
// The last step may be short in k: what lies outside is read as 0, in A and in B, so the sums run
// over whole steps. The tile may stick out of D: what lies outside is 0, and never stored.
// Block -> warp -> thread is drawn in common/thread_map.cuh.
//
// Cost, per thread and k, for "large" (8x8 values per thread): 64 fma, 4 shared reads of 16
// bytes, 1 global read and 1 shared write of 4 bytes; 33792 bytes shared. Shared reads are
// conflict-free (a warp reads 4 strips of A and 8 touching strips of B, the rest is broadcast), so
// are writes (common/thread_map.cuh says why).
//
// Every value is one chain of fused multiply-adds in the order of k, whatever the tile: the result
// does not depend on the configuration. P is added after the chain, so that the roundings of a
// long sum cut into slabs do not add up over all of k.

// What TileConfig.defines() and the launcher set. An editor, which sees this file alone, gets
// "large" for operands that are stored as they are.
#ifdef __CLANGD__
#define BLOCK_M 128
#define BLOCK_N 128
#define BLOCK_K 16
#define THREAD_M 8
#define THREAD_N 8
#define MIN_BLOCKS 2
#define TRANS_A 0
#define TRANS_B 0
#endif
#if !defined(BLOCK_M) || !defined(BLOCK_N) || !defined(BLOCK_K)
#error "BLOCK_M, BLOCK_N and BLOCK_K must be defined: see TileConfig.defines()"
#endif
#if !defined(THREAD_M) || !defined(THREAD_N) || !defined(MIN_BLOCKS)
#error "THREAD_M, THREAD_N and MIN_BLOCKS must be defined: see TileConfig.defines()"
#endif
#if !defined(TRANS_A) || !defined(TRANS_B)
#error "TRANS_A and TRANS_B must be defined: 1 where the operand is stored transposed, or 0"
#endif

#include "common/ieee.cuh"
#include "common/index.cuh"
#include "common/thread_map.cuh"

static_assert(THREAD_M % STRIP == 0 && THREAD_N % STRIP == 0, "strips are read 16 bytes at a time");
static_assert(BLOCK_M % (THREAD_M * LANES_M) == 0, "whole warps of 4 lanes along m");
static_assert(BLOCK_N % (THREAD_N * LANES_N) == 0, "whole warps of 8 lanes along n");
static_assert(THREADS <= 1024, "a thread block has at most 1024 threads");
static_assert(BLOCK_K % K_RUN == 0, "a tile read along k is made of whole sectors");
static_assert(BLOCK_M * K_RUN % THREADS == 0 && BLOCK_N * K_RUN % THREADS == 0,
              "reading along k, every thread takes part in every load");
static_assert(THREADS % BLOCK_M == 0 && THREADS % BLOCK_N == 0,
              "reading along x, a load covers whole rows");
static_assert(BLOCK_K * BLOCK_M % THREADS == 0 && BLOCK_K * BLOCK_N % THREADS == 0,
              "every thread loads as many elements as any other");
static_assert(2 * BLOCK_K * (pitch(BLOCK_M) + pitch(BLOCK_N)) * sizeof(float) <= 49152,
              "statically declared shared memory stops at 48 KiB");

constexpr int BAND = 8;  // tile rows in flight together; arbitrary

// A thread's share of one operand's k tiles, from global memory to shared memory.
template <int SPAN, bool ALONG_K>
class TileLoader {
 public:
  static constexpr int LOADS = SPAN * BLOCK_K / THREADS;  // 128 * 16 / 256 = 8

  // `tile` is the operand's element (x = first of this block, k = 0); x_left of its x exist.
  __device__ TileLoader(const float* tile, index_t ld, int x_left)
      : ld_(ld), x_left_(x_left), source_(tile + offset(x_of(0), k_of(0))) {}

  // Fetch this thread's elements of the next tile, of which k_left k exist, and step past it.
  __device__ void fetch(int k_left) {
    const float* at = source_;
#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
      const bool exists = x_of(i) < x_left_ && k_of(i) < k_left;
      held_[i] = exists ? *at : 0.0f;
      if (i + 1 < LOADS) at += offset(x_of(i + 1) - x_of(i), k_of(i + 1) - k_of(i));
    }
    source_ += offset(0, BLOCK_K);
  }

  __device__ void store(float (&tile)[BLOCK_K][pitch(SPAN)]) const {
#pragma unroll
    for (int i = 0; i < LOADS; ++i) tile[k_of(i)][x_of(i)] = held_[i];
  }

 private:
  static __device__ int x_of(int i) {
    const int thread = threadIdx.x;
    return ALONG_K ? along_k_x(thread, i, SPAN) : along_x_x(thread, i, SPAN);
  }
  static __device__ int k_of(int i) {
    const int thread = threadIdx.x;
    return ALONG_K ? along_k_k(thread, i, SPAN) : along_x_k(thread, i, SPAN);
  }
  __device__ index_t offset(int x, int k) const { return ALONG_K ? x * ld_ + k : k * ld_ + x; }

  const index_t ld_;
  const int x_left_;
  const float* source_;
  float held_[LOADS];
};

// A thread's SIZE values of one k, as 16-byte strips STRIDE apart.
template <int SIZE, int STRIDE>
__device__ __forceinline__ void read_strips(float (&frag)[SIZE], const float* first) {
#pragma unroll
  for (int s = 0; s < SIZE / STRIP; ++s) {
    const float4 strip = *reinterpret_cast<const float4*>(first + s * STRIDE);
    frag[s * STRIP + 0] = strip.x;
    frag[s * STRIP + 1] = strip.y;
    frag[s * STRIP + 2] = strip.z;
    frag[s * STRIP + 3] = strip.w;
  }
}

using Accumulators = float[THREAD_M][THREAD_N];

// acc = op(A) * op(B): a and b point at the block's first row and column, of which `rows` and
// `cols` exist.
__device__ __forceinline__ void multiply_tile(Accumulators& acc, const float* a, index_t lda,
                                              const float* b, index_t ldb, int rows, int cols,
                                              index_t k) {
  __shared__ __align__(16) float a_tile[2][BLOCK_K][pitch(BLOCK_M)];
  __shared__ __align__(16) float b_tile[2][BLOCK_K][pitch(BLOCK_N)];

  // op(A) runs along k when it is stored as it is; op(B) when it is stored transposed.
  TileLoader<BLOCK_M, !TRANS_A> a_loader(a, lda, rows);
  TileLoader<BLOCK_N, TRANS_B> b_loader(b, ldb, cols);
  const int row = strip_row(threadIdx.x);
  const int col = strip_col(threadIdx.x);

  // k, and with it every branch around a barrier, is the same for the whole block.
  if (k > 0) {
    a_loader.fetch(clip(k, BLOCK_K));
    b_loader.fetch(clip(k, BLOCK_K));
    a_loader.store(a_tile[0]);
    b_loader.store(b_tile[0]);
    __syncthreads();  // step 0 is written before anybody reads it
  }
  for (int buffer = 0; k > 0; buffer ^= 1) {
    k -= BLOCK_K;
    if (k > 0) {
      a_loader.fetch(clip(k, BLOCK_K));
      b_loader.fetch(clip(k, BLOCK_K));
    }
#pragma unroll
    for (int kk = 0; kk < BLOCK_K; ++kk) {
      float a_frag[THREAD_M], b_frag[THREAD_N];
      read_strips<THREAD_M, STRIDE_M>(a_frag, &a_tile[buffer][kk][row]);
      read_strips<THREAD_N, STRIDE_N>(b_frag, &b_tile[buffer][kk][col]);
#pragma unroll
      for (int i = 0; i < THREAD_M; ++i) {
#pragma unroll
        for (int j = 0; j < THREAD_N; ++j) acc[i][j] = fma_rn(a_frag[i], b_frag[j], acc[i][j]);
      }
    }
    if (k > 0) {
      a_loader.store(a_tile[buffer ^ 1]);
      b_loader.store(b_tile[buffer ^ 1]);
    }
    // The next step is written before anybody reads it, and this one is read by all before it is
    // overwritten by the step after the next.
    __syncthreads();
  }
}

// D = alpha * (acc + P) + beta * C: the pointers are at the tile's first element, of whose rows
// and columns `rows` and `cols` exist.
__device__ __forceinline__ void store_tile(const Accumulators& acc, const float* c, index_t ldc,
                                           const float* p, index_t ldp, float* d, index_t ldd,
                                           int rows, int cols, float alpha, float beta) {
#pragma unroll
  for (int i = 0; i < THREAD_M; ++i) {
    const int row = owned_row(threadIdx.x, i);
#pragma unroll
    for (int j = 0; j < THREAD_N; ++j) {
      const int col = owned_col(threadIdx.x, j);
      if (row < rows && col < cols) {
        const float sum = p ? add_rn(acc[i][j], p[row * ldp + col]) : acc[i][j];
        d[row * ldd + col] = c ? fma_rn(alpha, sum, mul_rn(beta, c[row * ldc + col]))
                               : mul_rn(alpha, sum);
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    sgemm_tiled(index_t m, index_t n, index_t k, float alpha, float beta,
                const float* __restrict__ a, index_t lda, index_t stride_a,
                const float* __restrict__ b, index_t ldb, index_t stride_b,
                const float* __restrict__ c, index_t ldc, index_t stride_c,
                const float* __restrict__ p, index_t ldp, index_t stride_p,
                float* __restrict__ d, index_t ldd, index_t stride_d) {
  if (is_zero(beta)) c = nullptr;
  if (is_zero(alpha)) {
    k = 0;
    p = nullptr;
  }
  if (k == 0 && !p) alpha = 0.0f;  // an infinite alpha times nothing is nothing
  const TileIndex tile = banded_tile(blockIdx.x, ceil_div(m, BLOCK_M), ceil_div(n, BLOCK_N), BAND);
  const index_t row = tile.row * BLOCK_M;
  const index_t col = tile.col * BLOCK_N;
  const int rows = clip(m - row, BLOCK_M);
  const int cols = clip(n - col, BLOCK_N);
  const index_t batch = blockIdx.z;

  Accumulators acc = {};
  multiply_tile(acc, a + batch * stride_a + (TRANS_A ? row : row * lda), lda,
                b + batch * stride_b + (TRANS_B ? col * ldb : col), ldb, rows, cols, k);

  if (c) c += batch * stride_c + row * ldc + col;
  if (p) p += batch * stride_p + row * ldp + col;
  d += batch * stride_d + row * ldd + col;
  store_tile(acc, c, ldc, p, ldp, d, ldd, rows, cols, alpha, beta);
}
