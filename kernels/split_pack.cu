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
// Element (r, c) of a tile lies at byte 128 r + (2 c ^ 16 (r % 8)): the order in which wgmma reads
// shared memory without bank conflicts, so that the product copies tiles as they are.
//
// e needs the largest |x| of the whole row before its first element can be packed: x is read
// twice, panel by panel (64 rows), the second time from L2. One launch does both, for one operand
// or two: common/two_passes.cuh has how.
//
//   memory, 64 lines         one thread: 4 x 4            shared memory, row by row
//   +----+----+- - -+----+   +--+--+--+--+ WIDE: 16       +-----------------------+  thread t reads
//   | t0 | t1 |     | t15|   |e0|e1|e2|e3| bytes of a     | k 0..7 | k 8..15 |    |  8 neighbours
//   +----+----+- - -+----+   +--+--+--+--+ line; else     +--t0----+--t1-----+- - -+  along k, and
//   | t16|                   |           | 16 elements    | t8                    |  writes 16
//        :                   +--+--+--+--+ from e to e         :                     bytes per part
//
// Cost: 4 bytes of each element from memory, 4 again from L2, 2 written per part.

// What an editor, which sees this file alone, gets; see multimm/gpu/packing.py.
#ifdef __CLANGD__
#define PARTS 2
#define BLOCKS 4
#define CAP 65536
#endif
#if !defined(PARTS) || !defined(BLOCKS) || !defined(CAP)
#error "PARTS, BLOCKS and CAP must be defined: see multimm.gpu.packing"
#endif

#include "common/index.cuh"
#include "common/pack_map.cuh"
#include "common/pack_tile.cuh"
#include "common/split.cuh"
#include "common/two_passes.cuh"

static_assert(PARTS == 1 || PARTS == 2, "the high part, or the high and the low part");

typedef unsigned long long count_t;

struct Operand {  // members of 8 bytes each
  const float* x;
  index_t ld, rows, k;
  index_t along_k;    // whether neighbours in memory are neighbours along k
  index_t wide;       // whether every line begins at a multiple of 16 bytes
  index_t span, run;  // slabs in which one block finds maxima, and that one block packs
  index_t ahead;      // panels whose maxima are found before the first is packed; at most all
  unsigned short* tiles;
  int* exponents;
  unsigned* maxima;  // panels x spans x 64: the bits of the largest finite |x|, plus 1
  count_t* flags;    // both zero before the launch
  count_t* residual_at;
  float* residuals;
};

struct Operands {
  Operand of[2];
};

__device__ __forceinline__ Cut cut_of(const Operand& x) {
  const index_t slabs = ceil_div(x.k, TILE);
  return {static_cast<unsigned>(ceil_div(x.rows, 2 * TILE)) * 2,
          static_cast<unsigned>(ceil_div(slabs, x.span)),
          static_cast<unsigned>(ceil_div(slabs, x.run)), static_cast<unsigned>(x.ahead)};
}

__device__ __forceinline__ unsigned* maxima_of(const Operand& x, const Cut& cut, index_t panel) {
  return x.maxima + panel * cut.spans * TILE;
}

// Loads from the tile of a panel and a slab, of whose rows and k so many exist.
template <bool ALONG_K, bool WIDE, bool LAST>
__device__ __forceinline__ void load_tile(float (&piece)[PIECE][PIECE], const Operand& x,
                                          index_t row0, index_t k0) {
  const int rows = clip(x.rows - row0, TILE), width = clip(x.k - k0, TILE);
  if (ALONG_K) {
    load_piece<WIDE, LAST>(piece, x.x + row0 * x.ld + k0, x.ld, rows, width);
  } else {
    load_piece<WIDE, LAST>(piece, x.x + k0 * x.ld + row0, x.ld, width, rows);
  }
}

// The largest of what all threads found, by row of the panel, into `maxima`.
template <bool ALONG_K, bool WIDE>
__device__ __forceinline__ void leave_maxima(unsigned* maxima, unsigned (&largest)[PIECE],
                                             unsigned* shared) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int j = 0; j < PIECE; ++j) {  // lanes that have read other parts of the same rows
#pragma unroll
    for (int other = ALONG_K ? 1 : PIECES; other < (ALONG_K ? PIECES : 32); other *= 2) {
      largest[j] = max(largest[j], __shfl_xor_sync(0xffffffffu, largest[j], other));
    }
    if (ALONG_K) {
      if (lane % PIECES == 0) leave(maxima + line_of(j), largest[j] + 1);
    } else {
      if (lane < PIECES) shared[warp * TILE + place_of<WIDE>(j)] = largest[j];
    }
  }
  if (ALONG_K) return;
  __syncthreads();  // all warps have left theirs
  if (threadIdx.x >= TILE) return;
  unsigned most = 0;
#pragma unroll
  for (int w = 0; w < THREADS / 32; ++w) most = max(most, shared[w * TILE + threadIdx.x]);
  leave(maxima + threadIdx.x, most + 1);
}

// The largest finite |x| of the rows of a panel over the slabs of a span.
template <bool ALONG_K, bool WIDE>
__device__ __forceinline__ void find_maxima(const Operand& x, const Cut& cut, const Task& task,
                                            unsigned* shared) {
  const index_t row0 = static_cast<index_t>(task.panel) * TILE;
  unsigned largest[PIECE] = {};  // of as many rows
  const index_t first = task.part * x.span, last = min(first + x.span, ceil_div(x.k, TILE));
#pragma unroll 1
  for (index_t slab = first; slab < last; ++slab) {
    float piece[PIECE][PIECE];
    load_tile<ALONG_K, WIDE, false>(piece, x, row0, slab * TILE);
#pragma unroll
    for (int i = 0; i < PIECE; ++i) {
#pragma unroll
      for (int e = 0; e < PIECE; ++e) {
        unsigned& row = largest[ALONG_K ? i : e];
        const unsigned bits = magnitude_bits(piece[i][e]);
        row = bits < INFINITE ? max(row, bits) : row;
      }
    }
  }
  leave_maxima<ALONG_K, WIDE>(maxima_of(x, cut, task.panel) + task.part * TILE, largest, shared);
}

// What some of the spans have found for a row of the panel, once they have: a quarter of the
// threads looks at every fourth span.
__device__ __forceinline__ unsigned wait_for_maxima(const unsigned* maxima, unsigned spans) {
  maxima += threadIdx.x % TILE;
  unsigned most;
  bool all;
  do {
    most = 1, all = true;
#pragma unroll 4
    for (unsigned span = threadIdx.x / TILE; span < spans; span += THREADS / TILE) {
      const unsigned found = look(maxima + span * TILE);
      most = max(most, found);
      all &= found != 0;
    }
  } while (!all);
  return most - 1;
}

__device__ __forceinline__ int exponent_of(const unsigned (*found)[TILE], int row) {
  unsigned most = found[0][row];
#pragma unroll
  for (int i = 1; i < THREADS / TILE; ++i) most = max(most, found[i][row]);
  return row_exponent(most);
}

// Whether the parts lose a finite element of the tile; its value is returned in `value`.
__device__ __forceinline__ bool loses(float4* tile, const unsigned (*found)[TILE], int row, int k,
                                      float& value) {
  value = at(tile, row, k);
  const float y = scaled(value, power_of_two(-exponent_of(found, row)));
  return value != 0.0f && magnitude_bits(value) < INFINITE && !is_carried(value, y);
}

// What a warp has written of a tile, once more and element by element: counts what is not finite
// and what is lost, and lists the latter. Few warps of few launches come here.
__device__ __forceinline__ void look_closer(const Operand& x, index_t row0, index_t k0,
                                            float4* tile, const unsigned (*found)[TILE]) {
  const int lane = threadIdx.x % 32, first_row = threadIdx.x / VECTORS;
  const int first_k = threadIdx.x % VECTORS * VECTOR;
  unsigned strange = 0, lost = 0;
  float value;
#pragma unroll 1
  for (int i = 0; i < WRITTEN; ++i) {
    const int row = first_row + i / VECTOR * ROWS_AT_ONCE;
    lost += loses(tile, found, row, first_k + i % VECTOR, value);
    strange += magnitude_bits(value) >= INFINITE;
  }
  unsigned lost_so_far = lost;  // by this lane and those before it
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const unsigned before = __shfl_up_sync(0xffffffffu, lost_so_far, step);
    lost_so_far += lane >= step ? before : 0;
    strange += __shfl_xor_sync(0xffffffffu, strange, step);
  }
  count_t place = 0;
  if (lane == 31) {
    if (strange != 0) atomicAdd(x.flags, static_cast<count_t>(strange));
    if (lost_so_far != 0) place = atomicAdd(x.flags + 1, static_cast<count_t>(lost_so_far));
  }
  place = __shfl_sync(0xffffffffu, place, 31) + (lost_so_far - lost);
#pragma unroll 1
  for (int i = 0; lost != 0 && i < WRITTEN; ++i) {
    const int row = first_row + i / VECTOR * ROWS_AT_ONCE, k = first_k + i % VECTOR;
    if (!loses(tile, found, row, k, value) || place >= CAP) continue;
    x.residual_at[place] = static_cast<count_t>(row0 + row) << 32 | static_cast<count_t>(k0 + k);
    x.residuals[place++] = value;
  }
}

// 8 neighbours along k of a row, as 16 bytes of each part. Returns whether one of them is not
// finite, or lost.
__device__ __forceinline__ bool write_vector(unsigned short* tiles, const float4* tile, int row,
                                             int exponent) {
  const int vector = threadIdx.x % VECTORS;
  const float4 even = tile[shared_place(row, 2 * vector)];
  const float4 odd = tile[shared_place(row, 2 * vector + 1)];
  const float given[VECTOR] = {even.x, even.y, even.z, even.w, odd.x, odd.y, odd.z, odd.w};
  const Power down = power_of_two(-exponent);
  float y[VECTOR];
  unsigned high[VECTOR / 2], low[VECTOR / 2];
  bool odd_one = false;
#pragma unroll
  for (int e = 0; e < VECTOR; ++e) {
    y[e] = scaled(given[e], down);
    const bool carried = is_carried(given[e], y[e]);
    odd_one |= !carried && given[e] != 0.0f;
    y[e] = carried ? y[e] : 0.0f;
  }
#pragma unroll
  for (int p = 0; p < VECTOR / 2; ++p) {
    high[p] = halves(y[2 * p], y[2 * p + 1]);
    low[p] = halves((y[2 * p] - value_of(high[p])) / LOW_UNIT,
                    (y[2 * p + 1] - value_of(high[p] >> 16)) / LOW_UNIT);
  }
  unsigned short* const to = tiles + swizzled(row, vector);
  __stcs(reinterpret_cast<uint4*>(to), make_uint4(high[0], high[1], high[2], high[3]));
  if (PARTS == 2) {
    __stcs(reinterpret_cast<uint4*>(to + TILE_ELEMENTS),
           make_uint4(low[0], low[1], low[2], low[3]));
  }
  return odd_one;
}

// What a block keeps in shared memory.
struct Shared {
  float4 tiles[2][TILE_ELEMENTS / 4];
  unsigned found[THREADS / TILE][TILE];
  unsigned ticket;
};

// The tiles of a run, one after the other. The next one is on its way while one is written.
template <bool ALONG_K, bool WIDE>
__device__ __forceinline__ void pack_run(const Operand& x, const Cut& cut, const Task& task,
                                         Shared& shared) {
  const index_t row0 = static_cast<index_t>(task.panel) * TILE, slabs = ceil_div(x.k, TILE);
  const index_t first = task.part * x.run, last = min(first + x.run, slabs);
  unsigned short* tiles = x.tiles + (task.panel * slabs + first) * PARTS * TILE_ELEMENTS;
  int exponents[TILE / ROWS_AT_ONCE] = {};
  float piece[PIECE][PIECE];
  load_tile<ALONG_K, WIDE, true>(piece, x, row0, first * TILE);
  (&shared.found[0][0])[threadIdx.x] =
      wait_for_maxima(maxima_of(x, cut, task.panel), cut.spans);
  for (index_t slab = first; slab < last; ++slab, tiles += PARTS * TILE_ELEMENTS) {
    float4* const tile = shared.tiles[(slab - first) % 2];
    put_piece<ALONG_K, WIDE>(tile, piece);
    __syncthreads();  // the tile, and before the first one all maxima, are there
    if (slab + 1 < last) load_tile<ALONG_K, WIDE, true>(piece, x, row0, (slab + 1) * TILE);
    bool odd_one = false;
#pragma unroll
    for (int i = 0; i < TILE / ROWS_AT_ONCE; ++i) {
      const int row = threadIdx.x / VECTORS + i * ROWS_AT_ONCE;
      if (slab == first) exponents[i] = exponent_of(shared.found, row);
      odd_one |= write_vector(tiles, tile, row, exponents[i]);
    }
    if (__any_sync(0xffffffffu, odd_one)) look_closer(x, row0, slab * TILE, tile, shared.found);
  }
  if (task.part == 0 && threadIdx.x < TILE) {
    x.exponents[row0 + threadIdx.x] = exponent_of(shared.found, threadIdx.x);
  }
}

template <bool ALONG_K, bool WIDE>
__device__ __forceinline__ void do_task(const Operand& x, const Cut& cut, const Task& task,
                                        Shared& shared) {
  if (task.second) {
    pack_run<ALONG_K, WIDE>(x, cut, task, shared);
  } else {
    find_maxima<ALONG_K, WIDE>(x, cut, task, reinterpret_cast<unsigned*>(shared.tiles));
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    split_pack(const __grid_constant__ Operands operands, unsigned* tickets) {
  __shared__ Shared shared;
  if (threadIdx.x == 0) shared.ticket = atomicAdd(tickets, 1u);
  __syncthreads();  // the ticket is there
  unsigned ticket = shared.ticket;
  const unsigned first = tasks_of(cut_of(operands.of[0]));
  const bool second = ticket >= first;
  if (second) ticket -= first;
  const Operand& x = operands.of[second];
  const Cut cut = cut_of(x);
  const Task task = task_of(ticket, cut);
  if (x.along_k && x.wide) {
    do_task<true, true>(x, cut, task, shared);
  } else if (x.along_k) {
    do_task<true, false>(x, cut, task, shared);
  } else if (x.wide) {
    do_task<false, true>(x, cut, task, shared);
  } else {
    do_task<false, false>(x, cut, task, shared);
  }
}
