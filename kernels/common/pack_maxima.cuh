// The first half of split_pack.cu: tiles come to shared memory, and the maxima of rows are found.
//
// HELD is how many tiles a block has room for.
#pragma once

#include "common/async_copy.cuh"
#include "common/index.cuh"
#include "common/pack_map.cuh"
#include "common/pack_task.cuh"
#include "common/pack_tile.cuh"
#include "common/split.cuh"

// What a block keeps in shared memory.
struct Shared {
  float4 tiles[HELD][TILE_ELEMENTS / 4];
  unsigned found[THREADS / 32][TILE];
  int exponents[TILE];
};

// The larger ones of what was found before, and in a thread's piece of a tile.
template <bool ALONG_K, bool FINITE>
__device__ __forceinline__ void take_larger(unsigned (&largest)[PIECE],
                                            const float (&piece)[PIECE][PIECE]) {
#pragma unroll
  for (int i = 0; i < PIECE; ++i) {
#pragma unroll
    for (int e = 0; e < PIECE; ++e) {
      unsigned& row = largest[ALONG_K ? i : e];
      const unsigned bits = magnitude_bits(piece[i][e]);
      row = !FINITE || bits < INFINITE ? max(row, bits) : row;
    }
  }
}

// The largest of what all threads found; a row's is known to the thread of its number.
template <bool ALONG_K, bool WIDE>
__device__ __forceinline__ unsigned of_all_threads(unsigned (&largest)[PIECE], Shared& shared) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int j = 0; j < PIECE; ++j) {  // lanes that have read other parts of the same rows
#pragma unroll
    for (int other = ALONG_K ? 1 : PIECES; other < (ALONG_K ? PIECES : 32); other *= 2) {
      largest[j] = max(largest[j], __shfl_xor_sync(0xffffffffu, largest[j], other));
    }
    if (ALONG_K) {
      if (lane % PIECES == 0) shared.found[0][line_of(j)] = largest[j];
    } else {
      if (lane < PIECES) shared.found[warp][place_of<WIDE>(j)] = largest[j];
    }
  }
  __syncthreads();  // all have left theirs
  unsigned most = 0;
  if (threadIdx.x < TILE) {
#pragma unroll
    for (int w = 0; w < (ALONG_K ? 1 : THREADS / 32); ++w) {
      most = max(most, shared.found[w][threadIdx.x]);
    }
  }
  return most;
}

__device__ __forceinline__ void arrive(unsigned* at) {
  asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(at) : "memory");
}
__device__ __forceinline__ unsigned arrived_at(const unsigned* at) {
  unsigned count;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(count) : "l"(at) : "memory");
  return count;
}
__device__ __forceinline__ unsigned look(const unsigned* at) {
  unsigned word;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(word) : "l"(at) : "memory");
  return word;
}

// The largest |x| of a row among all blocks of its panel, for the thread of the row's number, which
// knows that of this block. If the others do not come, `alone` is set.
__device__ __forceinline__ unsigned of_all_blocks(const Operand& x, const Task& task,
                                                  unsigned most, int stage, unsigned patience,
                                                  bool& alone) {
  const index_t row = task.panel * TILE + threadIdx.x;
  unsigned *const maximum = x.maxima + row, *const arrived = x.arrived + row;
  if (stage == TAKE) return look(maximum);
  atomicMax(maximum, most);
  if (stage == LEAVE) return most;
  arrive(arrived);
  while (arrived_at(arrived) < task.blocks) {
    if (patience-- == 0) {
      alone = true;
      break;
    }
  }
  return look(maximum);
}

// Begin to copy a slab of a panel.
template <bool ALONG_K, bool WIDE>
__device__ __forceinline__ void copy_slab(const Operand& x, index_t row0, index_t slab,
                                          float4* tile) {
  const index_t k0 = slab * TILE;
  const int rows = clip(x.rows - row0, TILE), width = clip(x.k - k0, TILE);
  if (ALONG_K) {
    copy_piece<ALONG_K, WIDE>(tile, x.x + row0 * x.ld + k0, x.ld, rows, width);
  } else {
    copy_piece<ALONG_K, WIDE>(tile, x.x + k0 * x.ld + row0, x.ld, width, rows);
  }
}

// Look at tiles as they land, from the I-th of HELD groups of copies on.
template <bool ALONG_K, bool WIDE, int I = 0>
__device__ __forceinline__ void look_at_tiles(unsigned (&largest)[PIECE], Shared& shared,
                                              int held) {
  if constexpr (I < HELD) {
    if (I >= held) return;
    wait_copies<HELD - 1 - I>();
    float piece[PIECE][PIECE];
    take_piece<ALONG_K, WIDE>(piece, shared.tiles[I]);
    take_larger<ALONG_K, false>(largest, piece);
    look_at_tiles<ALONG_K, WIDE, I + 1>(largest, shared, held);
  }
}

// The same in some slabs, copied once more, of what is finite; the last HELD tiles stay. Hardly ever
// called, and no part of its callers: the compiler takes half the time.
struct Largest {
  unsigned of[PIECE];
};
template <bool ALONG_K, bool WIDE>
__device__ __noinline__ Largest look_again(const Operand& x, index_t row0, index_t first,
                                           index_t last, Shared& shared) {
  Largest largest = {};
#pragma unroll 1
  for (index_t slab = first; slab < last; ++slab) {
    float4* const tile = shared.tiles[(slab - first) % HELD];
    copy_slab<ALONG_K, WIDE>(x, row0, slab, tile);
    commit_copies();
    wait_copies<0>();
    float piece[PIECE][PIECE];
    take_piece<ALONG_K, WIDE>(piece, tile);
    take_larger<ALONG_K, true>(largest.of, piece);
  }
  return largest;
}

// Copy the tiles of a task, and find the bits of the largest finite |x| of its panel's rows, for the
// threads of their numbers. `strange`: not all that was copied is finite.
template <bool ALONG_K, bool WIDE>
__device__ __forceinline__ unsigned maxima_of(const Operand& x, const Task& task, int stage,
                                              unsigned patience, Shared& shared, bool& strange) {
  const index_t row0 = task.panel * TILE;
  const int held = static_cast<int>(task.last - task.first);
#pragma unroll 1
  for (int i = 0; i < HELD; ++i) {
    if (i < held) copy_slab<ALONG_K, WIDE>(x, row0, task.first + i, shared.tiles[i]);
    commit_copies();  // also of nothing: there are HELD groups
  }
  Largest largest = {};
  look_at_tiles<ALONG_K, WIDE>(largest.of, shared, held);
  bool finite = true;
#pragma unroll
  for (int j = 0; j < PIECE; ++j) finite &= largest.of[j] < INFINITE;
  strange = __syncthreads_or(!finite);
  if (strange) largest = look_again<ALONG_K, WIDE>(x, row0, task.first, task.last, shared);
  unsigned most = of_all_threads<ALONG_K, WIDE>(largest.of, shared);
  if (task.blocks == 1) return most;
  bool alone = false;
  if (threadIdx.x < TILE) most = of_all_blocks(x, task, most, stage, patience, alone);
  if (__syncthreads_or(alone)) {
    largest = look_again<ALONG_K, WIDE>(x, row0, 0, ceil_div(x.k, TILE), shared);
    most = of_all_threads<ALONG_K, WIDE>(largest.of, shared);
    look_again<ALONG_K, WIDE>(x, row0, task.first, task.last, shared);
  }
  return most;
}
