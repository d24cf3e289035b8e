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
// op(B)' * op(A)' (TURNED 1). Here X lies along k: its rows times columns of Y are dot products. A
// warp takes ROWS rows, its lanes lie along k. Where there are few rows, WARPS_K warps share them,
// each with its part of every chunk of k.
//
//              CHUNK = WARPS_K * UNROLL * 32 k                     Y, in shared memory
//         +----------------------+----------------------+ - -      two chunks: one is read
//   ROWS  | warp 0   l0 l1 ..l31 | warp 1               |          while the next one lands
//         +----------------------+----------------------+ - -      column j: CHUNK neighbours
//   ROWS  | warp 2               | warp 3               |
//         +----------------------+----------------------+ - -
//
// Every word of X is read once, 32 neighbours at a time: whole sectors wherever a row begins, which
// is why nothing here depends on alignment. A lane has ROWS * UNROLL words on their way.
//
// Each lane's sum is a chain of fused multiply-adds in the order of k; lanes are added by a tree,
// warps in their order. So the bits do not depend on where matrices lie.
//
// Cost, per word of X: COLS fma, COLS / ROWS shared reads, COLS / BLOCK_ROWS words of Y from L2.

// What dot_config() and the launcher set. An editor, which sees this file alone, gets these.
#ifdef __CLANGD__
#define COLS 8
#define ROWS 4
#define WARPS 8
#define WARPS_K 1
#define UNROLL 8
#define MIN_BLOCKS 2
#define TRANS_A 0
#define TRANS_B 0
#define TURNED 0
#endif
#if !defined(COLS) || !defined(ROWS) || !defined(WARPS) || !defined(WARPS_K) || !defined(UNROLL)
#error "COLS, ROWS, WARPS, WARPS_K and UNROLL must be defined: see dot_config()"
#endif
#if !defined(MIN_BLOCKS) || !defined(TRANS_A) || !defined(TRANS_B) || !defined(TURNED)
#error "MIN_BLOCKS, TRANS_A, TRANS_B and TURNED must be defined: see dot_config()"
#endif

constexpr int THREADS = WARPS * 32;
constexpr int PART = UNROLL * 32;         // k that a warp has of a chunk: 8 * 32 = 256
constexpr int CHUNK = WARPS_K * PART;     // 1 * 256 = 256
constexpr int BLOCK_ROWS = WARPS / WARPS_K * ROWS;

#include "common/ieee.cuh"
#include "common/index.cuh"

// Words from k to k, and from column to column, of a chunk of Y in shared memory. Where Y does not
// lie along k, 32 / COLS neighbours of k and COLS columns are stored at once: into 32 banks.
constexpr int PITCH_K = 1, PITCH_J = CHUNK + 32 / COLS;
#include "common/skinny.cuh"

static_assert(TURNED ? TRANS_B : !TRANS_A, "X lies along k");
static_assert(WARPS % WARPS_K == 0, "a row has all of its warps in one block");
static_assert((COLS & (COLS - 1)) == 0 && COLS <= 32, "columns are told apart by masks");
static_assert((ROWS & (ROWS - 1)) == 0, "values are halved");

// Whether a chunk of Y is stored before the words of X that go with it are asked for, rather than
// while they are on their way. With many columns that was faster, with few slower.
constexpr bool STORE_EARLY = COLS > 8;

constexpr int VALUES = ROWS * COLS;                        // sums of a warp
constexpr int LEFT = VALUES < 32 ? 1 : VALUES / 32;        // of them, in one lane when all is added
constexpr int COPIES = VALUES < 32 ? 32 / VALUES : 1;      // lanes that then have the same one

// Adds all lanes' values, each by a tree of lanes 16, 8, 4, 2 and 1 apart. Of two lanes that far
// apart, one goes on with the first half of the values and the other with the second one: so in
// the end lane l has the values from l / COPIES * LEFT on, and few were exchanged.
template <int COUNT, int GAP>
__device__ __forceinline__ void add_lanes(float* values) {
  if constexpr (GAP > 0) {
    if constexpr (COUNT > 1) {
      const bool second = threadIdx.x & GAP;
#pragma unroll
      for (int i = 0; i < COUNT / 2; ++i) {
        const float mine = second ? values[i + COUNT / 2] : values[i];
        const float other = second ? values[i] : values[i + COUNT / 2];
        values[i] = add_rn(mine, __shfl_xor_sync(0xffffffffu, other, GAP));
      }
    } else {
      values[0] = add_rn(values[0], __shfl_xor_sync(0xffffffffu, values[0], GAP));
    }
    add_lanes<(COUNT + 1) / 2, GAP / 2>(values);
  }
}

// A warp's words of X, of which `left` k exist.
template <bool WHOLE>
__device__ __forceinline__ void read(float (&x)[ROWS][UNROLL], const float* const (&rows)[ROWS],
                                     int left) {
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      const bool exists = WHOLE || static_cast<int>(threadIdx.x % 32) + u * 32 < left;
      x[r][u] = exists ? __ldcs(rows[r] + u * 32) : 0.0f;
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    sgemm_dot(index_t m, index_t n, index_t k, index_t k_step, float alpha, float beta,
              const float* __restrict__ a, index_t lda, index_t stride_a,
              const float* __restrict__ b, index_t ldb, index_t stride_b,
              const float* __restrict__ c, index_t ldc, index_t stride_c,
              const float* __restrict__ p, index_t ldp, index_t stride_p,
              float* __restrict__ d, index_t ldd, index_t stride_d) {
  __shared__ float chunks[2][COLS * PITCH_J];
  __shared__ float sums[WARPS_K][BLOCK_ROWS * COLS];
  const index_t batch = blockIdx.z;
  const float* x = TURNED ? b + batch * stride_b : a + batch * stride_a;
  const float* y = TURNED ? a + batch * stride_a : b + batch * stride_b;
  const index_t ldx = TURNED ? ldb : lda, ldy = TURNED ? lda : ldb;
  const index_t size = TURNED ? n : m;  // M
  const int cols = static_cast<int>(TURNED ? m : n);
  const int lane = threadIdx.x % 32, warp_k = threadIdx.x / 32 % WARPS_K;
  const int warp_row = threadIdx.x / 32 / WARPS_K * ROWS;
  const index_t row = static_cast<index_t>(blockIdx.x) * BLOCK_ROWS;
  if (k_step) k = clip(k - batch * k_step, static_cast<int>(k_step));
  if (is_zero(alpha)) k = 0;
  const Finish finish = finish_at(row, batch, k, alpha, beta, c, ldc, stride_c, p, ldp, stride_p,
                                  d, ldd, stride_d);

  float acc[ROWS][COLS] = {};
  if (k > 0) {  // the same for the whole block
    const float* rows[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {  // beyond the last row: the last row, and nothing is stored
      const index_t i = row + warp_row + r < size ? row + warp_row + r : size - 1;
      rows[r] = x + i * ldx + warp_k * PART + lane;
    }
    NarrowOperand narrow;
    narrow.load(y, ldy, clip(k, CHUNK), cols);
    float* chunk = chunks[0];
#pragma unroll 1
    for (index_t left = k; left > 0; left -= CHUNK) {
      float words[ROWS][UNROLL];
      if (left >= CHUNK) {
        read<true>(words, rows, PART);
      } else {
        read<false>(words, rows, static_cast<int>(left) - warp_k * PART);
      }
      // Where the chunk before the last one was, which all have read.
      if (!STORE_EARLY || left == k) narrow.store(chunk);
      y += Y_ALONG_K ? CHUNK : CHUNK * ldy;
      narrow.load(y, ldy, clip(left - CHUNK, CHUNK), cols);
      __syncthreads();  // the chunk is there for all
      const float* column = chunk + warp_k * PART + lane;
#pragma unroll
      for (int u = 0; u < UNROLL; ++u) {
#pragma unroll
        for (int j = 0; j < COLS; ++j) {
          const float value = column[NarrowOperand::slot(u * 32, j)];
#pragma unroll
          for (int r = 0; r < ROWS; ++r) acc[r][j] = fma_rn(words[r][u], value, acc[r][j]);
        }
      }
#pragma unroll
      for (int r = 0; r < ROWS; ++r) rows[r] += CHUNK;
      chunk = chunk == chunks[0] ? chunks[1] : chunks[0];
      if (STORE_EARLY) narrow.store(chunk);
    }
  }

  add_lanes<VALUES, 16>(&acc[0][0]);
  if (lane % COPIES == 0) {
    float* to = &sums[warp_k][warp_row * COLS + lane / COPIES * LEFT];
#pragma unroll
    for (int i = 0; i < LEFT; ++i) to[i] = (&acc[0][0])[i];
  }
  __syncthreads();  // every warp's sums are there
  for (int e = threadIdx.x; e < BLOCK_ROWS * COLS; e += THREADS) {
    const int i = TURNED ? e % BLOCK_ROWS : e / COLS;
    const int j = TURNED ? e / BLOCK_ROWS : e % COLS;
    float sum = sums[0][i * COLS + j];
#pragma unroll
    for (int w = 1; w < WARPS_K; ++w) sum = add_rn(sum, sums[w][i * COLS + j]);
    if (row + i < size && j < cols) finish.store(i, j, sum);
  }
}
