// Packs both float32 operands of a product for sgemm_split.cu with BROAD: numbers of a wide range.
//
//   x  rows x k            op(A), or the transpose of op(B); stored along k or along its rows,
//                          lines ld elements apart, at any address of a float32
//   exponents[R]           of each row over all of k, what split_pack.cu has left; R = rows rounded
//                          up to 128
//   tiles[R/64][S][64 rows][...]  what common/broad.cuh says, S = ceil(k / 64); zeros where x has no
//                          elements. PARTS 3: high, middle, low, each [64][64] bfloat16. PARTS 1:
//                          two tiles [64][32] of TF32 in 4 bytes, the second one of the last 32 k
//   counts                 see common/refused.cuh: nothing is done where the FP16 parts of
//                          split_pack.cu carry both operands, or one is not finite
//
// A row of a tile has 128 bytes; 16-byte piece p of row r lies where piece p ^ (r % 8) would, the
// order in which wgmma reads shared memory without bank conflicts.
//
// A thread block packs one tile of 64 x 64 elements after the other. Each lands in shared memory,
// where rows lie along k whatever the order in memory (common/pack_map.cuh). A thread then writes
// 16 bytes at a time, and its neighbours the rest of a row: threads that write 32 bytes in two
// turns pack TF32 at 2.4 TB/s, where three parts are packed at 2.9 (H100, both operands of 8192).
//
// There are as many blocks as run at one time, BLOCKS on each multiprocessor: mostly there is
// nothing to do, and a block for each tile would take its time to find that out.
//
// Cost: 4 bytes read of each element, 6 written (PARTS 3) or 4 (PARTS 1).

// What an editor, which sees this file alone, gets; see multimm/gpu/emulated/broad.py.
#ifdef __CLANGD__
#define PARTS 3
#define BLOCKS 5
#define CAP 1024
#endif
#if !defined(PARTS) || !defined(BLOCKS) || !defined(CAP)
#error "PARTS, BLOCKS and CAP must be defined: see multimm.gpu.emulated.broad"
#endif

#include "common/broad.cuh"
#include "common/index.cuh"
#include "common/pack_map.cuh"
#include "common/pack_tile.cuh"
#include "common/refused.cuh"
#include "common/split.cuh"

static_assert(PARTS == 1 || PARTS == 3, "TF32, or three parts of bfloat16");

constexpr int ROW_BYTES = 128, PIECE_BYTES = 16, TILE_BYTES = TILE * ROW_BYTES;
constexpr int SLAB_TILES = PARTS == 3 ? 3 : 2;  // of 128 bytes a row, that 64 k take
constexpr int RUN = PARTS == 3 ? 8 : 4;         // neighbours along k in 16 bytes
constexpr int RUNS = TILE / RUN;                // threads that write a row
constexpr int ROWS_PER_TURN = THREADS / RUNS;

struct Operand {  // members of 8 bytes each
  const float* x;
  index_t ld, rows, k;
  index_t along_k;  // whether neighbours in memory are neighbours along k
  index_t wide;     // whether every line begins at a multiple of 16 bytes
  char* tiles;
  const int* exponents;
};

struct Operands {
  Operand of[2];
};

// Two bfloat16 numbers in a register, the first in its lower half; what they leave goes on.
__device__ __forceinline__ unsigned take_pair(float& first, float& second) {
  unsigned both;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(second), "f"(first));
  first -= __uint_as_float(both << 16);
  second -= __uint_as_float(both & 0xffff0000u);
  return both;
}

// The nearest TF32 number, as a float32; of two the larger one.
__device__ __forceinline__ unsigned tf32(float y) {
  return (__float_as_uint(y) + 0x1000u) & ~0x1fffu;
}

__device__ __forceinline__ void put(char* tile, int row, int piece, uint4 bytes) {
  __stcs(reinterpret_cast<uint4*>(tile + row * ROW_BYTES + (piece ^ (row & 7)) * PIECE_BYTES),
         bytes);
}

// Neighbours along k of a row, the run-th ones, scaled.
__device__ __forceinline__ void write(char* tiles, int row, int run, float (&y)[RUN]) {
  if constexpr (PARTS == 3) {
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
      unsigned pairs[RUN / 2];
#pragma unroll
      for (int p = 0; p < RUN / 2; ++p) pairs[p] = take_pair(y[2 * p], y[2 * p + 1]);
      put(tiles + part * TILE_BYTES, row, run, {pairs[0], pairs[1], pairs[2], pairs[3]});
    }
  } else {
    const uint4 four{tf32(y[0]), tf32(y[1]), tf32(y[2]), tf32(y[3])};
    put(tiles + run / 8 * TILE_BYTES, row, run % 8, four);
  }
}

// Returns whether an element that this thread has written is not carried; or not finite, for
// split_pack.cu has not looked at all of them. Such are packed as 0. Not inlined: the compiler
// would compute the places of all four kinds ahead of their loops, and run out of registers.
template <bool ALONG_K, bool WIDE>
__device__ __noinline__ bool pack(const Operand& x, index_t panel, index_t slab, char* tiles,
                                  float4* tile) {
  constexpr bool TURNED = !ALONG_K && WIDE;
  const index_t row0 = panel * TILE, k0 = slab * TILE;
  const int rows = clip(x.rows - row0, TILE), width = clip(x.k - k0, TILE);
  if (ALONG_K) {
    copy_piece<ALONG_K, WIDE>(tile, x.x + row0 * x.ld + k0, x.ld, rows, width);
  } else {
    copy_piece<ALONG_K, WIDE>(tile, x.x + k0 * x.ld + row0, x.ld, width, rows);
  }
  commit_copies();
  wait_copies<0>();
  if (TURNED) {
    float piece[PIECE][PIECE];
    take_piece<ALONG_K, WIDE>(piece, tile);
  }
  __syncthreads();  // all have copied theirs, and turned it
  const int run = threadIdx.x % RUNS;
  bool lost = false;
#pragma unroll
  for (int i = 0; i < TILE / ROWS_PER_TURN; ++i) {
    const int row = threadIdx.x / RUNS + i * ROWS_PER_TURN;
    const Power down = power_of_two(BROAD_SHIFT - x.exponents[row0 + row]);
    float y[RUN];
#pragma unroll
    for (int four = 0; four < RUN / 4; ++four) {
      const float4 found = tile[place_of_four<TURNED>(row, run * (RUN / 4) + four)];
      const float given[4] = {found.x, found.y, found.z, found.w};
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float value = scaled(given[e], down);
        const bool carried = fabsf(value) >= LEAST_BROAD && magnitude_bits(given[e]) < INFINITE;
        lost |= !carried && given[e] != 0.0f;
        y[four * 4 + e] = carried ? value : 0.0f;
      }
    }
    write(tiles, row, run, y);
  }
  return lost;
}

// All tiles of an operand, of which this block begins with the task-th, and goes on with every
// gridDim-th; `task` becomes its first one of the next operand. As `pack`.
template <bool ALONG_K, bool WIDE>
__device__ __forceinline__ bool pack_operand(const Operand& x, unsigned& task, float4* tile) {
  const unsigned slabs = static_cast<unsigned>(ceil_div(x.k, TILE));
  const unsigned panels = static_cast<unsigned>(ceil_div(x.rows, 2 * TILE)) * 2;
  bool lost = false;
#pragma unroll 1
  for (; task < panels * slabs; task += gridDim.x) {
    // Neighbours in memory one after the other.
    const index_t panel = ALONG_K ? task / slabs : task % panels;
    const index_t slab = ALONG_K ? task % slabs : task / panels;
    char* const tiles = x.tiles + (panel * slabs + slab) * (SLAB_TILES * TILE_BYTES);
    lost |= pack<ALONG_K, WIDE>(x, panel, slab, tiles, tile);
    __syncthreads();  // all have read the tile: the next one may land
  }
  task -= panels * slabs;
  return lost;
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    broad_pack(const __grid_constant__ Operands operands, unsigned long long* counts) {
  if (!is_broad(counts, CAP)) return;
  __shared__ float4 tile[TILE_ELEMENTS / 4];
  unsigned task = blockIdx.x;
  bool lost = false;
#pragma unroll 1
  for (int i = 0; i < 2; ++i) {
    const Operand& x = operands.of[i];
    if (x.along_k && x.wide) {
      lost |= pack_operand<true, true>(x, task, tile);
    } else if (x.along_k) {
      lost |= pack_operand<true, false>(x, task, tile);
    } else if (x.wide) {
      lost |= pack_operand<false, true>(x, task, tile);
    } else {
      lost |= pack_operand<false, false>(x, task, tile);
    }
  }
  lost = __syncthreads_or(lost);
  if (threadIdx.x == 0) {
    if (blockIdx.x == 0) counts[4] = 1;
    if (lost) atomicAdd(counts + 5, 1ull);
  }
}
