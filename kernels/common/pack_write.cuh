// The second half of split_pack.cu: FP16 parts of tiles in shared memory.
//
// PARTS is how many there are, CAP how many elements that they do not carry are listed.
#pragma once

#include "common/index.cuh"
#include "common/pack_map.cuh"
#include "common/pack_task.cuh"
#include "common/pack_tile.cuh"
#include "common/split.cuh"

// Whether the parts lose a finite element of the tile; its value is returned in `value`.
template <bool TURNED>
__device__ __forceinline__ bool loses(float4* tile, const int* exponents, int row, int k,
                                      float& value) {
  value = at<TURNED>(tile, row, k);
  const float y = scaled(value, power_of_two(-exponents[row]));
  return value != 0.0f && magnitude_bits(value) < INFINITE && !is_carried(value, y);
}

// What a warp has written of a tile, once more and element by element: counts what is not finite
// and what is lost, and lists the latter. Few warps of few launches come here.
template <bool TURNED>
__device__ __forceinline__ void look_closer(const Operand& x, index_t row0, index_t k0,
                                            float4* tile, const int* exponents) {
  const int lane = threadIdx.x % 32, first_row = threadIdx.x / VECTORS;
  const int first_k = threadIdx.x % VECTORS * VECTOR;
  unsigned strange = 0, lost = 0;
  float value;
#pragma unroll 1
  for (int i = 0; i < WRITTEN; ++i) {
    const int row = first_row + i / VECTOR * ROWS_AT_ONCE;
    lost += loses<TURNED>(tile, exponents, row, first_k + i % VECTOR, value);
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
    if (!loses<TURNED>(tile, exponents, row, k, value) || place >= CAP) continue;
    x.residual_at[place] = static_cast<count_t>(row0 + row) << 32 | static_cast<count_t>(k0 + k);
    x.residuals[place++] = value;
  }
}

// From this e on 2^-e is a normal float32, and so is the least |x| that the parts carry.
constexpr int LEAST_PLAIN = -112;

// 8 neighbours along k of a row, divided by 2^e; those that the parts do not carry become 0. Returns
// whether there is one, 0 left out. PLAIN: all are finite, e >= LEAST_PLAIN, and none becomes 0.
template <bool PLAIN>
__device__ __forceinline__ bool scale(float (&y)[VECTOR], const float (&given)[VECTOR],
                                      int exponent) {
  if (PLAIN) {
    const float factor = __int_as_float((127 - exponent) << 23);
    const unsigned carried = __float_as_uint(NORMAL_FP16) + (static_cast<unsigned>(exponent) << 23);
    unsigned least = ~0u;  // of the bits of 2 |x|, less one: zeros are the largest
#pragma unroll
    for (int e = 0; e < VECTOR; ++e) {
      least = min(least, 2 * __float_as_uint(given[e]) - 1);
      y[e] = fmaf(given[e], factor, 0.0f);  // no zero is negative
    }
    return least < 2 * carried - 1;
  }
  const Power down = power_of_two(-exponent);
  bool odd_one = false;
#pragma unroll
  for (int e = 0; e < VECTOR; ++e) {
    y[e] = scaled(given[e], down);
    const bool carried = is_carried(given[e], y[e]);
    odd_one |= !carried && given[e] != 0.0f;
    y[e] = carried ? y[e] : 0.0f;
  }
  return odd_one;
}

// 8 neighbours along k of a row, as 16 bytes of each part. Returns what scale() does: if a PLAIN
// call returns true, what it has written is to be written again.
template <bool TURNED, bool PLAIN>
__device__ __forceinline__ bool write_vector(unsigned short* tiles, const float4* tile, int row,
                                             int exponent) {
  const int vector = threadIdx.x % VECTORS;
  const float4 even = tile[place_of_four<TURNED>(row, 2 * vector)];
  const float4 odd = tile[place_of_four<TURNED>(row, 2 * vector + 1)];
  const float given[VECTOR] = {even.x, even.y, even.z, even.w, odd.x, odd.y, odd.z, odd.w};
  float y[VECTOR];
  const bool odd_one = scale<PLAIN>(y, given, exponent);
  unsigned high[VECTOR / 2], low[VECTOR / 2];
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
