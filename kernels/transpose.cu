// B = transpose(A)        any element of WORDS * WORD_BYTES bytes, row-major, batched
//
//   A  rows x cols   rows lda elements apart (no lower bound: 0 repeats one row)
//   B  cols x rows   rows ldb >= rows elements apart; does not overlap A
//
// Batch i of a matrix begins i * stride elements after its pointer. All memory is moved in slots
// of VECTOR elements. VECTOR > 1 needs every row of A and B to begin on a multiple of a slot, and
// elements of one word; VECTOR = 1 moves any element as WORDS words, each at its own alignment.
//
// One thread block turns a TILE x TILE tile; TILE = VECTOR * SLOTS. One thread turns VECTOR x
// VECTOR pieces in its registers, so that shared memory too is read and written a slot at a time:
//
//        A, a tile row by row         shared memory            B, a tile row by row
//      |---- SLOTS slots ----|                               |---- SLOTS slots ----|
//      +----+----+-- - - ----+    +----+----+-- - - ----+    +----+----+-- - - ----+
//    V | t0 | t1 |           |    | t0 |tS  |           |    | --- the lanes ---- >|
//      +----+----+           | -> +----+----+           | -> | of a warp read and  |
//      | tS |                |    | t1 |                |    | write rows, slot by |
//      |    :                |    |    :                |    | slot                |
//      +---------------------+    +---------------------+    +---------------------+
//       thread t reads V slots,    and puts them down as      after the barrier
//       one in each of V rows      V slots of turned rows
//
// Cost: every element is read once and written once, at 16 bytes by four memory instructions. A
// thread has VECTOR * PIECES slots in flight; a block holds a tile in shared memory. Large matrices
// whose rows do not begin at multiples of 16 bytes are for transpose_skewed.cu.

// What TransposeConfig.defines() sets. An editor, which sees this file alone, gets float32.
#ifdef __CLANGD__
#define WORD_BYTES 4
#define WORDS 1
#define VECTOR 1
#define SLOTS 32
#define THREADS 256
#endif
#if !defined(WORD_BYTES) || !defined(WORDS) || !defined(VECTOR) || !defined(SLOTS) || \
    !defined(THREADS)
#error "WORD_BYTES, WORDS, VECTOR, SLOTS and THREADS must be defined: see TransposeConfig.defines()"
#endif

#include "common/slots.cuh"

// The slot at `from`, of which only `left` elements exist.
template <bool WHOLE>
__device__ __forceinline__ Slot load(const word_t* from, int left) {
  if (WHOLE || left >= VECTOR) return slot_at(from);
  Slot slot = {};
#pragma unroll
  for (int e = 0; e < VECTOR; ++e) {
    if (e < left) put(slot.unit, e, from[e]);
  }
  return slot;
}

template <bool WHOLE>
__device__ __forceinline__ void store(word_t* to, const Slot& slot, int left) {
  if (WHOLE || left >= VECTOR) {
    put_slot(to, slot);
  } else {
#pragma unroll
    for (int e = 0; e < VECTOR; ++e) {
      if (e < left) to[e] = element_of(slot.unit, e);
    }
  }
}

// A tile of A into shared memory, turned; what lies outside of A is left undefined.
template <bool WHOLE>
__device__ __forceinline__ void read_tile(Slot (*tile)[TILE_SLOTS], const word_t* __restrict__ a,
                                          index_t lda, int rows, int cols) {
  const int col = threadIdx.x % SLOTS;
  Slot piece[PIECES][WORDS][VECTOR];
#pragma unroll
  for (int p = 0; p < PIECES; ++p) {  // all loads first: they wait together
    const int row = (threadIdx.x / SLOTS + p * ROWS_AT_ONCE) * VECTOR;
#pragma unroll
    for (int v = 0; v < VECTOR; ++v) {
#pragma unroll
      for (int w = 0; w < WORDS; ++w) {
        if (WHOLE || (row + v < rows && col * VECTOR < cols)) {
          piece[p][w][v] = load<WHOLE>(a + ((row + v) * lda + col * VECTOR) * WORDS + w,
                                       cols - col * VECTOR);
        } else {
          piece[p][w][v] = {};
        }
      }
    }
  }
#pragma unroll
  for (int p = 0; p < PIECES; ++p) {
    const int row = threadIdx.x / SLOTS + p * ROWS_AT_ONCE;
#pragma unroll
    for (int w = 0; w < WORDS; ++w) {
      turn(piece[p][w]);
#pragma unroll
      for (int v = 0; v < VECTOR; ++v) tile[w][place(col * VECTOR + v, row)] = piece[p][w][v];
    }
  }
}

// The turned tile into B; rows and cols are those of B.
template <bool WHOLE>
__device__ __forceinline__ void write_tile(word_t* __restrict__ b, index_t ldb,
                                           const Slot (*tile)[TILE_SLOTS], int rows, int cols) {
  const int col = threadIdx.x % SLOTS;
#pragma unroll
  for (int p = 0; p < PIECES * VECTOR; ++p) {
    const int row = threadIdx.x / SLOTS + p * ROWS_AT_ONCE;
    if (WHOLE || (row < rows && col * VECTOR < cols)) {
#pragma unroll
      for (int w = 0; w < WORDS; ++w) {
        store<WHOLE>(b + (row * ldb + col * VECTOR) * WORDS + w, tile[w][place(row, col)],
                     cols - col * VECTOR);
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    transpose(index_t rows, index_t cols, const word_t* __restrict__ a, index_t lda,
              index_t stride_a, word_t* __restrict__ b, index_t ldb, index_t stride_b) {
  __shared__ Slot tile[WORDS][TILE_SLOTS];

  const TileIndex at = tile_of(blockIdx.x, ceil_div(rows, TILE));
  const index_t row0 = at.row * TILE;
  const index_t col0 = at.col * TILE;
  const int rows_left = clip(rows - row0, TILE);
  const int cols_left = clip(cols - col0, TILE);
  const bool whole = rows_left == TILE && cols_left == TILE;  // the same in all threads
  const index_t batch = blockIdx.z;

  a += (batch * stride_a + row0 * lda + col0) * WORDS;
  b += (batch * stride_b + col0 * ldb + row0) * WORDS;
  if (whole) {
    read_tile<true>(tile, a, lda, TILE, TILE);
  } else {
    read_tile<false>(tile, a, lda, rows_left, cols_left);
  }
  __syncthreads();  // the tile is written before its rows are read
  if (whole) {
    write_tile<true>(b, ldb, tile, TILE, TILE);
  } else {
    write_tile<false>(b, ldb, tile, cols_left, rows_left);
  }
}
