// Slots, in which transposes move memory, and how a thread turns a piece of them in registers.
//
// A slot is VECTOR neighbouring elements of a row, moved by one instruction. A piece is VECTOR
// slots below each other; turned, it is VECTOR slots of the transpose. A tile is TILE x TILE
// elements, SLOTS slots wide. For WORD_BYTES, WORDS, VECTOR, SLOTS, THREADS see transpose.cu.
//
// In shared memory one bank of padding after every VECTOR rows moves the pieces of neighbouring
// threads to different banks: the lanes that the hardware serves at a time (32 for slots of 4
// bytes, 16 for 8, 8 for 16) meet every bank once, whether they write one slot of each of their
// pieces or read a row.
#pragma once

#include "common/index.cuh"

constexpr int TILE = VECTOR * SLOTS;                      // 4 * 16 = 64 for aligned float32
constexpr int SLOT_BYTES = VECTOR * WORD_BYTES;           // 16
constexpr int PAD = SLOT_BYTES < 4 ? 4 / SLOT_BYTES : 1;  // slots in a bank, at least one
constexpr int ROWS_AT_ONCE = THREADS / SLOTS;             // 16 rows of pieces, later of slots
constexpr int PIECES = SLOTS / ROWS_AT_ONCE;              // 1, of one thread
constexpr int TILE_SLOTS = TILE * SLOTS + SLOTS * PAD;

// clang-format off
template <int BYTES> struct WordOf;
template <> struct WordOf<1> { using type = unsigned char; };
template <> struct WordOf<2> { using type = unsigned short; };
template <> struct WordOf<4> { using type = unsigned int; };
template <> struct WordOf<8> { using type = unsigned long long; };
template <> struct WordOf<16> { using type = uint4; };
// clang-format on
using word_t = WordOf<WORD_BYTES>::type;

// Registers have 4 bytes: in a longer slot, smaller words are packed.
constexpr int PACK = VECTOR > 1 && WORD_BYTES < 4 ? 4 / WORD_BYTES : 1;
constexpr int UNITS = VECTOR / PACK;
using unit_t = WordOf<PACK * WORD_BYTES>::type;
struct alignas(SLOT_BYTES) Slot {
  unit_t unit[UNITS];
};

static_assert(SLOT_BYTES <= 16, "one instruction moves at most 16 bytes");
static_assert(VECTOR == 1 || (WORDS == 1 && SLOT_BYTES >= 4),
              "a slot of several elements is made of whole registers and whole elements");
static_assert(THREADS % SLOTS == 0 && SLOTS % ROWS_AT_ONCE == 0,
              "every thread turns the same number of pieces");
static_assert(SLOTS * SLOT_BYTES >= 128 || SLOTS >= 32,
              "the lanes that are served at a time lie in one row of the tile: no conflicts");
static_assert(WORDS * TILE_SLOTS * SLOT_BYTES <= 49152,
              "statically declared shared memory stops at 48 KiB");

// Where slot `col` of row `row` of the turned tile lies.
__device__ constexpr int place(int row, int col) { return row * SLOTS + row / VECTOR * PAD + col; }

// Which tile a thread block turns: down A, tile column by tile column, so that the blocks in flight
// write rows of B from end to end. On an H200 that is 1 to 6 % faster than along A, or in bands
// of 2 to 128 tile rows. 32 bits: 64-bit divisions would take as long as the loads.
__device__ __forceinline__ TileIndex tile_of(unsigned block, index_t tile_rows) {
  const unsigned rows = static_cast<unsigned>(tile_rows);  // the grid bounds the product
  return {block % rows, block / rows};
}

// PACK registers of PACK words each: word i of register j becomes word j of register i.
template <int N, typename Unit>
__device__ __forceinline__ void turn_registers(Unit (&r)[N]) {
  if constexpr (N == 2) {
    const Unit low = __byte_perm(r[0], r[1], 0x5410);
    r[1] = __byte_perm(r[0], r[1], 0x7632);
    r[0] = low;
  } else if constexpr (N == 4) {
    const Unit low01 = __byte_perm(r[0], r[1], 0x5140), high01 = __byte_perm(r[0], r[1], 0x7362);
    const Unit low23 = __byte_perm(r[2], r[3], 0x5140), high23 = __byte_perm(r[2], r[3], 0x7362);
    r[0] = __byte_perm(low01, low23, 0x5410);
    r[1] = __byte_perm(low01, low23, 0x7632);
    r[2] = __byte_perm(high01, high23, 0x5410);
    r[3] = __byte_perm(high01, high23, 0x7632);
  }
}

// Whole slots. A cast says how they are aligned, but optimisers may merge such an access with those
// of single elements at the edges, and then split it; this word and this function they leave.
__device__ __forceinline__ Slot slot_at(const void* from) {
  return *static_cast<const Slot*>(__builtin_assume_aligned(from, SLOT_BYTES));
}

__device__ __forceinline__ void put_slot(void* to, Slot slot) {
  using Whole = WordOf<SLOT_BYTES>::type;
  Whole whole;
  memcpy(&whole, &slot, SLOT_BYTES);
  __stcg(static_cast<Whole*>(to), whole);
}

// Element e of a slot, put into zeros or taken out; a template, for some units are no numbers.
template <typename Unit>
__device__ __forceinline__ void put(Unit (&unit)[UNITS], int e, word_t element) {
  if constexpr (PACK == 1) {
    unit[e] = element;
  } else {
    unit[e / PACK] |= static_cast<Unit>(element) << e % PACK * 8 * WORD_BYTES;
  }
}

template <typename Unit>
__device__ __forceinline__ word_t element_of(const Unit (&unit)[UNITS], int e) {
  if constexpr (PACK == 1) {
    return unit[e];
  } else {
    return static_cast<word_t>(unit[e / PACK] >> e % PACK * 8 * WORD_BYTES);
  }
}

// One piece: VECTOR slots of VECTOR elements. Only turn_registers computes, the rest is names.
__device__ __forceinline__ void turn(Slot (&piece)[VECTOR]) {
  Slot turned[VECTOR];
#pragma unroll
  for (int row = 0; row < UNITS; ++row) {
#pragma unroll
    for (int col = 0; col < UNITS; ++col) {
      unit_t block[PACK];
#pragma unroll
      for (int i = 0; i < PACK; ++i) block[i] = piece[row * PACK + i].unit[col];
      turn_registers(block);
#pragma unroll
      for (int i = 0; i < PACK; ++i) turned[col * PACK + i].unit[row] = block[i];
    }
  }
#pragma unroll
  for (int i = 0; i < VECTOR; ++i) piece[i] = turned[i];
}
