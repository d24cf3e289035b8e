// B = transpose(A)        elements of 1, 2, 4 or 8 bytes whose rows begin anywhere
//
//   A  rows x cols   rows lda elements apart (no lower bound: 0 repeats one row)
//   B  cols x rows   rows ldb >= rows elements apart; does not overlap A
//
// Batch i of a matrix begins i * stride elements after its pointer. As transpose.cu, for matrices
// whose rows begin at any element: an odd leading dimension, say. What costs time there is to write
// parts of 32-byte sectors. So each row of B takes its part of the tile from where its own sectors
// begin, up to SKEW - 1 elements further left:
//
//   B   row 0   .......[=======]....      [ ] what one block writes: TILE - SKEW elements of each
//       row 1   .....[=======]......          row, from one multiple of SKEW elements in memory
//       row 2   ........[=======]...          to another; a block reads TILE rows of A for it
//
// Slots (see common/slots.cuh) lie at multiples of a slot in memory. Where a row of A, or a row's
// part of the tile, begins in the middle of one, two slots are read and one is shifted out of them:
//
//       |....|..AB|CD..|....|             VECTOR = 4 elements: A B C D from two slots
//
// Reading needs that for speed only with elements of 1 and 2 bytes. Those of 4 and 8 are slots of
// their own (VECTOR = 1): nothing is shifted.
//
// Cost: as transpose.cu, and SKEW of TILE rows of A are read twice, the second time from L2.

// What TransposeConfig.defines() sets. An editor, which sees this file alone, gets float32.
#ifdef __CLANGD__
#define WORD_BYTES 4
#define WORDS 1
#define VECTOR 1
#define SLOTS 64
#define THREADS 512
#define SKEW 8
#endif
#if !defined(WORD_BYTES) || !defined(WORDS) || !defined(VECTOR) || !defined(SLOTS) || \
    !defined(THREADS) || !defined(SKEW)
#error "parameters must be defined: see TransposeConfig.defines()"
#endif

#include "common/slots.cuh"

constexpr int WRITTEN = TILE - SKEW;  // elements of a row of B that a block writes

static_assert(WORDS == 1, "an element is one word: only whole elements are shifted");
static_assert(SKEW * WORD_BYTES % 32 == 0 && (SKEW & (SKEW - 1)) == 0,
              "rows of the turned tile begin where a sector begins");
static_assert(WRITTEN > 0 && WRITTEN % SKEW == 0 && SKEW % VECTOR == 0,
              "what is written is made of whole sectors, and these of whole slots");

// How many elements behind a multiple of `step` elements an address lies.
__device__ __forceinline__ int behind(const word_t* element, int step) {
  return static_cast<int>(reinterpret_cast<unsigned long long>(element) / WORD_BYTES % step);
}

// The slot that begins `by` < VECTOR elements after `low`; `high` follows `low`.
template <typename Unit>
__device__ __forceinline__ Slot shifted(const Unit (&low)[UNITS], const Unit (&high)[UNITS],
                                        int by) {
  Unit unit[2 * UNITS];
#pragma unroll
  for (int i = 0; i < UNITS; ++i) unit[i] = low[i], unit[UNITS + i] = high[i];
#pragma unroll
  for (int step = UNITS / 2; step > 0; step /= 2) {  // a power of two of units at a time
    const bool move = by / PACK & step;
#pragma unroll
    for (int i = 0; i + step < 2 * UNITS; ++i) unit[i] = move ? unit[i + step] : unit[i];
  }
  Slot slot;
#pragma unroll
  for (int i = 0; i < UNITS; ++i) {
    if constexpr (PACK == 1) {
      slot.unit[i] = unit[i];
    } else {
      const unsigned long long both = static_cast<unsigned long long>(unit[i + 1]) << 32 | unit[i];
      slot.unit[i] = static_cast<Unit>(both >> by % PACK * 8 * WORD_BYTES);
    }
  }
  return slot;
}

// The slot `col` elements after `row`; the row has `before` elements left of there and `after`
// from `row` on, counted as far as they matter.
template <bool WHOLE>
__device__ __forceinline__ Slot load(const word_t* row, int col, int before, int after) {
  const int back = behind(row, VECTOR);
  if (WHOLE || (col - back >= -before && col - back + 2 * VECTOR <= after)) {
    const word_t* from = row + (col - back);
    if constexpr (VECTOR == 1) {
      return slot_at(from);
    } else {
      const Slot low = slot_at(from), high = slot_at(from + VECTOR);
      return shifted(low.unit, high.unit, back);
    }
  }
  Slot slot = {};
#pragma unroll
  for (int e = 0; e < VECTOR; ++e) {
    if (col + e < after) put(slot.unit, e, row[col + e]);
  }
  return slot;
}

// TILE rows of A from row0 on into shared memory, turned.
template <bool WHOLE>
__device__ __forceinline__ void read_tile(Slot* tile, const word_t* __restrict__ a, index_t lda,
                                          index_t rows, index_t cols, index_t row0,
                                          index_t col0) {
  const int slot = threadIdx.x % SLOTS;
  const int before = clip(col0, VECTOR);
  const int after = clip(cols - col0, TILE + VECTOR);
  Slot piece[PIECES][VECTOR];
#pragma unroll
  for (int p = 0; p < PIECES; ++p) {  // all loads first: they wait together
#pragma unroll
    for (int v = 0; v < VECTOR; ++v) {
      const index_t row = row0 + (threadIdx.x / SLOTS + p * ROWS_AT_ONCE) * VECTOR + v;
      if (WHOLE || (row >= 0 && row < rows && slot * VECTOR < after)) {
        piece[p][v] = load<WHOLE>(a + (row * lda + col0), slot * VECTOR, before, after);
      } else {
        piece[p][v] = {};
      }
    }
  }
#pragma unroll
  for (int p = 0; p < PIECES; ++p) {
    turn(piece[p]);
#pragma unroll
    for (int v = 0; v < VECTOR; ++v) {
      tile[place(slot * VECTOR + v, threadIdx.x / SLOTS + p * ROWS_AT_ONCE)] = piece[p][v];
    }
  }
}

// Of each row of the turned tile, the whole sectors that this block is to write.
template <bool WHOLE>
__device__ __forceinline__ void write_tile(word_t* __restrict__ b, index_t ldb, const Slot* tile,
                                           index_t rows, index_t cols, index_t row0,
                                           index_t col0) {
  if (threadIdx.x % SLOTS >= WRITTEN / VECTOR) return;
#pragma unroll
  for (int p = 0; p < PIECES * VECTOR; ++p) {
    const int col = threadIdx.x / SLOTS + p * ROWS_AT_ONCE;
    if (!WHOLE && col0 + col >= cols) break;
    word_t* const turned = b + (col0 + col) * ldb;
    const int at = static_cast<int>(threadIdx.x % SLOTS) * VECTOR + SKEW -
                   behind(turned + (row0 + SKEW), SKEW);  // in the tile
    const Slot* from = tile + place(col, at / VECTOR);
    Slot slot = slot_at(from);
    if constexpr (VECTOR > 1) {
      const Slot high = slot_at(from + (at % VECTOR != 0));
      slot = shifted(slot.unit, high.unit, at % VECTOR);
    }
    const index_t row = row0 + at;
    if (WHOLE || (row >= 0 && row + VECTOR <= rows)) {
      put_slot(turned + row, slot);
    } else {
#pragma unroll
      for (int e = 0; e < VECTOR; ++e) {
        if (row + e >= 0 && row + e < rows) turned[row + e] = element_of(slot.unit, e);
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    transpose_skewed(index_t rows, index_t cols, const word_t* __restrict__ a, index_t lda,
                     index_t stride_a, word_t* __restrict__ b, index_t ldb, index_t stride_b) {
  __shared__ Slot tile[TILE_SLOTS];

  // The last elements of a row of B may be up to SKEW - 1 further left than without the skew.
  const TileIndex at = tile_of(blockIdx.x, ceil_div(rows + SKEW - 1, WRITTEN));
  const index_t row0 = at.row * WRITTEN - SKEW;
  const index_t col0 = at.col * TILE;
  const index_t batch = blockIdx.z;
  // The same in all threads: the tile, and what is read to its left and right, exists.
  const bool whole = row0 >= 0 && row0 + TILE <= rows && col0 + TILE <= cols;
  const bool inside = whole && col0 >= VECTOR && col0 + TILE + VECTOR <= cols;

  a += batch * stride_a;
  b += batch * stride_b;
  if (inside) {
    read_tile<true>(tile, a, lda, rows, cols, row0, col0);
  } else {
    read_tile<false>(tile, a, lda, rows, cols, row0, col0);
  }
  __syncthreads();  // the tile is written before its rows are read
  if (whole) {
    write_tile<true>(b, ldb, tile, rows, cols, row0, col0);
  } else {
    write_tile<false>(b, ldb, tile, rows, cols, row0, col0);
  }
}
