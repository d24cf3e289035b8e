// Sums of a single product (PARTS 1) that are put aside at half the width: see sgemm_split.cu.
#pragma once

// Two bfloat16 numbers as float32.
__device__ __forceinline__ float2 widened(unsigned pair) {
  return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)};
}

template <int COUNT>
__device__ __forceinline__ void take_back(float (&total)[COUNT], const unsigned (&aside)[COUNT / 2]) {
#pragma unroll
  for (int j = 0; j < COUNT / 2; ++j) {
    const float2 high = widened(aside[j]);
    total[2 * j] += high.x;
    total[2 * j + 1] += high.y;
  }
}

// What total is when rounded to bfloat16 goes to `aside`; the rest, which is exact, stays.
template <int COUNT>
__device__ __forceinline__ void put_aside(float (&total)[COUNT], unsigned (&aside)[COUNT / 2]) {
#pragma unroll
  for (int j = 0; j < COUNT / 2; ++j) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;"
        : "=r"(aside[j])
        : "f"(total[2 * j + 1]), "f"(total[2 * j]));
    const float2 high = widened(aside[j]);
    total[2 * j] -= high.x;
    total[2 * j + 1] -= high.y;
  }
}
