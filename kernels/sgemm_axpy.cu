// D = alpha * (op(A) * op(B) + P) + beta * C      float32, row-major, batched; n or m <= COLS
//
//   op(A) m x k   stored m x k (TRANS_A 0) or k x m (TRANS_A 1), rows lda apart
//   op(B) k x n   stored k x n (TRANS_B 0) or n x k (TRANS_B 1), rows ldb apart
//   P     m x n   rows ldp apart; null: no partial result to go on from
//   C     m x n   rows ldc apart; null: beta is taken as 0
//   D     m x n   rows ldd apart; overlaps no operand
//
// A leading dimension counts elements, is always used, and has no lower bound for what is only
// read (0 repeats one row). Batch i of an operand begins i * stride elements after its pointer;
// stride 0 broadcasts. Any k >= 0. As in BLAS, beta == 0 never reads C and alpha == 0 never
// reads A, B or P; k == 0 without P is beta * C. With k_step > 0 the grid's z numbers slices of k
// of that length instead of batches: each makes a sum of its own.
//
// Seen as X * Y with a wide X, M x K, and a narrow Y, K x COLS: op(A) * op(B), or their transposes
// op(B)' * op(A)' (TURNED 1). Here X lies along M: its columns are scaled by the values of Y, and
// added. A thread block owns WIDTH values along M of each column of the result, and CHAINS sums of
// each value, which take turns along k. A thread holds CELLS of them (drawn: 4), either of
// neighbours along M, which it reads as one vector where addresses allow it (WIDE), or of one.
//
//        WIDTH values along M                 WIDE: one thread        not WIDE: one thread
//       +------------------+                  +--+--+--+--+           +--+
//   k   | chain 0          |  CHAINS          |  |  |  |  | chain q   |  | chain 4q
//   :   | chain 1          |    =             +--+--+--+--+           +--+
//       |  :               | CELLS * THREADS                          |  | chain 4q + 1
//       | chain CHAINS - 1 |    / WIDTH                               +--+
//       +------------------+                                          :  : 4q + 3
//       | chain 0 again    |
//
// Y goes through shared memory, where a warp reads one value of it for many lanes. Chains are added
// there, too, in their order. They are the same, WIDE or not, so that the bits do not depend on
// where matrices lie.
//
// Cost, per word of X: COLS fma, 1 / CELLS shared reads of COLS words (not WIDE: 1), COLS / WIDTH
// words of Y from L2. A thread has CELLS * UNROLL words on their way.

// What axpy_config() and the launcher set. An editor, which sees this file alone, gets:
#ifdef __CLANGD__
#define COLS 8
#define WIDTH 32
#define WARPS 8
#define CELLS 4
#define UNROLL 8
#define MIN_BLOCKS 2
#define WIDE 1
#define TRANS_A 1
#define TRANS_B 0
#define TURNED 0
#endif
#if !defined(COLS) || !defined(WIDTH) || !defined(WARPS) || !defined(CELLS) || !defined(UNROLL)
#error "COLS, WIDTH, WARPS, CELLS and UNROLL must be defined: see axpy_config()"
#endif
#if !defined(MIN_BLOCKS) || !defined(WIDE)
#error "MIN_BLOCKS and WIDE must be defined: see axpy_config()"
#endif
#if !defined(TRANS_A) || !defined(TRANS_B) || !defined(TURNED)
#error "TRANS_A, TRANS_B and TURNED must be defined: 1 or 0"
#endif

constexpr int THREADS = WARPS * 32;
constexpr int VECTOR = WIDE ? CELLS : 1;          // of them, neighbours along m
constexpr int OWN_CHAINS = CELLS / VECTOR;
constexpr int CHAINS = THREADS * CELLS / WIDTH;   // 256 * 4 / 32 = 32
constexpr int CHUNK = CHAINS * UNROLL;            // 32 * 8 = 256

#include "common/ieee.cuh"
#include "common/index.cuh"

// Words from k to k, and from column to column, of a chunk of Y in shared memory.
constexpr int PITCH_K = COLS, PITCH_J = 1;
#include "common/skinny.cuh"

static_assert(TURNED ? !TRANS_B : TRANS_A, "X lies along M");
static_assert(THREADS % WIDTH == 0 && WIDTH % CELLS == 0, "all threads read as much as any other");
static_assert((COLS & (COLS - 1)) == 0 && COLS <= 32, "columns are told apart by masks");

// clang-format off
template <int FLOATS> struct VectorOf;
template <> struct VectorOf<1> { using type = float; };
template <> struct VectorOf<2> { using type = float2; };
template <> struct VectorOf<4> { using type = float4; };
// clang-format on
using vector_t = VectorOf<VECTOR>::type;

union Words {
  vector_t vector;
  float at[VECTOR];
};
struct alignas(COLS % 4 == 0 ? 16 : 4 * COLS) NarrowRow {
  float at[COLS];
};

// A thread's words of a chunk of X, of which `left` k exist; the rest is 0. Each is read once: it
// is the first to make room in the caches.
template <bool WHOLE>
__device__ __forceinline__ void read(Words (&words)[UNROLL][OWN_CHAINS], const float* x,
                                     index_t ldx, int left) {
#pragma unroll
  for (int u = 0; u < UNROLL; ++u) {
#pragma unroll
    for (int q = 0; q < OWN_CHAINS; ++q) {
      const int k = u * CHAINS + q;
      words[u][q].vector = {};
      if (WHOLE || k < left) {
        words[u][q].vector = __ldcs(reinterpret_cast<const vector_t*>(x + k * ldx));
      }
    }
  }
}

// acc += words * Y; `y` is at the first of the thread's chains, in shared memory.
__device__ __forceinline__ void multiply(float (&acc)[OWN_CHAINS][COLS][VECTOR],
                                         const Words (&words)[UNROLL][OWN_CHAINS],
                                         const float* y) {
#pragma unroll
  for (int u = 0; u < UNROLL; ++u) {
#pragma unroll
    for (int q = 0; q < OWN_CHAINS; ++q) {
      const NarrowRow values =
          *reinterpret_cast<const NarrowRow*>(y + NarrowOperand::slot(u * CHAINS + q, 0));
#pragma unroll
      for (int j = 0; j < COLS; ++j) {
#pragma unroll
        for (int v = 0; v < VECTOR; ++v) {
          acc[q][j][v] = fma_rn(words[u][q].at[v], values.at[j], acc[q][j][v]);
        }
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    sgemm_axpy(index_t m, index_t n, index_t k, index_t k_step, float alpha, float beta,
               const float* __restrict__ a, index_t lda, index_t stride_a,
               const float* __restrict__ b, index_t ldb, index_t stride_b,
               const float* __restrict__ c, index_t ldc, index_t stride_c,
               const float* __restrict__ p, index_t ldp, index_t stride_p,
               float* __restrict__ d, index_t ldd, index_t stride_d) {
  // Two chunks of Y: one is read while the next one lands. Then the chains, [chain][column][m].
  extern __shared__ __align__(16) float shared[];
  const index_t batch = blockIdx.z;
  const float* x = TURNED ? b + batch * stride_b : a + batch * stride_a;
  const float* y = TURNED ? a + batch * stride_a : b + batch * stride_b;
  const index_t ldx = TURNED ? ldb : lda, ldy = TURNED ? lda : ldb;
  const index_t size = TURNED ? n : m;  // M
  const int cols = static_cast<int>(TURNED ? m : n);
  const int own = threadIdx.x % (WIDTH / VECTOR) * VECTOR;
  const int first = threadIdx.x / (WIDTH / VECTOR) * OWN_CHAINS;
  const index_t row = static_cast<index_t>(blockIdx.x) * WIDTH;
  if (k_step) k = clip(k - batch * k_step, static_cast<int>(k_step));
  if (is_zero(alpha)) k = 0;
  const Finish finish = finish_at(row, batch, k, alpha, beta, c, ldc, stride_c, p, ldp, stride_p,
                                  d, ldd, stride_d);

  float acc[OWN_CHAINS][COLS][VECTOR] = {};
  if (k > 0) {  // the same for the whole block
    // Beyond the end of M: the last ones, and nothing is stored.
    x += first * ldx + (row + own < size ? row + own : size - VECTOR);
    NarrowOperand narrow;
    narrow.load(y, ldy, clip(k, CHUNK), cols);
    float* chunk = shared;
#pragma unroll 1
    for (index_t left = k; left > 0; left -= CHUNK) {
      Words words[UNROLL][OWN_CHAINS];
      if (left >= CHUNK) {
        read<true>(words, x, ldx, CHUNK);
      } else {
        read<false>(words, x, ldx, static_cast<int>(left) - first);
      }
      narrow.store(chunk);  // where the chunk before the last one was, which all have read
      __syncthreads();      // the chunk is there for all
      y += Y_ALONG_K ? CHUNK : CHUNK * ldy;
      narrow.load(y, ldy, clip(left - CHUNK, CHUNK), cols);
      multiply(acc, words, chunk + first * COLS);
      x += CHUNK * ldx;
      chunk = chunk == shared ? shared + CHUNK * COLS : shared;
    }
  }

  __syncthreads();  // all have read the last chunk of Y
#pragma unroll
  for (int q = 0; q < OWN_CHAINS; ++q) {
#pragma unroll
    for (int j = 0; j < COLS; ++j) {
      Words sums;
#pragma unroll
      for (int v = 0; v < VECTOR; ++v) sums.at[v] = acc[q][j][v];
      *reinterpret_cast<vector_t*>(shared + ((first + q) * COLS + j) * WIDTH + own) = sums.vector;
    }
  }
  __syncthreads();  // every chain's sum is there
  for (int e = threadIdx.x; e < WIDTH * COLS; e += THREADS) {
    const int i = e % WIDTH, j = e / WIDTH;
    float sum = shared[e];
#pragma unroll 16
    for (int q = 1; q < CHAINS; ++q) sum = add_rn(sum, shared[q * (WIDTH * COLS) + e]);
    if (row + i < size && j < cols) finish.store(i, j, sum);
  }
}
