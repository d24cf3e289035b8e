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
// One thread block computes a BLOCK_M x BLOCK_N tile of D and walks k in tiles of BLOCK_K through
// a ring of STAGES * GROUP buffers in shared memory. Copies run STAGES - 1 groups of GROUP tiles
// ahead of the arithmetic, with one barrier per group, and fragments run one k ahead of it:
//
//   global --(asynchronous copies)--> shared [k][x], a ring of tiles --> 2 fragments --> fma
//
//   tile t   | k 0 | k 1 | ......................... | wait for tile t + 1, barrier, last k |
//   copies   | of a tile STAGES - 1 groups on, a few per k | (at the end of each group)     |
//
// A longer BLOCK_K has fewer instructions around the multiply-adds; a shorter one with a larger
// GROUP has fewer in all, which was faster where a launch has little work.
//
// The first tile of k is the short one, so that no later one has to look at k: what it lacks is 0
// in A and in B. Where the tile sticks out of D nothing is copied: rows and columns outside of D
// are made of whatever shared memory holds, and never stored.
// Block -> warp -> thread is drawn in common/warp_map.cuh.
//
// Operands whose memory runs along x (A transposed, B not) are copied 16 bytes at a time where
// addresses allow (WIDE_A, WIDE_B), else 4; those that run along k are turned on the way, by
// copies of 4 bytes that scatter.
//
// Cost, per thread and k, for "large" (16x8 values per thread): 128 fma, 6 shared reads of 16
// bytes, and 6 bytes copied by 0.4 (WIDE) to 1.5 instructions.
//
// Every value is one chain of fused multiply-adds in the order of k, whatever the tile: the result
// does not depend on the configuration. P is added after the chain, so that the roundings of a
// long sum cut into slabs do not add up over all of k. With k_step > 0 the grid's z numbers slices
// of k of that length instead of batches: each makes a sum of its own. With LOWER defined, D is
// square, and its tiles above the diagonal are left as they are.

// What TileConfig.defines() and the launcher set. An editor, which sees this file alone, gets
// "large" for operands that are stored as they are.
#ifdef __CLANGD__
#define BLOCK_M 128
#define BLOCK_N 256
#define BLOCK_K 32
#define THREAD_M 16
#define THREAD_N 8
#define LANES_M 4
#define STAGES 3
#define GROUP 1
#define ORDER 0
#define MIN_BLOCKS 1
#define TRANS_A 0
#define TRANS_B 0
#define WIDE_A 0
#define WIDE_B 0
#endif
#if !defined(BLOCK_M) || !defined(BLOCK_N) || !defined(BLOCK_K) || !defined(STAGES)
#error "BLOCK_M, BLOCK_N, BLOCK_K and STAGES must be defined: see TileConfig.defines()"
#endif
#if !defined(THREAD_M) || !defined(THREAD_N) || !defined(LANES_M) || !defined(MIN_BLOCKS)
#error "THREAD_M, THREAD_N, LANES_M and MIN_BLOCKS must be defined: see TileConfig.defines()"
#endif
#if !defined(GROUP) || !defined(ORDER)
#error "GROUP and ORDER must be defined: see TileConfig.defines()"
#endif
#if !defined(TRANS_A) || !defined(TRANS_B)
#error "TRANS_A and TRANS_B must be defined: 1 where the operand is stored transposed, or 0"
#endif
#if !defined(WIDE_A) || !defined(WIDE_B)
#error "WIDE_A and WIDE_B must be defined: 1 where the operand is copied 16 bytes at a time, or 0"
#endif

#include "common/async_copy.cuh"
#include "common/ieee.cuh"
#include "common/index.cuh"
#include "common/lower_tiles.cuh"
#include "common/refused.cuh"
#include "common/warp_map.cuh"

constexpr bool A_ALONG_K = !TRANS_A;
constexpr bool B_ALONG_K = TRANS_B;
constexpr int STAGE_A = BLOCK_K * pitch(BLOCK_M, A_ALONG_K);  // floats of one buffer
constexpr int STAGE_B = BLOCK_K * pitch(BLOCK_N, B_ALONG_K);
constexpr int STAGE = STAGE_A + STAGE_B;
constexpr int BAND = 8;  // tile rows in flight together; arbitrary

static_assert(THREAD_M % STRIP == 0 && THREAD_N % STRIP == 0, "strips are read 16 bytes at a time");
static_assert(LANES_M == 4 || LANES_M == 8, "lanes are paired 4 x 8 or 8 x 4");
static_assert(BLOCK_M % WARP_M == 0 && BLOCK_N % WARP_N == 0, "a block is made of whole warps");
static_assert(THREADS <= 1024, "a thread block has at most 1024 threads");
static_assert(GROUP >= 1 && STAGES >= 2, "one buffer is read while another one is written");
static_assert(BLOCK_K % K_RUN == 0, "a tile copied along k is made of whole sectors");
static_assert(BLOCK_M * K_RUN % THREADS == 0 && BLOCK_N * K_RUN % THREADS == 0,
              "copying along k, every thread takes part in every copy");
static_assert(!(WIDE_A && A_ALONG_K) && !(WIDE_B && B_ALONG_K), "turning takes copies of 4 bytes");
static_assert(LANES_M * WARP_N * (THREADS / 32) <= STAGES * GROUP * STAGE,
              "D is laid out where k tiles were");

// The k in which piece number `piece` of a tile is copied: TOGETHER pieces at a time, for each
// group of copies costs three empty instructions, and all at once they hold up the shared reads.
// Whether groups should come 2 or 3 k apart depends on how ptxas then schedules the loop, and makes
// up to 3 % on an H200: 2 where A is scattered, and in a long tile where nothing is.
constexpr int TOGETHER = 4, APART = A_ALONG_K || (!B_ALONG_K && BLOCK_K > 16) ? 2 : 3;
__device__ constexpr int piece_k(int piece) {
  return piece / TOGETHER * APART < BLOCK_K - 2 ? piece / TOGETHER * APART : BLOCK_K - 2;
}

// A thread's share in copying one operand's k tiles.
template <int SPAN, bool ALONG_K, int FLOATS>
class TileCopier {
 public:
  static constexpr int COPIES = SPAN * BLOCK_K / (THREADS * FLOATS);  // 256 * 16 / 256 = 16
  static_assert(COPIES >= 1 && SPAN * BLOCK_K % (THREADS * FLOATS) == 0,
                "every thread copies as much as any other");
  static_assert(ALONG_K || THREADS * FLOATS % SPAN == 0, "along x, a copy covers whole rows");

  // `tile` is the operand's element (x = first of this block, k = 0); x_left of its x exist.
  // `stages` is where the first buffer's tile of this operand lies in shared memory.
  __device__ __forceinline__ TileCopier(const float* tile, index_t ld, int x_left, unsigned stages)
      : at_(reinterpret_cast<const char*>(tile + offset(x_of(0), k_of(0), ld))),
        step_(4 * (ALONG_K ? THREADS / K_RUN * ld : THREADS * FLOATS / SPAN * ld)),
        rewind_(4 * BLOCK_K - (X_BITS - 1) * step_),
        to_(stages + 4 * (k_of(0) * pitch(SPAN, ALONG_K) + x_of(0))),
        exists_(0) {
#pragma unroll
    for (int i = 0; i < X_BITS; ++i) {
      if (x_of(i * PER_X) < x_left) exists_ |= 1u << i;
    }
  }

  // Copy the first tile, of which `size` k exist; the rest is 0. `first` is the first buffer.
  __device__ __forceinline__ void copy_first(float* first, int size, index_t ld) {
    zero_or_copy<0>(first + k_of(0) * pitch(SPAN, ALONG_K) + x_of(0), at_, size);
    at_ += 4 * (ALONG_K ? size : size * ld);
  }

  // Copy those pieces of the next tile that are due in step kk, or all of them, if there is such a
  // tile, into the buffer that lies `buffer` bytes after the first. After its last piece that tile
  // is the current one. The first piece is number FIRST of those of both operands.
  template <int FIRST, int I = 0>
  __device__ __forceinline__ void copy_due(unsigned buffer, bool more, int kk) {
    if constexpr (I < COPIES) {
      if (piece_k(FIRST + I) == kk) copy_piece<I>(buffer, more);
      copy_due<FIRST, I + 1>(buffer, more, kk);
    }
  }
  template <int I = 0>
  __device__ __forceinline__ void copy_all(unsigned buffer, bool more) {
    if constexpr (I < COPIES) {
      copy_piece<I>(buffer, more);
      copy_all<I + 1>(buffer, more);
    }
  }

 private:
  static constexpr int PER_X = ALONG_K ? BLOCK_K / K_RUN : COPIES;  // copies of one x
  static constexpr int X_BITS = COPIES / PER_X;

  template <int I>
  __device__ __forceinline__ void zero_or_copy(float* to, const char* at, int size) {
    if constexpr (I < COPIES) {
      if (k_of(I) < size) {
        copy_async<4 * FLOATS, 4 * shared_offset(I), 4 * k_offset(I)>(to_, at,
                                                                      exists_ >> bit(I) & 1);
      } else {
#pragma unroll
        for (int word = 0; word < FLOATS; ++word) to[shared_offset(I) + word] = 0.0f;
      }
      zero_or_copy<I + 1>(to, steps_after(I) ? advance(at, step_) : at, size);
    }
  }

  template <int I>
  __device__ __forceinline__ void copy_piece(unsigned buffer, bool more) {
    const unsigned exists = more ? exists_ : 0;
    copy_async<4 * FLOATS, 4 * shared_offset(I), 4 * k_offset(I)>(to_ + buffer, at_,
                                                                  exists >> bit(I) & 1);
    if (ALONG_K && I == COPIES - 1) {
      at_ = advance(at_, rewind_);
    } else if (steps_after(I)) {
      at_ = advance(at_, step_);
    }
  }

  static __device__ constexpr int bit(int i) { return i / PER_X; }
  static __device__ constexpr bool steps_after(int i) { return !ALONG_K || i % PER_X == PER_X - 1; }
  static __device__ constexpr int k_offset(int i) { return ALONG_K ? i % PER_X * K_RUN : 0; }
  static __device__ constexpr int shared_offset(int i) {
    return ALONG_K ? i % PER_X * K_RUN * pitch(SPAN, 1) + i / PER_X * (THREADS / K_RUN)
                   : i * (THREADS * FLOATS / SPAN) * pitch(SPAN, 0);
  }
  static __device__ __forceinline__ int x_of(int i) {
    const int thread = threadIdx.x;
    return ALONG_K ? along_k_x(thread, i) : along_x_x(thread, SPAN, FLOATS);
  }
  static __device__ __forceinline__ int k_of(int i) {
    const int thread = threadIdx.x;
    return ALONG_K ? along_k_k(thread, i) : along_x_k(thread, i, SPAN, FLOATS);
  }
  static __device__ __forceinline__ index_t offset(int x, int k, index_t ld) {
    return ALONG_K ? x * ld + k : k * ld + x;
  }

  const char* at_;
  const index_t step_, rewind_;  // bytes
  const unsigned to_;
  unsigned exists_;
};

// The next buffer of the ring; buffers are known by their offsets in bytes.
__device__ __forceinline__ int after(int buffer) {
  return buffer == 4 * (STAGES * GROUP - 1) * STAGE ? 0 : buffer + 4 * STAGE;
}

// A thread's SIZE values of one k, as 16-byte strips STRIDE apart.
template <int SIZE, int STRIDE>
__device__ __forceinline__ void read_strips(float (&fragment)[SIZE], const float* first) {
#pragma unroll
  for (int s = 0; s < SIZE / STRIP; ++s) {
    const float4 strip = *reinterpret_cast<const float4*>(first + s * STRIDE);
    fragment[s * STRIP + 0] = strip.x;
    fragment[s * STRIP + 1] = strip.y;
    fragment[s * STRIP + 2] = strip.z;
    fragment[s * STRIP + 3] = strip.w;
  }
}

using Accumulators = float[THREAD_M][THREAD_N];

// Position `step` of a line of `size`, whose odd ones are walked backwards.
__device__ constexpr int there_and_back(int line, int step, int size) {
  return line % 2 ? size - 1 - step : step;
}

// Neighbouring multiply-adds share an operand, which then comes from the reuse cache instead of a
// register bank. ORDER 0: along one row of a thread's values and back along the next. ORDER 1: two
// columns at a time, down one pair and up the next, the two values of a row one after the other.
__device__ __forceinline__ void multiply(Accumulators& acc, const float (&a)[THREAD_M],
                                         const float (&b)[THREAD_N]) {
#pragma unroll
  for (int step = 0; step < THREAD_M * THREAD_N; ++step) {
    constexpr int LINE = ORDER ? 2 * THREAD_M : THREAD_N;
    const int line = step / LINE;
    const int at = there_and_back(line, step % LINE / (ORDER ? 2 : 1), LINE / (ORDER ? 2 : 1));
    const int i = ORDER ? at : line;
    const int j = ORDER ? 2 * line + there_and_back(step % LINE / 2, step % 2, 2) : at;
    acc[i][j] = fma_rn(a[i], b[j], acc[i][j]);
  }
}

// acc = op(A) * op(B): a and b point at the block's first row and column, of which `rows` and
// `cols` exist.
__device__ __forceinline__ void multiply_tile(Accumulators& acc, float* shared, const float* a,
                                              index_t lda, const float* b, index_t ldb, int rows,
                                              int cols, index_t k) {
  const unsigned stages = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  TileCopier<BLOCK_M, A_ALONG_K, WIDE_A ? 4 : 1> a_copier(a, lda, rows, stages);
  TileCopier<BLOCK_N, B_ALONG_K, WIDE_B ? 4 : 1> b_copier(b, ldb, cols, stages + 4 * STAGE_A);

  const int tiles = static_cast<int>(ceil_div(k, BLOCK_K));
  const int first = static_cast<int>(k - (tiles - 1) * static_cast<index_t>(BLOCK_K));
  a_copier.copy_first(shared, first, lda);
  b_copier.copy_first(shared + STAGE_A, first, ldb);
  if (GROUP == 1) commit_copies();
#pragma unroll 1
  for (int t = 1; t < (STAGES - 1) * GROUP; ++t) {
    const bool more = t < tiles;
    a_copier.copy_all(4 * t * STAGE, more);
    b_copier.copy_all(4 * t * STAGE, more);
    if ((t + 1) % GROUP == 0) commit_copies();
  }
  wait_copies<STAGES - 2>();
  __syncthreads();  // the first tile has landed for all

  const char* const a_first = reinterpret_cast<char*>(shared + strip_row(threadIdx.x));
  const char* const b_first = reinterpret_cast<char*>(shared + STAGE_A + strip_col(threadIdx.x));
  const float* a_strips = reinterpret_cast<const float*>(a_first);
  const float* b_strips = reinterpret_cast<const float*>(b_first);
  float a_fragment[2][THREAD_M], b_fragment[2][THREAD_N];
  read_strips<THREAD_M, STRIDE_M>(a_fragment[0], a_strips);
  read_strips<THREAD_N, STRIDE_N>(b_fragment[0], b_strips);

  const int copied = tiles - (STAGES - 1) * GROUP;  // in so many steps there is a tile to copy
  int reading = 0, writing = 4 * (STAGES - 1) * GROUP * STAGE;
#pragma unroll 1
  for (int t = 0; t < tiles; ++t) {
#pragma unroll
    for (int kk = 0; kk < BLOCK_K; ++kk) {
      if (kk == BLOCK_K - 1) {
        if ((t + 1) % GROUP == 0) {
          commit_copies();
          wait_copies<STAGES - 2>();
          // The next group has landed for all; all have read this one, whose buffers are next.
          __syncthreads();
        }
        reading = after(reading);
        writing = after(writing);
        const int offset = as_written(reading);
        a_strips = reinterpret_cast<const float*>(a_first + offset);
        b_strips = reinterpret_cast<const float*>(b_first + offset);
      }
      const int next = (kk + 1) % BLOCK_K;
      read_strips<THREAD_M, STRIDE_M>(a_fragment[(kk + 1) % 2],
                                      a_strips + next * pitch(BLOCK_M, A_ALONG_K));
      read_strips<THREAD_N, STRIDE_N>(b_fragment[(kk + 1) % 2],
                                      b_strips + next * pitch(BLOCK_N, B_ALONG_K));
      a_copier.template copy_due<0>(writing, t < copied, kk);
      b_copier.template copy_due<a_copier.COPIES>(writing, t < copied, kk);
      multiply(acc, a_fragment[kk % 2], b_fragment[kk % 2]);
    }
  }
}

// What the tile of D is made of besides the product: pointers are at its first element, of whose
// rows and columns `rows` and `cols` exist.
struct Finish {
  const float* c;
  const float* p;
  float* d;
  index_t ldc, ldp, ldd;
  int rows, cols;
  float alpha, beta;

  // D = alpha * (sum + P) + beta * C; PLAIN: without P and C
  template <bool PLAIN>
  __device__ __forceinline__ float value(float sum, float p_value, float c_value) const {
    if (PLAIN) return mul_rn(alpha, sum);
    if (p) sum = add_rn(sum, p_value);
    return c ? fma_rn(alpha, sum, mul_rn(beta, c_value)) : mul_rn(alpha, sum);
  }

  __device__ __forceinline__ bool wide() const {
    const unsigned long long lowest = reinterpret_cast<unsigned long long>(d) |
                                      reinterpret_cast<unsigned long long>(c) |
                                      reinterpret_cast<unsigned long long>(p);
    const index_t lengths = ldd | (c ? ldc : 0) | (p ? ldp : 0) | cols;
    return lowest % 16 == 0 && lengths % STRIP == 0;
  }

  // A thread stores its strips, 16 bytes each.
  template <bool PLAIN>
  __device__ __forceinline__ void store_strips(const Accumulators& acc) const {
#pragma unroll
    for (int i = 0; i < THREAD_M; ++i) {
      const int row = owned_row(threadIdx.x, i);
#pragma unroll
      for (int j = 0; j < THREAD_N; j += STRIP) {
        const int col = owned_col(threadIdx.x, j);
        if (row < rows && col < cols) {
          float4 pv = {}, cv = {};
          if (!PLAIN && p) pv = *reinterpret_cast<const float4*>(p + row * ldp + col);
          if (!PLAIN && c) cv = *reinterpret_cast<const float4*>(c + row * ldc + col);
          *reinterpret_cast<float4*>(d + row * ldd + col) =
              float4{value<PLAIN>(acc[i][j], pv.x, cv.x), value<PLAIN>(acc[i][j + 1], pv.y, cv.y),
                     value<PLAIN>(acc[i][j + 2], pv.z, cv.z),
                     value<PLAIN>(acc[i][j + 3], pv.w, cv.w)};
        }
      }
    }
  }

  // Strips of 4 values stored one by one would touch each sector four times: a warp lays LANES_M
  // rows at a time out in shared memory, and stores them 32 neighbours at a time.
  __device__ __forceinline__ void store_rows(const Accumulators& acc, float* shared) const {
    const int lane = threadIdx.x % 32;
    float* rows_of_warp = shared + threadIdx.x / 32 * (LANES_M * WARP_N);
#pragma unroll
    for (int i = 0; i < THREAD_M; ++i) {
#pragma unroll
      for (int j = 0; j < THREAD_N; j += STRIP) {
        *reinterpret_cast<float4*>(rows_of_warp + lane_m(lane) * WARP_N + lane_n(lane) * STRIP +
                                   j / STRIP * STRIDE_N) =
            float4{acc[i][j], acc[i][j + 1], acc[i][j + 2], acc[i][j + 3]};
      }
      __syncwarp();
#pragma unroll 1  // its 128 copies would be a quarter of the code, and half of the time to compile
      for (int at = 0; at < LANES_M * WARP_N; at += 32) {
        const int row = warp_row(threadIdx.x) + i / STRIP * STRIDE_M + i % STRIP +
                        at / WARP_N * STRIP;
        const int col = warp_col(threadIdx.x) + at % WARP_N + lane;
        if (row < rows && col < cols) {
          const float pv = p ? p[row * ldp + col] : 0.0f;
          const float cv = c ? c[row * ldc + col] : 0.0f;
          d[row * ldd + col] = value<false>(rows_of_warp[at + lane], pv, cv);
        }
      }
      __syncwarp();
    }
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    sgemm_ffma(index_t m, index_t n, index_t k, index_t k_step, float alpha, float beta,
               const float* __restrict__ a, index_t lda, index_t stride_a,
               const float* __restrict__ b, index_t ldb, index_t stride_b,
               const float* __restrict__ c, index_t ldc, index_t stride_c,
               const float* __restrict__ p, index_t ldp, index_t stride_p,
               float* __restrict__ d, index_t ldd, index_t stride_d
#ifdef GUARDED  // needed only if packing finds that REFUSED is the way: common/refused.cuh
               ,
               const unsigned long long* __restrict__ counts
#endif
    ) {
#ifdef GUARDED
  if (way_of(counts, GUARDED) != REFUSED) return;
#endif
  extern __shared__ __align__(16) float shared[];
  const index_t batch = blockIdx.z;
  if (k_step) k = clip(k - batch * k_step, static_cast<int>(k_step));
  if (is_zero(beta)) c = nullptr;
  if (is_zero(alpha)) {
    k = 0;
    p = nullptr;
  }
  if (k == 0 && !p) alpha = 0.0f;  // an infinite alpha times nothing is nothing
#ifdef LOWER
  const LowerTiles<BLOCK_M, BLOCK_N, BAND> tiles{static_cast<unsigned>(ceil_div(m, BLOCK_M)),
                                                 static_cast<unsigned>(ceil_div(n, BLOCK_N))};
  const TileIndex tile = tiles.at(blockIdx.x);
#else
  const TileIndex tile = banded_tile(blockIdx.x, ceil_div(m, BLOCK_M), ceil_div(n, BLOCK_N), BAND);
#endif
  const index_t row = tile.row * BLOCK_M;
  const index_t col = tile.col * BLOCK_N;
  const int rows = clip(m - row, BLOCK_M);
  const int cols = clip(n - col, BLOCK_N);

  Accumulators acc = {};
  if (k > 0) {  // the same for the whole block
    multiply_tile(acc, shared, a + batch * stride_a + (TRANS_A ? row : row * lda), lda,
                  b + batch * stride_b + (TRANS_B ? col * ldb : col), ldb, rows, cols, k);
  }
  if (c) c += batch * stride_c + row * ldc + col;
  if (p) p += batch * stride_p + row * ldp + col;
  d += batch * stride_d + row * ldd + col;
  const Finish finish{c, p, d, ldc, ldp, ldd, rows, cols, alpha, beta};
  if (finish.wide() && !p && !c) {
    finish.store_strips<true>(acc);  // short: a block runs through it once
  } else if (finish.wide()) {
    finish.store_strips<false>(acc);
  } else {
    __syncthreads();  // all have read the last k tile
    finish.store_rows(acc, shared);
  }
}
