// float32 arithmetic that no compiler option can change.
//
// CuPy appends -ftz=true to whatever it compiles from text, and later options win. That option
// rewrites C++ operators into their flush-to-zero forms (fma.rn.ftz.f32), so that subnormal
// numbers vanish. Inline PTX is left as written: these functions keep subnormals everywhere.
// A comparison with zero flushes too, hence the look at the bits.
#pragma once

#ifdef __CUDA_ARCH__

__device__ __forceinline__ float fma_rn(float a, float b, float c) {
  float d;
  asm("fma.rn.f32 %0, %1, %2, %3;" : "=f"(d) : "f"(a), "f"(b), "f"(c));
  return d;
}

__device__ __forceinline__ float mul_rn(float a, float b) {
  float d;
  asm("mul.rn.f32 %0, %1, %2;" : "=f"(d) : "f"(a), "f"(b));
  return d;
}

__device__ __forceinline__ float add_rn(float a, float b) {
  float d;
  asm("add.rn.f32 %0, %1, %2;" : "=f"(d) : "f"(a), "f"(b));
  return d;
}

__device__ __forceinline__ bool is_zero(float a) { return (__float_as_uint(a) << 1) == 0; }

#else  // host compilers and editors

inline float fma_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline float mul_rn(float a, float b) { return a * b; }
inline float add_rn(float a, float b) { return a + b; }
inline bool is_zero(float a) { return a == 0.0f; }

#endif
