// float32 arithmetic in which every rounding is one that the source asks for.
//
// Kernels are compiled with subnormals kept (-ftz=false), and with --fmad=true, which lets the
// compiler turn a * b + c into one rounding. It leaves alone what is written with these functions:
// a product of mul_rn or a sum of add_rn is rounded by itself, fma_rn is rounded once.
#pragma once

// As text: of __fmaf_rn the compiler knows that it is arithmetic and may be moved, which it uses
// to arrange the main loop of sgemm_ffma.cu in another way, with other registers and spills.
__device__ __forceinline__ float fma_rn(float a, float b, float c) {
  float d;
  asm("fma.rn.f32 %0, %1, %2, %3;" : "=f"(d) : "f"(a), "f"(b), "f"(c));
  return d;
}

__device__ __forceinline__ float mul_rn(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ float add_rn(float a, float b) { return __fadd_rn(a, b); }

// a == 0, by the bits but for the sign: an integer operation, which a warp does once for all
// lanes where they share `a`. Chips up to sm_90 have no such comparison of floats.
__device__ __forceinline__ bool is_zero(float a) { return (__float_as_uint(a) << 1) == 0; }
