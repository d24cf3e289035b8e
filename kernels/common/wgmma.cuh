// Tensor-core products of one warpgroup (128 threads), both factors in shared memory (sm_90a).
//
//   D (64 x N, float32, registers) (+)= A (64 x 16, float16) * B (N x 16, float16)'
//
// A tile in shared memory is 64 rows of 128 bytes along k, its 16-byte pieces swizzled: piece p of
// row r lies where piece p ^ (r % 8) would. It begins at a multiple of 1024 bytes, and tiles of
// further rows follow at once. Both factors are walked 16 k at a time, which is 32 bytes.
//
// Of D, thread t of the warpgroup has in d[4 * j + 2 * h + i]
//   row 16 * (t / 32) + t % 32 / 4 + 8 * h      column 8 * j + 2 * (t % 4) + i
//
// A sum is made of all 16 products and the old D at once, truncated at 25 fractional bits of the
// largest and rounded towards zero.
//
// With BROAD factors are bfloat16 (PARTS 3), or TF32 (PARTS 1): of these 128 bytes hold 32, and one
// instruction multiplies 8, which are 32 bytes, too. With BYTE_FACTORS they are int8 or uint8 (SIGNED_A and
// SIGNED_B say which), 32 of them at a time, and D is of int32, whose sums wrap.
#pragma once

#include "common/mbarrier.cuh"

typedef unsigned long long factor_t;  // describes a factor in shared memory to the tensor core

// The factor that begins at an address: rows in groups of 8 that are 1024 bytes apart, 128-byte
// swizzle. Addresses are in units of 16 bytes.
__device__ __forceinline__ factor_t factor_at(shared_t address) {
  constexpr factor_t GROUPS = 1024 / 16, SWIZZLE_128B = 1;
  return (address >> 4) | factor_t(1) << 16 | GROUPS << 32 | SWIZZLE_128B << 62;
}
constexpr factor_t NEXT_16_K = 32 / 16;  // added to a factor

// Before the first product, and whenever other instructions have written to registers of D.
__device__ __forceinline__ void products_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void products_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Wait until at most PENDING groups of products are unfinished.
template <int PENDING>
__device__ __forceinline__ void products_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

#ifdef BYTE_FACTORS
typedef int tensor_sum_t;
#define IN_AND_OUT "+r"
#else
typedef float tensor_sum_t;
#define IN_AND_OUT "+f"
#endif
#define D_4(i) IN_AND_OUT(d[i]), IN_AND_OUT(d[i + 1]), IN_AND_OUT(d[i + 2]), IN_AND_OUT(d[i + 3])
#define D_16(i) D_4(i), D_4(i + 4), D_4(i + 8), D_4(i + 12)
#define D_32(i) D_16(i), D_16(i + 16)
#define NAMES_0 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define NAMES_32 \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define NAMES_64 \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define NAMES_96 \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#if defined(BYTE_FACTORS) && SIGNED_A && SIGNED_B
#define TYPES ".s32.s8.s8"
#elif defined(BYTE_FACTORS) && SIGNED_A
#define TYPES ".s32.s8.u8"
#elif defined(BYTE_FACTORS) && SIGNED_B
#define TYPES ".s32.u8.s8"
#elif defined(BYTE_FACTORS)
#define TYPES ".s32.u8.u8"
#elif !defined(BROAD)
#define TYPES ".f32.f16.f16"
#elif PARTS == 3
#define TYPES ".f32.bf16.bf16"
#else
#define TYPES ".f32.tf32.tf32"
#endif
// Behind the addition: signs of the factors, and that both lie along k, where something else could.
#if defined(BYTE_FACTORS)
#define DEPTH "k32"
#define AS_IT_IS ""
#elif defined(BROAD) && PARTS == 1
#define DEPTH "k8"
#define AS_IT_IS ", 1, 1"
#else
#define DEPTH "k16"
#define AS_IT_IS ", 1, 1, 0, 0"
#endif
#define MULTIPLY(shape, d_names, a_name, b_name, add_name, ...)                             \
  asm volatile(                                                                             \
      "{\n"                                                                                 \
      ".reg .pred add;\n"                                                                   \
      "setp.ne.b32 add, " add_name ", 0;\n"                                                 \
      "wgmma.mma_async.sync.aligned." shape DEPTH TYPES " {" d_names "}, " a_name             \
      ", " b_name ", add" AS_IT_IS ";\n"                                                    \
      "}\n"                                                                                 \
      : __VA_ARGS__                                                                         \
      : "l"(a), "l"(b), "r"(static_cast<int>(add)))

// D = A * B', plus the old D if `add`.
__device__ __forceinline__ void multiply(tensor_sum_t (&d)[32], factor_t a, factor_t b, bool add) {
  MULTIPLY("m64n64", NAMES_0, "%32", "%33", "%34", D_32(0));
}
__device__ __forceinline__ void multiply(tensor_sum_t (&d)[64], factor_t a, factor_t b, bool add) {
  MULTIPLY("m64n128", NAMES_0 ", " NAMES_32, "%64", "%65", "%66", D_32(0), D_32(32));
}
__device__ __forceinline__ void multiply(tensor_sum_t (&d)[96], factor_t a, factor_t b, bool add) {
  MULTIPLY("m64n192", NAMES_0 ", " NAMES_32 ", " NAMES_64, "%96", "%97", "%98", D_32(0),
           D_32(32), D_32(64));
}
__device__ __forceinline__ void multiply(tensor_sum_t (&d)[128], factor_t a, factor_t b, bool add) {
  MULTIPLY("m64n256", NAMES_0 ", " NAMES_32 ", " NAMES_64 ", " NAMES_96, "%128", "%129",
           "%130", D_32(0), D_32(32), D_32(64), D_32(96));
}

#undef MULTIPLY
#undef AS_IT_IS
#undef DEPTH
#undef TYPES
#undef NAMES_96
#undef NAMES_64
#undef NAMES_32
#undef NAMES_0
#undef D_32
#undef D_16
#undef D_4
#undef IN_AND_OUT

// Registers per thread of this warpgroup from here on: given back, or waited for. Every warpgroup
// of the thread block asks once, in a branch of its own.
template <int COUNT>
__device__ __forceinline__ void fewer_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT>
__device__ __forceinline__ void more_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}
