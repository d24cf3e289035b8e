// Packs float32 operands of a product for sgemm_split.cu: FP16 parts in K-major tiles.
//
//   x  rows x k            op(A), or the transpose of op(B); stored along k or along its rows,
//                          lines ld elements apart, at any address of a float32
//   tiles[R/64][S][PARTS][64][64]   the parts of common/split.cuh, R = rows rounded up to 128 and
//                          S = ceil(k / 64) slabs; zeros where x has no elements
//   exponents[R]           one e per row over all of k; 0 where a row is zero
//   flags[2]               how many elements are not finite, and how many others the parts do not
//                          carry; both are packed as 0
//   residuals              the latter: row * 2^32 + k, and x; in any order, the first CAP
//
// Unless `exact`, an operand that is refused (common/refused.cuh) needs exponents alone: blocks that
// find this out as they begin write no tiles, and count nothing any more.
//
// Element (r, c) of a tile lies at byte 128 r + (2 c ^ 16 (r % 8)): the order in which wgmma reads
// shared memory without bank conflicts, so that the product copies tiles as they are.
//
// e needs the largest |x| of the whole row before its first element can be packed. A block copies
// some tiles of a panel (64 rows) to shared memory, leaves the maxima of their rows, and waits
// until all blocks of the panel have:
//
//   block 0   | copy, find maxima | leave them | wait | write parts |
//   block 1     | copy, find maxima | leave them | wait | write parts |
//   ...                                                 ^ the last one has left its maxima
//
// So x is read once, if the blocks of a panel run at one time. Of a long k there are too many: one
// launch leaves all maxima, and another one, which reads x again, takes them. A block that has
// waited in vain, for others have the places (of another stream, where blocks may wait likewise),
// finds the maxima of its panel alone: nobody waits for ever.
//
//   memory, 64 lines         one thread: 4 x 4            shared memory, row by row
//   +----+----+- - -+----+   +--+--+--+--+ WIDE: 16       +-----------------------+  thread t reads
//   | t0 | t1 |     | t15|   |e0|e1|e2|e3| bytes of a     | k 0..7 | k 8..15 |    |  8 neighbours
//   +----+----+- - -+----+   +--+--+--+--+ line; else     +--t0----+--t1-----+- - -+  along k, and
//   | t16|                   |           | 16 elements    | t8                    |  writes 16
//        :                   +--+--+--+--+ from e to e         :                     bytes per part
//
// Cost: 4 bytes read of each element, or 8 in two launches, and 2 written per part.
//
// 2^30 elements in squares of 16384 take an H200 2.5 ms in two parts and 2.1 in one; in trials
// without waiting 2.1 and 1.55, which is the rate of a copy, and 1.0 if they are only read. In two
// launches it is 3.0 and 2.4. Slower: three blocks of 4 tiles on a multiprocessor, or four of 3
// (2.8 to 2.9 and 2.2); blocks that stay, and copy their next tiles while they write (2.8 and 2.2);
// blocks that read each other's maxima, in place of atomic operations (2.7 and 2.3); two passes
// over x in one launch, of which the second was to find a panel in L2 (3.1 and 2.6: L2 was busy for
// 90 % of it).

// What an editor, which sees this file alone, gets; see multimm/gpu/emulated/pack.py.
#ifdef __CLANGD__
#define PARTS 2
#define BLOCKS 2
#define HELD 6
#define CAP 65536
#endif
#if !defined(PARTS) || !defined(BLOCKS) || !defined(HELD) || !defined(CAP)
#error "PARTS, BLOCKS, HELD and CAP must be defined: see multimm.gpu.emulated.pack"
#endif

#include "common/index.cuh"
#include "common/pack_map.cuh"
#include "common/pack_maxima.cuh"
#include "common/pack_task.cuh"
#include "common/pack_tile.cuh"
#include "common/pack_write.cuh"
#include "common/split.cuh"

static_assert(PARTS == 1 || PARTS == 2, "the high part, or the high and the low part");

// Whether either operand of a product is refused, as far as is known.
__device__ __forceinline__ bool is_refused(const count_t* counts) {
  const volatile count_t* const now = counts;
  const count_t strange = now[0] | now[2], lost_a = now[1], lost_b = now[3];
  return strange != 0 || lost_a > CAP || lost_b > CAP;
}

template <bool ALONG_K, bool WIDE>
__device__ __forceinline__ void pack(const Operand& x, const Task& task, int stage,
                                     unsigned patience, const count_t* counts, Shared& shared) {
  constexpr bool TURNED = !ALONG_K && WIDE;
  const index_t row0 = task.panel * TILE;
  bool strange, needless = false;
  if (threadIdx.x == THREADS - 1) needless = counts && is_refused(counts);
  const unsigned most = maxima_of<ALONG_K, WIDE>(x, task, stage, patience, shared, strange);
  if (stage == LEAVE) return;
  bool plain = !strange;
  if (threadIdx.x < TILE) {
    const int exponent = row_exponent(most);
    plain &= exponent >= LEAST_PLAIN;
    shared.exponents[threadIdx.x] = exponent;
    if (task.first == 0) x.exponents[row0 + threadIdx.x] = exponent;
  }
  plain = __syncthreads_and(plain);  // all exponents and tiles are there
  if (__syncthreads_or(needless)) return;
  unsigned short* tiles =
      x.tiles + (task.panel * ceil_div(x.k, TILE) + task.first) * PARTS * TILE_ELEMENTS;
#pragma unroll 1
  for (index_t slab = task.first; slab < task.last; ++slab, tiles += PARTS * TILE_ELEMENTS) {
    float4* const tile = shared.tiles[slab - task.first];
    bool odd_one = false;
#pragma unroll
    for (int i = 0; i < TILE / ROWS_AT_ONCE; ++i) {
      const int row = threadIdx.x / VECTORS + i * ROWS_AT_ONCE, exponent = shared.exponents[row];
      bool odd = true;
      if (plain) odd = write_vector<TURNED, true>(tiles, tile, row, exponent);
      if (odd) odd = write_vector<TURNED, false>(tiles, tile, row, exponent);
      odd_one |= odd;
    }
    if (__any_sync(0xffffffffu, odd_one)) {
      look_closer<TURNED>(x, row0, slab * TILE, tile, shared.exponents);
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    split_pack(const __grid_constant__ Operands operands, int stage, unsigned patience, int exact) {
  extern __shared__ float4 memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const unsigned first = panels_of(operands.of[0]) * blocks_of(operands.of[0]);
  const bool second = blockIdx.x >= first;
  const Operand& x = operands.of[second];
  const Task task = task_of(x, blockIdx.x - (second ? first : 0), stage);
  const count_t* const counts = exact ? nullptr : operands.of[0].flags;
  if (x.along_k && x.wide) {
    pack<true, true>(x, task, stage, patience, counts, shared);
  } else if (x.along_k) {
    pack<true, false>(x, task, stage, patience, counts, shared);
  } else if (x.wide) {
    pack<false, true>(x, task, stage, patience, counts, shared);
  } else {
    pack<false, false>(x, task, stage, patience, counts, shared);
  }
}
