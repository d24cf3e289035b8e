// y = (high + low / 2^11) * 2^e + residuals    what split_pack.cu packed, as float32 again
//
//   tiles[R/64][S][PARTS][64][64], exponents[R]   see split_pack.cu
//   y   rows x k, row-major, rows k elements apart
//
// The sum of the parts is a float32, and so is what it becomes: nothing is rounded, but that what
// one part has rounded up to 2^128 becomes the largest float32. What the parts did not carry, and
// have 0 for, is put in its place after that. Each is one thread's work:
//
//   unpack          8 neighbours along k of a row: 16 bytes of each part, 32 of y
//   put_residuals   one residual
//
// Cost: 2 bytes read for each element and part, 4 written. Subnormal numbers are kept, which is why
// this is a kernel of its own: array libraries compile theirs to flush them.

// What an editor, which sees this file alone, gets; see multimm/gpu/emulated/packed.py.
#ifdef __CLANGD__
#define PARTS 2
#endif
#if !defined(PARTS)
#error "PARTS must be defined: see multimm.gpu.emulated.packed"
#endif

#include "common/index.cuh"
#include "common/pack_map.cuh"
#include "common/split.cuh"

static_assert(PARTS == 1 || PARTS == 2, "the high part, or the high and the low part");

// 16 bytes of a part, times its unit; with `more`, added to the sums.
__device__ __forceinline__ void add_part(float (&sums)[VECTOR], const unsigned short* from,
                                         bool more, float unit) {
  const uint4 both = *reinterpret_cast<const uint4*>(from);
  const unsigned halves[VECTOR / 2] = {both.x, both.y, both.z, both.w};
#pragma unroll
  for (int e = 0; e < VECTOR; ++e) {
    const float value = value_of(halves[e / 2] >> e % 2 * 16) * unit;
    sums[e] = more ? sums[e] + value : value;
  }
}

// One block per tile; neighbours along k are packed in neighbouring blocks.
extern "C" __global__ void __launch_bounds__(THREADS)
    unpack(index_t rows, index_t k, const unsigned short* __restrict__ tiles,
           const int* __restrict__ exponents, float* __restrict__ y) {
  const unsigned slabs = static_cast<unsigned>(ceil_div(k, TILE));
  const index_t row0 = static_cast<index_t>(blockIdx.x / slabs) * TILE;
  const int vector = threadIdx.x % VECTORS;
  const index_t k0 = static_cast<index_t>(blockIdx.x % slabs) * TILE + vector * VECTOR;
  tiles += static_cast<index_t>(blockIdx.x) * PARTS * TILE_ELEMENTS;
  const bool wide = k % 4 == 0;  // each row of y begins at a multiple of 16 bytes
#pragma unroll
  for (int i = 0; i < TILE / ROWS_AT_ONCE; ++i) {
    const int row = threadIdx.x / VECTORS + i * ROWS_AT_ONCE;
    if (row0 + row >= rows) return;
    const unsigned short* const from = tiles + swizzled(row, vector);
    const Power up = power_of_two(exponents[row0 + row]);
    float* const to = y + (row0 + row) * k + k0;
    float sums[VECTOR];
    add_part(sums, from, false, 1.0f);
    if (PARTS == 2) add_part(sums, from + TILE_ELEMENTS, true, LOW_UNIT);
    const int left = clip(k - k0, VECTOR);
#pragma unroll
    for (int e = 0; e < VECTOR; ++e) sums[e] = taken_back(sums[e], up);
    if (wide && left == VECTOR) {
      __stcs(reinterpret_cast<float4*>(to), make_float4(sums[0], sums[1], sums[2], sums[3]));
      __stcs(reinterpret_cast<float4*>(to) + 1, make_float4(sums[4], sums[5], sums[6], sums[7]));
    } else {
#pragma unroll
      for (int e = 0; e < VECTOR; ++e) {
        if (e < left) to[e] = sums[e];
      }
    }
  }
}

extern "C" __global__ void put_residuals(index_t count, index_t k,
                                         const unsigned long long* __restrict__ places,
                                         const float* __restrict__ values, float* __restrict__ y) {
  const index_t i = static_cast<index_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < count) {
    y[static_cast<index_t>(places[i] >> 32) * k + (places[i] & 0xffffffffu)] = values[i];
  }
}
