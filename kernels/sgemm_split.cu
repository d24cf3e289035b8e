// D = alpha * (2^(ea + eb) * A * B' + P) + beta * C      packed operands, float32 sums, sm_90a
//
//   A      m rows, packed: tiles[R / 64][slabs][PARTS][64][64] float16, R = m rounded up to 128
//   B      n rows, packed likewise: row j of B is column j of the product
//   ea, eb R exponents each, one per row; they lie in -163 ... 113
//   P      m x n   rows ldp apart; null: no partial result to go on from
//   C      m x n   rows ldc apart; null: beta is taken as 0
//   D      m x n   rows ldd apart; overlaps no operand
//
// A slab is 64 k. A tile is 64 rows of one slab, 8192 bytes in the layout that the tensor cores
// read (common/wgmma.cuh); rows and k beyond the operand's are 0. Of two parts the first is the
// high one, the second the low one times 2^11:
//
//   x = (hi + lo * 2^-11) * 2^e          A * B' = hi hi' + 2^-11 (hi lo' + lo hi')
//
// As in BLAS, beta == 0 never reads C and alpha == 0 never reads A, B or P. Sizes and offsets are
// 64-bit. With slab_step > 0 the work is cut into slices of so many slabs: slice i goes, as a
// product of its own, to D + i * stride_d. Where an operand is refused (common/refused.cuh) nothing is
// computed. With LOWER defined, D is square, and its tiles above the diagonal are left as they are.
//
// Tensor cores round every sum towards zero. That is a bias and would add up over all of k, so a
// sum at full weight lives in them for 32 k only, and is then added to FP32 registers, to nearest:
//
//   every half slab  fresh = hi hi'      one third of the work         total += fresh
//                    small += lo hi'     one third                     (at weight 2^-11 the bias of
//                    small += hi lo'     one third                     FOLD slabs is harmless)
//   every FOLD       total += 2^-11 small
//   every FLUSH      total is laid down in D, and the next one is added to it: the roundings of a
//                    long chain of additions, too, add up
//
// While the tensor cores are busy with `small` of a half, the warps add its `fresh` to `total`:
//
//   tensor cores   | hi hi' | lo hi'  hi lo' | hi hi' | lo hi'  hi lo' |
//   FP32 adders             | total += fresh |        | total += fresh |
//
// With PARTS == 1 (tf32) there is one product. Its sums fill the registers: for a second set there
// is no room, but for one of half the width there is. Every PROMOTE slabs what was put aside is
// added to the sums; they are rounded to bfloat16, that is put aside, two in a register, and the
// difference, which is exact and 2^-8 of a sum at most, is what the tensor cores go on with:
//
//   every PROMOTE    total += aside;  aside = bfloat16(total);  total -= aside
//
// So truncation adds up over PROMOTE slabs only, to 0.1 u of the sum per k where all products have
// one sign, however long k is. The tensor cores wait 1400 clocks for it, a slab's time and more.
//
// With BROAD defined, operands are numbers of a wide range (common/broad.cuh, broad_pack.cu). With
// PARTS == 3 they are bfloat16: high, middle and low. Six products are made; the other three are
// below 2^-24. Five of them are small, and are summed at their own weight:
//
//   every half slab  fresh = hi hi'     small += mi hi' + hi mi' + mi mi' + lo hi' + hi lo'
//   every FOLD       total += small
//
// Nothing is laid down in D on the way: that holds the product of the stretch of k before, as P.
//
// With PARTS == 1 they are TF32: a slab is 32 k, and takes as long as 64 of FP16.
//
// With INTEGER defined, and PARTS == 1, operands are integers as FP16 numbers (integer_pack.cu),
// without exponents, and D = A * B' + P is of int32, modulo 2^32; or of float32 if `as_float`,
// rounded once. What the tensor cores have summed is added to integers every `promote` slabs, so
// few that no sum can leave those that float32 holds (common/split_integer.cuh):
//
//   every promote    sums += total;  total = 0
//
// One thread block per multiprocessor computes tiles of 128 x TILE_N, one after the other. One
// thread copies whole tiles of the operands through a ring of SLOTS slots in shared memory; two
// warpgroups multiply, each its 64 rows by the same TILE_N columns. A slot has one part of a slab:
//
//            TILE_N            slot:  A rows 0-63 | A rows 64-127 | B rows 0-63 | B rows 64-127 ..
//        +------------+
//     64 | warpgroup 0|        global --(bulk copies)--> slot --> tensor cores
//        +------------+        full:  all bytes of a slot have landed
//     64 | warpgroup 1|        empty: all warps have read it
//        +------------+
//
// Copies run ahead into the next tile of D while this one is stored.
//
// Cost per slab and block, TILE_N 128, PARTS 2: 1536 clocks of the tensor cores, 64 KB from L2,
// 144 KB read from shared memory, 128 additions per thread.
//
// On an H200, 700 W are what ends it: 190 TFLOP/s at 8192, sustained, at 1440 MHz (recorded; 214
// at 1380 MHz in a trial). In one launch, before the clock is lowered, the tensor cores are 93 %
// busy. Slower there: clusters of two thread blocks that share B by multicast (0 to -2 %); one sum
// for all three products, small ones first, scaled by 2^-11 in between, with tiles of 128 x 192
// (-5 %); starting the second warpgroup one or two slabs after the first (0 to -1 %); 5 slots (-2
// %); rows of tiles in bands of 32 (-4 %). No faster: adding `fresh` every 64 k.
//
// tf32, 8192 and 16384, operands packed before: 655 and 667 TFLOP/s with all of k in the tensor
// cores; 610 and 624 with PROMOTE 16, 589 and 581 with 8. Other ways to a second sum were slower:
// laying sums down in D every 2048 k (-36 and -41 %; by reductions in L2 -27 and -22 %); halves of
// TILE_N in turns, each into a sum of its own every 128 k (-18 and -23 %).

// What SplitConfig.defines() sets; an editor, which sees this file alone, gets "wide".
#ifdef __CLANGD__
#define PARTS 2
#define TILE_N 128
#define SLOTS 6
#define BAND 8
#define CAP 1024
#endif
#if !defined(PARTS) || !defined(TILE_N) || !defined(SLOTS) || !defined(BAND) || !defined(CAP)
#error "PARTS, TILE_N, SLOTS, BAND and CAP must be defined: see SplitConfig.defines()"
#endif

#include "common/index.cuh"
#include "common/refused.cuh"
#include "common/slot_ring.cuh"
#include "common/split_aside.cuh"
#include "common/split_finish.cuh"
#include "common/split_integer.cuh"
#include "common/split_tiles.cuh"
#include "common/wgmma.cuh"

constexpr int GROUPS = 2, GROUP_THREADS = 128;  // warpgroups that multiply; one more copies
constexpr int THREADS = (1 + GROUPS) * GROUP_THREADS;
constexpr int COPY_REGISTERS = 40, MULTIPLY_REGISTERS = 232;
constexpr int SLOT_BYTES = (A_TILES + B_TILES) * TILE_BYTES;
constexpr int SUMS = TILE_N / 2;  // of a thread: 64 x TILE_N by 128 threads

static_assert(GROUPS * TILE_ROWS == TILE_M, "a warpgroup multiplies a packed tile's rows");
static_assert(SLOTS >= 2 * PARTS, "a slab is copied while another one is multiplied");
static_assert((COPY_REGISTERS + GROUPS * MULTIPLY_REGISTERS) * GROUP_THREADS <= 65536,
              "registers of a multiprocessor");

using Place = RingPlace<SLOTS>;
using Ring = SlotRing<SLOTS, SLOT_BYTES>;

// One thread copies all that its block multiplies.
__device__ __forceinline__ void copy_operands(const Ring& ring, const Work& work, const Packed& a,
                                              const Packed& b) {
  Place place{0, 1};  // the first round finds empty slots
  for (unsigned item = blockIdx.x; item < work.count(); item += gridDim.x) {
    const TileIndex tile = work.tile(item);
    const index_t first = work.first_slab(item);
    const char* from[A_TILES + B_TILES];
#pragma unroll
    for (int i = 0; i < A_TILES + B_TILES; ++i) {
      from[i] = i < A_TILES ? a.at(tile.row * A_TILES + i, first)
                           : b.at(tile.col * B_TILES + i - A_TILES, first);
    }
#pragma unroll 1
    for (index_t left = work.slab_count(item); left > 0; --left) {
#pragma unroll
      for (int part = 0; part < PARTS; ++part, place.next()) {
        const shared_t full = ring.full_at(place.slot);
        barrier_wait(ring.empty_at(place.slot), place.parity);
        barrier_expect(full, SLOT_BYTES);
#pragma unroll
        for (int i = 0; i < A_TILES + B_TILES; ++i) {
          copy_bulk(ring.slot(place.slot) + i * TILE_BYTES, from[i] + part * TILE_BYTES,
                    TILE_BYTES, full);
        }
      }
#pragma unroll
      for (int i = 0; i < A_TILES + B_TILES; ++i) from[i] += PARTS * TILE_BYTES;
    }
  }
}

struct Slot {
  factor_t a, b;
};

// Wait for a slot, and describe this warpgroup's rows of A, and B.
__device__ __forceinline__ Slot landed(const Ring& ring, const Place& place, int group) {
  barrier_wait(ring.full_at(place.slot), place.parity);
  const shared_t slot = ring.slot(place.slot);
  return {factor_at(slot + group * TILE_BYTES), factor_at(slot + A_TILES * TILE_BYTES)};
}

// This warp has read what lies in a slot and those after it, one for each part.
__device__ __forceinline__ void release(const Ring& ring, int slot) {
  if (threadIdx.x % 32 == 0) {
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
      const int at = slot + part;
      barrier_arrive(ring.empty_at(at < SLOTS ? at : at - SLOTS));
    }
  }
}

#if PARTS == 1
// total += A * B' of `count` slabs.
__device__ __forceinline__ void multiply_slabs(float (&total)[SUMS], const Ring& ring,
                                               Place& place, int count, int group) {
  int reading = 0;
#pragma unroll 1
  for (int i = 0; i < count; ++i) {
    const Slot slot = landed(ring, place, group);
    products_fence();
#pragma unroll
    for (int s = 0; s < SLAB / 16; ++s) {
      multiply(total, slot.a + s * NEXT_16_K, slot.b + s * NEXT_16_K, true);
    }
    products_commit();
    products_wait<1>();  // the slab before has been read
    if (i > 0) release(ring, reading);
    reading = place.slot;
    place.next();
  }
  products_wait<0>();
  release(ring, reading);
}

#else
// total += A * B' of `count` slabs, at most FOLD. Halves of a slab are turns of one loop: unrolled,
// the compiler would take more registers than there are for a second `fresh`.
__device__ __forceinline__ void multiply_slabs(float (&total)[SUMS], const Ring& ring,
                                               Place& place, int count, int group) {
  constexpr int STEPS = SLAB / 16 / 2;  // of 16 k, in a half
  constexpr float SMALL_UNIT = PARTS == 2 ? 1.0f / 2048 : 1.0f;
  float fresh[SUMS], small[SUMS];
  int reading = 0;
#pragma unroll 1
  for (int i = 0; i < 2 * count; ++i) {
    const bool second = i % 2 == 1;
    const factor_t at = second ? STEPS * NEXT_16_K : 0;
    Place lo_place = place;
    lo_place.next();
    const Slot hi = landed(ring, place, group);
    products_fence();
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
      multiply(fresh, hi.a + at + s * NEXT_16_K, hi.b + at + s * NEXT_16_K, s > 0);
    }
    products_commit();
    const Slot lo = landed(ring, lo_place, group);
    products_fence();
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
      const factor_t k = at + s * NEXT_16_K;
      multiply(small, lo.a + k, hi.b + k, i > 0 || s > 0);
      multiply(small, hi.a + k, lo.b + k, true);
#if PARTS == 3
      multiply(small, lo.a + k, lo.b + k, true);
#endif
    }
#if PARTS == 3
    Place last_place = lo_place;
    last_place.next();
    const Slot last = landed(ring, last_place, group);
    products_fence();
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
      const factor_t k = at + s * NEXT_16_K;
      multiply(small, last.a + k, hi.b + k, true);
      multiply(small, hi.a + k, last.b + k, true);
    }
#endif
    products_commit();
    products_wait<1>();  // `fresh` is there, and what came before has been read
    if (!second && i > 0) release(ring, reading);
    if (second) {
      reading = place.slot;
#if PARTS == 3
      place = last_place;
#else
      place = lo_place;
#endif
      place.next();
    }
#pragma unroll
    for (int j = 0; j < SUMS; ++j) total[j] += fresh[j];
  }
  products_wait<0>();
  release(ring, reading);
#pragma unroll
  for (int j = 0; j < SUMS; ++j) total[j] = fmaf(small[j], SMALL_UNIT, total[j]);
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    sgemm_split(index_t m, index_t n, index_t slabs, index_t slab_step, float alpha, float beta,
                const char* __restrict__ a_tiles, const int* __restrict__ ea,
                const char* __restrict__ b_tiles, const int* __restrict__ eb,
                const float* __restrict__ c, index_t ldc, const sum_t* __restrict__ p, index_t ldp,
                sum_t* __restrict__ d, index_t ldd, index_t stride_d,
                const unsigned long long* __restrict__ counts
#ifdef INTEGER
                , index_t promote, int as_float
#endif
    ) {
#ifdef BROAD
  if (way_of(counts, CAP) != BROAD_RANGE) return;
#else
  if (way_of(counts, CAP) != CARRIED) return;
#endif
  extern __shared__ char memory[];
  const Ring ring(memory);
  if (threadIdx.x == 0) ring.begin(GROUPS * (GROUP_THREADS / 32));
  __syncthreads();  // all find barriers that work

  if (beta == 0.0f) c = nullptr;
  if (alpha == 0.0f) p = nullptr;
  const Work work = work_of(m, n, slabs, slab_step, alpha);
  // From one lane, so that the compiler knows it is the same in all.
  const int role = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / GROUP_THREADS, 0);
  if (role == GROUPS) {
    fewer_registers<COPY_REGISTERS>();
    if (threadIdx.x % GROUP_THREADS == 0) {
      copy_operands(ring, work, packed_of(a_tiles, m, slabs), packed_of(b_tiles, n, slabs));
    }
  } else {
    more_registers<MULTIPLY_REGISTERS>();
    const auto finish_of = [&](unsigned item) {
      // Computed where it is used: in the loops there are no registers to keep it in.
      asm volatile("" : "+r"(item));
      const TileIndex tile = work.tile(item);
      const int thread = threadIdx.x % GROUP_THREADS;
      const index_t row =
          tile.row * TILE_M + role * TILE_ROWS + thread / 32 * 16 + thread % 32 / 4;
      const index_t col = tile.col * TILE_N + thread % 4 * 2;
#ifdef INTEGER
      return FinishIntegers<SUMS>{p ? p + row * ldp + col : nullptr,
                                  d + work.slice(item) * stride_d + row * ldd + col,
                                  ldp,
                                  ldd,
                                  clip(m - row, TILE_M),
                                  clip(n - col, TILE_N),
                                  as_float != 0};
#else
      const bool read = alpha != 0.0f;
      return Finish<SUMS>{read ? ea + row : nullptr,
                          read ? eb + col : nullptr,
                          c ? c + row * ldc + col : nullptr,
                          p ? p + row * ldp + col : nullptr,
                          d + work.slice(item) * stride_d + row * ldd + col,
                          ldc,
                          ldp,
                          ldd,
                          clip(m - row, TILE_M),
                          clip(n - col, TILE_N),
                          alpha,
                          beta};
#endif
    };
    Place place{0, 0};
#pragma unroll 1
    for (unsigned item = blockIdx.x; item < work.count(); item += gridDim.x) {
      float total[SUMS] = {};
#ifdef INTEGER
      int sums[SUMS] = {};
#pragma unroll 1
      for (index_t left = work.slab_count(item); left > 0; left -= promote) {
        multiply_slabs(total, ring, place, static_cast<int>(left < promote ? left : promote), role);
        take_integers(sums, total);
      }
      finish_of(item).store(sums);
#else
#if PARTS == 1
      unsigned aside[SUMS / 2] = {};
#pragma unroll 1
      for (index_t left = work.slab_count(item); left > 0; left -= PROMOTE) {
        multiply_slabs(total, ring, place, clip(left, PROMOTE), role);
        take_back(total, aside);
        if (left > PROMOTE) put_aside(total, aside);
      }
#else
      bool kept = false;
#pragma unroll 1
      for (index_t left = work.slab_count(item); left > 0; left -= FLUSH) {
        if (kept) {
#pragma unroll
          for (int i = 0; i < SUMS; ++i) total[i] = 0.0f;
        }
        const int count = clip(left, FLUSH);
#pragma unroll 1
        for (int done = 0; done < count; done += FOLD) {
          multiply_slabs(total, ring, place, clip(count - done, FOLD), role);
        }
        if (kept) finish_of(item).add_kept(total);
        kept = left > FLUSH;
        if (kept) finish_of(item).keep(total);
      }
#endif
      if (p || c) {
        finish_of(item).store<false>(total);
      } else {
        finish_of(item).store<true>(total);
      }
#endif
    }
  }
}
