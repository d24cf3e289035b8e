// D = alpha * (op(A) * op(B) + P) + beta * C      float32, row-major, batched; k <= THIN
//
//   op(A) m x k   stored m x k (TRANS_A 0) or k x m (TRANS_A 1), rows lda apart
//   op(B) k x n   stored k x n (TRANS_B 0) or n x k (TRANS_B 1), rows ldb apart
//   P     m x n   rows ldp apart; null: no partial result to go on from
//   C     m x n   rows ldc apart; null: beta is taken as 0
//   D     m x n   rows ldd apart; overlaps no operand
//
// A leading dimension counts elements, is always used, and has no lower bound for what is only
// read (0 repeats one row). Batch i of an operand begins i * stride elements after its pointer;
// stride 0 broadcasts. Any m, n >= 0. As in BLAS, beta == 0 never reads C and alpha == 0 never
// reads A, B or P; k == 0 without P is beta * C. With k_step > 0 the grid's z numbers slices of k
// of that length instead of batches: each makes a sum of its own.
//
// A sum of k outer products: with a thin k nearly all of the traffic is D. A thread keeps its four
// columns of op(B) in registers and walks down D, one row in EIGHT; the values of op(A) come from
// shared memory, one for a whole warp.
//
//      columns:  tile * 128 - shift ...                      one row in D, 32-byte sectors
//      +------------------------------------+      warp 0    |..=======|========|===
//      | row r      warp 0, shift 2         |      warp 1    |.....====|========|======
//      | row r + 1  warp 1, shift 5         |                 ^ shift: words from a sector's
//      |   :                                |                   beginning to the tile's first
//      | row r + 8  warp 0 again            |
//      +------------------------------------+
//
// Wherever the rows of D begin, each eighth begins at the same place in a sector: so a warp begins
// its rows that much further left, and always stores whole sectors, 16 bytes per thread. What lies
// outside of D on either side is left out.
//
// Every value is one chain of fused multiply-adds in the order of k, that of sgemm_ffma.cu.
//
// Cost, per value of D: k fma, k / 16 shared reads of a word, 4 bytes stored.

// What outer_config() and the launcher set. An editor, which sees this file alone, gets:
#ifdef __CLANGD__
#define THIN 8
#define BLOCK_ROWS 128
#define TRANS_A 0
#define TRANS_B 0
#endif
#if !defined(THIN) || !defined(BLOCK_ROWS) || !defined(TRANS_A) || !defined(TRANS_B)
#error "THIN, BLOCK_ROWS, TRANS_A and TRANS_B must be defined: see outer_config()"
#endif

#include "common/ieee.cuh"
#include "common/index.cuh"

constexpr int EIGHT = 8;    // words in a 32-byte sector, and warps of a block
constexpr int VECTOR = 4;   // words in 16 bytes
constexpr int THREADS = EIGHT * 32;
constexpr int BLOCK_COLS = 32 * VECTOR;
constexpr int SURE_COLS = BLOCK_COLS - (EIGHT - 1);  // whatever the shift

constexpr int PITCH = THIN <= 2 ? THIN : (THIN + 3) / 4 * 4;  // of the rows of op(A)

static_assert(THIN >= 1 && THIN <= 12, "a thread keeps 4 * THIN values of op(B) in registers");
static_assert(BLOCK_ROWS % EIGHT == 0, "warps have equally many rows");

struct alignas(THIN <= 2 ? 4 * THIN : 16) ThinRow {
  float at[PITCH];
};

// Words from the beginning of a sector to an address.
__device__ __forceinline__ int shift_of(const float* at) {
  return static_cast<int>(reinterpret_cast<unsigned long long>(at) / 4 % EIGHT);
}

// What D is made of besides the product; pointers are at the first row of the block.
struct Finish {
  const float* c;
  const float* p;
  float* d;
  index_t ldc, ldp, ldd, n;
  float alpha, beta;

  __device__ __forceinline__ float value(float sum, int row, index_t col) const {
    if (p) sum = add_rn(sum, p[row * ldp + col]);
    return c ? fma_rn(alpha, sum, mul_rn(beta, c[row * ldc + col])) : mul_rn(alpha, sum);
  }

  // Those of the columns col ... col + 3 of a row that exist.
  __device__ __forceinline__ void store(const float (&sum)[VECTOR], int row, index_t col) const {
#pragma unroll
    for (int v = 0; v < VECTOR; ++v) {
      const index_t j = col + v;
      if (j >= 0 && j < n) d[row * ldd + j] = value(sum[v], row, j);
    }
  }
};

// sum = a row of op(A) times the thread's columns of op(B)
__device__ __forceinline__ void multiply(float (&sum)[VECTOR], const float* a_row,
                                         const float (&b_cols)[THIN][VECTOR]) {
  const ThinRow values = *reinterpret_cast<const ThinRow*>(a_row);
#pragma unroll
  for (int v = 0; v < VECTOR; ++v) sum[v] = 0.0f;
#pragma unroll
  for (int kk = 0; kk < THIN; ++kk) {
#pragma unroll
    for (int v = 0; v < VECTOR; ++v) sum[v] = fma_rn(values.at[kk], b_cols[kk][v], sum[v]);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    sgemm_outer(index_t m, index_t n, index_t k, index_t k_step, float alpha, float beta,
                const float* __restrict__ a, index_t lda, index_t stride_a,
                const float* __restrict__ b, index_t ldb, index_t stride_b,
                const float* __restrict__ c, index_t ldc, index_t stride_c,
                const float* __restrict__ p, index_t ldp, index_t stride_p,
                float* __restrict__ d, index_t ldd, index_t stride_d) {
  __shared__ __align__(16) float a_rows[BLOCK_ROWS * PITCH];
  const index_t batch = blockIdx.z;
  if (k_step) k = clip(k - batch * k_step, static_cast<int>(k_step));
  if (is_zero(beta)) c = nullptr;
  if (is_zero(alpha)) {
    k = 0;
    p = nullptr;
  }
  if (k == 0 && !p) alpha = 0.0f;  // an infinite alpha times nothing is nothing
  const index_t tile_cols = ceil_div(n, SURE_COLS);
  const index_t row = blockIdx.x / tile_cols * BLOCK_ROWS;
  const index_t tile = blockIdx.x % tile_cols;
  const int rows = clip(m - row, BLOCK_ROWS);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  d += batch * stride_d + row * ldd;
  // Where all rows begin alike, the last tile may be empty.
  const int most = ldd % EIGHT ? EIGHT - 1 : shift_of(d);
  if (tile * BLOCK_COLS - most >= n) return;  // the same for the whole block

  a += batch * stride_a + (TRANS_A ? row : row * lda);
  for (int e = threadIdx.x; e < BLOCK_ROWS * THIN; e += THREADS) {
    const int i = TRANS_A ? e % BLOCK_ROWS : e / THIN;
    const int kk = TRANS_A ? e / BLOCK_ROWS : e % THIN;
    const bool exists = i < rows && kk < k;
    a_rows[i * PITCH + kk] = exists ? a[TRANS_A ? kk * lda + i : i * lda + kk] : 0.0f;
  }

  const index_t col = tile * BLOCK_COLS - shift_of(d + warp * ldd) + lane * VECTOR;
  float b_cols[THIN][VECTOR];
  b += batch * stride_b;
#pragma unroll
  for (int kk = 0; kk < THIN; ++kk) {
#pragma unroll
    for (int v = 0; v < VECTOR; ++v) {
      const index_t j = col + v;
      const bool exists = kk < k && j >= 0 && j < n;
      b_cols[kk][v] = exists ? b[TRANS_B ? j * ldb + kk : kk * ldb + j] : 0.0f;
    }
  }
  __syncthreads();  // the block's rows of op(A) are there

  const float* a_row = a_rows + warp * PITCH;
  float sum[VECTOR];
  if (!c && !p && col >= 0 && col + VECTOR <= n) {  // with nothing to look at, for most of D
    float* to = d + warp * ldd + col;
#pragma unroll 4
    for (int i = warp; i < rows; i += EIGHT) {
      multiply(sum, a_row, b_cols);
      *reinterpret_cast<float4*>(to) = float4{mul_rn(alpha, sum[0]), mul_rn(alpha, sum[1]),
                                              mul_rn(alpha, sum[2]), mul_rn(alpha, sum[3])};
      to += EIGHT * ldd;
      a_row += EIGHT * PITCH;
    }
    return;
  }
  if (c) c += batch * stride_c + row * ldc;
  if (p) p += batch * stride_p + row * ldp;
  const Finish finish{c, p, d, ldc, ldp, ldd, n, alpha, beta};
  for (int i = warp; i < rows; i += EIGHT) {
    multiply(sum, a_row, b_cols);
    finish.store(sum, i, col);
    a_row += EIGHT * PITCH;
  }
}
