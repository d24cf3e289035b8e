// Products of bytes on the tensor cores of sm_90a: D = A * B', of integers or of their residues.
//
//   A      count planes of packed tiles [R / 64][slabs][64][128] of bytes, R = m rounded up to 128
//   B      likewise of n rows: row j of B is column j of the product
//   D      count planes of R rows, ldd bytes apart (n rounded up to 256): residues nearest to 0, modulo
//          each plane's modulus
//   D, P   with INTEGER defined: count planes of m x n int32 or, with `as_float`, of these as float32;
//          D = A * B' + P, modulo 2^32. P is null, or has one plane as there is one. Bytes are int8 or
//          uint8, as SIGNED_A and SIGNED_B say. Planes are slices of k
//
// A slab is 128 k. Sums are of int32, which wraps. Of residues they are 2^14 for each k at most. From a
// sum of up to 2^29 one rounding finds the multiple of a modulus to within one, so k is 2^15 at most.
//
// With LOWER defined D is square, and its tiles above the diagonal are left as they are.
//
// One thread block per multiprocessor computes tiles of 128 x TILE_N, one after the other, of one
// plane and then of the next; the ring of slots is that of sgemm_split.cu:
//
//            TILE_N            slot:  A rows 0-63 | A rows 64-127 | B rows 0-63 | B rows 64-127 ..
//        +------------+
//     64 | warpgroup 0|        global --(bulk copies)--> slot --> tensor cores
//        +------------+        full:  all bytes of a slot have landed
//     64 | warpgroup 1|        empty: all warps have read it
//        +------------+
//
// Cost per slab and block, TILE_N 256: 512 clocks of the tensor cores, 48 KB from L2.
//
// On an H200, 692 W, held for 3 s, uniform random bytes: 1306 TOP/s at 8192 and 1376 at 16384 where
// sums are stored as they are (a trial before this file), cuBLASLt 880 and 907.

#ifdef __CLANGD__
#define TILE_N 256
#define SLOTS 4
#define BAND 16
#endif
#if !defined(TILE_N) || !defined(SLOTS) || !defined(BAND)
#error "TILE_N, SLOTS and BAND must be defined: see multimm.gpu.byte_products"
#endif
#define BYTE_FACTORS
#ifndef INTEGER
#define SIGNED_A 1
#define SIGNED_B 1
#endif

#include "common/lower_tiles.cuh"
#include "common/residues.cuh"
#include "common/slot_ring.cuh"
#include "common/wgmma.cuh"

constexpr int TILE_M = 128, A_TILES = TILE_M / ROWS_OF_TILE, B_TILES = TILE_N / ROWS_OF_TILE;
constexpr int GROUPS = 2, GROUP_THREADS = 128;  // warpgroups that multiply; one more copies
constexpr int THREADS = (1 + GROUPS) * GROUP_THREADS;
constexpr int COPY_REGISTERS = 40, MULTIPLY_REGISTERS = 232;
constexpr int SLOT_BYTES = (A_TILES + B_TILES) * BYTES_OF_TILE;
constexpr int SUMS = TILE_N / 2;  // of a thread: 64 x TILE_N by 128 threads
constexpr int STEPS = K_OF_TILE / 32;

static_assert(TILE_N % 64 == 0, "columns are stored 32 at a time, and B is packed in tiles of 64");

// Of each plane.
struct Moduli {
  int modulus[MOST_PLANES];
  float inverse[MOST_PLANES];
};

using Place = RingPlace<SLOTS>;
using Ring = SlotRing<SLOTS, SLOT_BYTES>;

// The tiles of D, plane after plane: bands of BAND rows of them, column by column.
struct Work {
  unsigned rows, columns, count;
#ifdef LOWER
  __device__ __forceinline__ LowerTiles<TILE_M, TILE_N, BAND> lower() const { return {rows, columns}; }
  __device__ __forceinline__ unsigned tiles() const { return lower().count(); }
  __device__ __forceinline__ TileIndex tile(unsigned item) const { return lower().at(item % tiles()); }
#else
  __device__ __forceinline__ unsigned tiles() const { return rows * columns; }
  __device__ __forceinline__ TileIndex tile(unsigned item) const {
    const unsigned tile = item % tiles(), above = tile / (BAND * columns) * BAND;
    const unsigned rest = tile - above * columns;
    const unsigned high = rows - above < BAND ? rows - above : BAND;
    return {above + rest % high, rest / high};
  }
#endif
  __device__ __forceinline__ unsigned total() const { return tiles() * count; }
  __device__ __forceinline__ int plane(unsigned item) const { return item / tiles(); }
};

// An operand: all planes, and its last row of tiles, which stands in for those beyond it. With `turned`
// 1 pairs of planes change places: the residues of conjugates.
struct Packed {
  const char* tiles;
  index_t panels, slabs;
  int turned;
  __device__ __forceinline__ const char* at(int plane, index_t panel) const {
    const index_t own = panel < panels ? panel : panels - 1;
    return tiles + ((plane ^ turned) * panels + own) * slabs * BYTES_OF_TILE;
  }
};

// One thread copies all that its block multiplies.
__device__ __forceinline__ void copy_operands(const Ring& ring, const Work& work, const Packed& a,
                                              const Packed& b) {
  Place place{0, 1};  // the first round finds empty slots
  const unsigned total = work.total();
  for (unsigned item = blockIdx.x; item < total; item += gridDim.x) {
    const TileIndex tile = work.tile(item);
    const int plane = work.plane(item);
    const char* from[A_TILES + B_TILES];
#pragma unroll
    for (int i = 0; i < A_TILES + B_TILES; ++i) {
      from[i] = i < A_TILES ? a.at(plane, tile.row * A_TILES + i)
                            : b.at(plane, tile.col * B_TILES + i - A_TILES);
    }
#pragma unroll 1
    for (index_t left = a.slabs; left > 0; --left, place.next()) {
      const shared_t full = ring.full_at(place.slot);
      barrier_wait(ring.empty_at(place.slot), place.parity);
      barrier_expect(full, SLOT_BYTES);
#pragma unroll
      for (int i = 0; i < A_TILES + B_TILES; ++i) {
        copy_bulk(ring.slot(place.slot) + i * BYTES_OF_TILE, from[i], BYTES_OF_TILE, full);
        from[i] += BYTES_OF_TILE;
      }
    }
  }
}

// sums = A * B' of all slabs of a tile.
__device__ __forceinline__ void multiply_tile(int (&sums)[SUMS], const Ring& ring, Place& place,
                                              index_t slabs, int group) {
  int reading = 0;
#pragma unroll 1
  for (index_t i = 0; i < slabs; ++i) {
    barrier_wait(ring.full_at(place.slot), place.parity);
    const shared_t slot = ring.slot(place.slot);
    const factor_t a = factor_at(slot + group * BYTES_OF_TILE);
    const factor_t b = factor_at(slot + A_TILES * BYTES_OF_TILE);
    products_fence();
#pragma unroll
    for (int s = 0; s < STEPS; ++s) multiply(sums, a + s * NEXT_16_K, b + s * NEXT_16_K, i > 0 || s > 0);
    products_commit();
    products_wait<1>();  // the slab before has been read
    if (i > 0 && threadIdx.x % 32 == 0) barrier_arrive(ring.empty_at(reading));
    reading = place.slot;
    place.next();
  }
  products_wait<0>();
  if (threadIdx.x % 32 == 0) barrier_arrive(ring.empty_at(reading));
}

#ifdef INTEGER

// Where sums go. Pairs of neighbours are stored at once where all of D's lie so.
struct Results {
  index_t m, n;
  const int* p;
  int* d;
  bool as_float, pairs;

  __device__ __forceinline__ int value(int sum, index_t at) const {
    if (p) sum = static_cast<int>(static_cast<unsigned>(sum) + static_cast<unsigned>(p[at]));
    return as_float ? __float_as_int(__int2float_rn(sum)) : sum;
  }
  __device__ __forceinline__ void store(const int (&sums)[SUMS], index_t row, index_t column) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const index_t line = row + 8 * h;
      if (line >= m) continue;
#pragma unroll
      for (int j = 0; j < SUMS / 4; ++j) {
        const index_t col = column + 8 * j + 2 * (threadIdx.x % 4), at = line * n + col;
        const int i = 4 * j + 2 * h;
        if (pairs && col < n) {
          *reinterpret_cast<int2*>(d + at) = int2{value(sums[i], at), value(sums[i + 1], at + 1)};
        } else if (col < n) {
          d[at] = value(sums[i], at);
          if (col + 1 < n) d[at + 1] = value(sums[i + 1], at + 1);
        }
      }
    }
  }
};

#else

// The residue of a sum, as the lowest byte.
__device__ __forceinline__ unsigned residue(int sum, int modulus, float inverse) {
  constexpr float ROUNDER = 12582912.0f;  // 1.5 * 2^23
  const float rounded = fmaf(__int2float_rn(sum), inverse, ROUNDER);
  int r = sum - (__float_as_int(rounded) - __float_as_int(ROUNDER)) * modulus;
  const int half = (modulus - 1) / 2;
  if (r > half) r -= modulus;
  if (r < -half) r += modulus;
  return r & 255;
}

// Of four lanes, each with two neighbours in each of four groups of eight columns (two groups a
// word), lane q gets all eight of group q.
__device__ __forceinline__ uint2 exchanged(unsigned first, unsigned second, int q) {
  const bool right = q & 2, odd = q & 1;
  const unsigned kept = right ? second : first;
  const unsigned got = __shfl_xor_sync(~0u, right ? first : second, 2);
  const unsigned lower = right ? got : kept, upper = right ? kept : got;
  const unsigned low = __byte_perm(lower, upper, 0x5410), high = __byte_perm(lower, upper, 0x7632);
  const unsigned own = odd ? high : low;
  const unsigned other = __shfl_xor_sync(~0u, odd ? low : high, 1);
  const unsigned of_even = odd ? other : own, of_odd = odd ? own : other;
  return {__byte_perm(of_even, of_odd, 0x5410), __byte_perm(of_even, of_odd, 0x7632)};
}

__device__ __forceinline__ void store(const int (&sums)[SUMS], unsigned char* d, index_t ldd,
                                      int modulus, float inverse) {
  const int q = threadIdx.x % 4;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
#pragma unroll
    for (int j = 0; j < SUMS / 4; j += 4) {
      unsigned pairs[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = 4 * (j + i) + 2 * h;
        pairs[i] = residue(sums[at], modulus, inverse) | residue(sums[at + 1], modulus, inverse) << 8;
      }
      const uint2 eight = exchanged(pairs[0] | pairs[1] << 16, pairs[2] | pairs[3] << 16, q);
      *reinterpret_cast<uint2*>(d + 8 * h * ldd + 8 * (j + q)) = eight;
    }
  }
}

#endif

extern "C" __global__ void __launch_bounds__(THREADS, 1)
#ifdef INTEGER
    byte_mma(index_t m, index_t n, index_t slabs, int count, const char* __restrict__ a_tiles,
             const char* __restrict__ b_tiles, const int* p, int* d, int as_float) {
  constexpr int turned_a = 0, turned_b = 0;
#else
    byte_mma(index_t m, index_t n, index_t slabs, int count, const __grid_constant__ Moduli moduli,
             const char* __restrict__ a_tiles, int turned_a, const char* __restrict__ b_tiles,
             int turned_b, unsigned char* __restrict__ d, index_t ldd) {
#endif
  extern __shared__ char memory[];
  const Ring ring(memory);
  if (threadIdx.x == 0) ring.begin(GROUPS * (GROUP_THREADS / 32));
  __syncthreads();  // all find barriers that work

  const index_t rows = ceil_div(m, TILE_M);
  const Work work{static_cast<unsigned>(rows), static_cast<unsigned>(ceil_div(n, TILE_N)),
                  static_cast<unsigned>(count)};
  // From one lane, so that the compiler knows it is the same in all.
  const int role = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / GROUP_THREADS, 0);
  if (role == GROUPS) {
    fewer_registers<COPY_REGISTERS>();
    if (threadIdx.x % GROUP_THREADS == 0) {
      copy_operands(ring, work, {a_tiles, rows * A_TILES, slabs, turned_a},
                    {b_tiles, ceil_div(n, TILE_M) * A_TILES, slabs, turned_b});
    }
  } else {
    more_registers<MULTIPLY_REGISTERS>();
    Place place{0, 0};
    const unsigned total = work.total();
#pragma unroll 1
    for (unsigned item = blockIdx.x; item < total; item += gridDim.x) {
      int sums[SUMS];
      multiply_tile(sums, ring, place, slabs, role);
      const TileIndex tile = work.tile(item);
      const int plane = work.plane(item), thread = threadIdx.x % GROUP_THREADS;
      const index_t row = tile.row * TILE_M + role * ROWS_OF_TILE + thread / 32 * 16 + thread % 32 / 4;
#ifdef INTEGER
      const Results results{m, n, p, d + plane * m * n, as_float != 0, n % 2 == 0};
      results.store(sums, row, tile.col * TILE_N);
#else
      store(sums, d + (plane * rows * TILE_M + row) * ldd + tile.col * TILE_N, ldd,
            moduli.modulus[plane], moduli.inverse[plane]);
#endif
    }
  }
}
