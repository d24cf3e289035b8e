// Tensor-core products of one warp, factors in registers (sm_80 on).
//
//   D (16 x 8, float32) = A (16 x 16, float16) * B (8 x 16, float16)' + D
//
// Of D, lane t has in d[2 * h + i]      row t / 4 + 8 * h      column 2 * (t % 4) + i
//
// Rows of A and of B lie in shared memory along k, in pieces of 8 numbers. load_pieces() fetches
// four blocks of 8 rows by one piece each; lane t names row t % 8 of block t / 8. What a lane gets
// of a block is what a factor needs of it: A's blocks are its upper and lower rows of the first 8
// k, and then of the others; B's the first 8 k and the others.
#pragma once

#include "common/shared_address.cuh"

__device__ __forceinline__ void load_pieces(unsigned (&to)[4], shared_t piece) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(piece)
               : "memory");
}

// D = A * B' + C
__device__ __forceinline__ void multiply(float* d, const unsigned (&a)[4], const unsigned* b,
                                         float c0, float c1, float c2, float c3) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%10, %11, %12, %13};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(c0), "f"(c1),
        "f"(c2), "f"(c3));
}

// D = A * B', plus the old D if `add`.
__device__ __forceinline__ void multiply(float* d, const unsigned (&a)[4], const unsigned* b,
                                         bool add) {
  if (add) {
    multiply(d, a, b, d[0], d[1], d[2], d[3]);
  } else {
    multiply(d, a, b, 0.0f, 0.0f, 0.0f, 0.0f);
  }
}
