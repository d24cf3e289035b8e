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
// A thread block packs a tile of 64 x 64 elements. It lands in shared memory, where rows lie along
// k whatever the order in memory (common/pack_map.cuh); a thread then writes 8 neighbours along k.
//
// Cost: 4 bytes read of each element, 6 written (PARTS 3) or 4 (PARTS 1).

// What an editor, which sees this file alone, gets; see multimm/gpu/emulated/broad.py.
#ifdef __CLANGD__
#define PARTS 3
#define CAP 1024
#endif
#if !defined(PARTS) || !defined(CAP)
#error "PARTS and CAP must be defined: see multimm.gpu.emulated.broad"
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

// 8 neighbours along k of a row, the vector-th of 8, scaled.
__device__ __forceinline__ void write(char* tiles, int row, int vector, float (&y)[VECTOR]) {
  if constexpr (PARTS == 3) {
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
      unsigned pairs[VECTOR / 2];
#pragma unroll
      for (int p = 0; p < VECTOR / 2; ++p) pairs[p] = take_pair(y[2 * p], y[2 * p + 1]);
      put(tiles + part * TILE_BYTES, row, vector, {pairs[0], pairs[1], pairs[2], pairs[3]});
    }
  } else {
    char* const half = tiles + vector / 4 * TILE_BYTES;
    const int piece = vector % 4 * 2;
    put(half, row, piece, {tf32(y[0]), tf32(y[1]), tf32(y[2]), tf32(y[3])});
    put(half, row, piece + 1, {tf32(y[4]), tf32(y[5]), tf32(y[6]), tf32(y[7])});
  }
}

// Returns whether an element that this thread has written is not carried; or not finite, for
// split_pack.cu has not looked at all of them. Such are packed as 0.
template <bool ALONG_K, bool WIDE>
__device__ __forceinline__ bool pack(const Operand& x, index_t panel, index_t slab, char* tiles,
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
  const int vector = threadIdx.x % VECTORS;
  bool lost = false;
#pragma unroll
  for (int i = 0; i < TILE / ROWS_AT_ONCE; ++i) {
    const int row = threadIdx.x / VECTORS + i * ROWS_AT_ONCE;
    const Power down = power_of_two(BROAD_SHIFT - x.exponents[row0 + row]);
    const float4 even = tile[place_of_four<TURNED>(row, 2 * vector)];
    const float4 odd = tile[place_of_four<TURNED>(row, 2 * vector + 1)];
    const float given[VECTOR] = {even.x, even.y, even.z, even.w, odd.x, odd.y, odd.z, odd.w};
    float y[VECTOR];
#pragma unroll
    for (int e = 0; e < VECTOR; ++e) {
      y[e] = scaled(given[e], down);
      const bool carried = fabsf(y[e]) >= LEAST_BROAD && magnitude_bits(given[e]) < INFINITE;
      lost |= !carried && given[e] != 0.0f;
      y[e] = carried ? y[e] : 0.0f;
    }
    write(tiles, row, vector, y);
  }
  return lost;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    broad_pack(const __grid_constant__ Operands operands, unsigned long long* counts) {
  if (!is_broad(counts, CAP)) return;
  __shared__ float4 tile[TILE_ELEMENTS / 4];
  const index_t panels = ceil_div(operands.of[0].rows, 2 * TILE) * 2;
  const unsigned first = static_cast<unsigned>(panels * ceil_div(operands.of[0].k, TILE));
  const bool second = blockIdx.x >= first;
  const Operand& x = operands.of[second];
  const unsigned number = blockIdx.x - (second ? first : 0);
  const unsigned slabs = static_cast<unsigned>(ceil_div(x.k, TILE));
  // Neighbours in memory one after the other.
  const unsigned height = static_cast<unsigned>(ceil_div(x.rows, 2 * TILE)) * 2;
  const index_t panel = x.along_k ? number / slabs : number % height;
  const index_t slab = x.along_k ? number % slabs : number / height;
  char* const tiles = x.tiles + (panel * slabs + slab) * (SLAB_TILES * TILE_BYTES);
  bool lost;
  if (x.along_k && x.wide) {
    lost = pack<true, true>(x, panel, slab, tiles, tile);
  } else if (x.along_k) {
    lost = pack<true, false>(x, panel, slab, tiles, tile);
  } else if (x.wide) {
    lost = pack<false, true>(x, panel, slab, tiles, tile);
  } else {
    lost = pack<false, false>(x, panel, slab, tiles, tile);
  }
  lost = __syncthreads_or(lost);
  if (threadIdx.x == 0) {
    if (blockIdx.x == 0) counts[4] = 1;
    if (lost) atomicAdd(counts + 5, 1ull);
  }
}
