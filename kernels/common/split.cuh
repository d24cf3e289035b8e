// One float32 as two FP16 numbers and an exponent that a whole row shares:
//
//   x = (high + low / 2^11) * 2^e       e = floor(log2 of the row's largest finite |x|) - 14
//   y = x / 2^e                         |y| < 2^15: no FP16 number overflows
//   high = FP16(y)                      11 bits, rounded to nearest even
//   low = FP16((y - high) * 2^11)       the next 11 bits, about as large as high
//
//   y    |1.xxxxxxxxxx|xxxxxxxxxxxxx|   24 bits; |y - high - low / 2^11| <= 2^-23 |y|, and 2^-22 |y|
//                                        for |y| < 2^-13: low may be subnormal
//   high |1.xxxxxxxxxx|
//   low               |xxxxxxxxxxx|
//
// That needs |y| >= 2^-14. Below, an FP16 number is subnormal and has fewer bits, and the tensor
// cores, which align products by the exponents of their factors, take it for larger than it is and
// cut off more. Such elements, less than 2^-28 of the largest of their row, are lost: their parts
// are 0, and they are listed apart.
//
// Powers of two are applied in two factors, for 2^-e alone may be no float32. Every step from y
// on is exact but the two roundings, so that no compiler option changes a bit.
#pragma once

constexpr unsigned INFINITE = 0x7f800000u;        // the bits of infinity; NaNs lie above
constexpr float NORMAL_FP16 = 1.0f / (1 << 14);   // the smallest FP16 number with 11 bits
constexpr float LOW_UNIT = 1.0f / (1 << 11);      // of the low part, in units of the high one

__device__ __forceinline__ unsigned magnitude_bits(float x) {
  return __float_as_uint(x) & 0x7fffffffu;
}

// e of a row, from the bits of its largest |x|: at least -163, at most 113, and 0 without any.
__device__ __forceinline__ int row_exponent(unsigned largest) {
  if (largest == 0) return 0;
  constexpr int UP = 24;  // a subnormal number has its exponent in the significand
  const bool subnormal = largest < 0x00800000u;
  const float normal = __uint_as_float(largest) * (subnormal ? 1 << UP : 1);
  return static_cast<int>(__float_as_uint(normal) >> 23) - 127 - (subnormal ? UP : 0) - 14;
}

// 2^n in two factors, for -252 <= n <= 254.
struct Power {
  float first, second;
};

__device__ __forceinline__ Power power_of_two(int n) {
  const int half = n >> 1;  // rounds down, also below zero
  return {__int_as_float((half + 127) << 23), __int_as_float((n - half + 127) << 23)};
}

__device__ __forceinline__ float scaled(float x, Power power) {
  return x * power.first * power.second;
}

// What the sum of an element's parts stands for. The high part alone may have been rounded up to
// 2^15, and with e = 113 stand for 2^128: for the largest number then, not for infinity.
__device__ __forceinline__ float taken_back(float sum, Power power) {
  const float largest = __uint_as_float(INFINITE - 1);
  return fminf(fmaxf(scaled(sum, power), -largest), largest);
}

// Two FP16 numbers in a register, the first in its lower half.
__device__ __forceinline__ unsigned halves(float first, float second) {
#if __CUDA_ARCH__ >= 800
  unsigned both;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(second), "f"(first));
  return both;
#else
  unsigned short low, high;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(low) : "f"(first));
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(high) : "f"(second));
  return static_cast<unsigned>(high) << 16 | low;
#endif
}

__device__ __forceinline__ float value_of(unsigned half) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(static_cast<unsigned short>(half)));
  return value;
}

// Whether the parts carry x, which is y after scaling. They are 0 for all others.
__device__ __forceinline__ bool is_carried(float x, float y) {
  return magnitude_bits(x) < INFINITE && fabsf(y) >= NORMAL_FP16;
}
