// A complex matrix as a real one, for real products, and back.
//
//   X, D, P   rows x cols complex numbers, row-major; rows of X, P and D lie ldx, ldp and ldd of
//             them apart, each begins at a multiple of 8 bytes. Y is contiguous.
//
//   expand_complex   Y 2 rows x 2 cols   for each x = re + i im a square of four. The signs make it
//                                        a right operand, transposed or not, conjugated or not:
//
//                        | re       s01 im |        | b | of C's row   re -im | its transpose: what a
//                        | s10 im   s11 re |        of A's pair re, im        | transposed B becomes
//
//   split_complex    Y 2 rows x cols     row 2i the real parts of row i, row 2i + 1 sign times the
//                                        imaginary ones: side by side along rows that count as one
//   join_complex     D = alpha ((Y[2i] + i sign Y[2i + 1]) + P), where P may be null
//
// With A as it lies, m x 2k real numbers, and B expanded, 2k x 2n, the product of real numbers is
// m x 2n, which is C as it lies:
//
//   row of A   ar0 ai0 ar1 ai1 ...       B   br  bi | of k = 0     C = ar br + ai (-bi),
//                                           -bi  br |                  ar bi + ai br
//
// The elements of X, or of D, are numbered row by row, and a thread block takes SPAN = THREADS *
// UNROLL neighbours, so that narrow matrices keep as many threads busy as wide ones.
//
// Cost: expanding moves 24 bytes for each element, splitting 16, joining 16, or 24 with P. A thread
// has UNROLL loads on their way before it stores. A warp's accesses cover 128 or 256 bytes in a row.

// What multimm/gpu/elementwise/complex_parts.py sets. An editor, which sees this file alone, gets
// these.
#ifdef __CLANGD__
#define THREADS 256
#define UNROLL 4
#endif
#if !defined(THREADS) || !defined(UNROLL)
#error "THREADS and UNROLL must be defined: see multimm/gpu/elementwise/complex_parts.py"
#endif

#include "common/ieee.cuh"
#include "common/index.cuh"
#include "common/row_walk.cuh"

constexpr int SPAN = THREADS * UNROLL;

// The elements of a block that exist, one after the other: where each is, and its number u.
template <typename Body>
__device__ __forceinline__ void each(index_t rows, index_t cols, Body body) {
  const index_t first = static_cast<index_t>(blockIdx.x) * SPAN + threadIdx.x;
  RowWalk<THREADS> at(first, cols);
#pragma unroll
  for (int u = 0; u < UNROLL; ++u, at.go_on(cols)) {
    if (first + u * THREADS < rows * cols) body(at.row, at.col, u);
  }
}

__device__ __forceinline__ void load(float2 (&x)[UNROLL], index_t rows, index_t cols,
                                     const float2* from, index_t ld) {
  each(rows, cols, [&](index_t row, index_t col, int u) { x[u] = from[row * ld + col]; });
}

extern "C" __global__ void __launch_bounds__(THREADS)
    expand_complex(index_t rows, index_t cols, const float2* __restrict__ x, index_t ldx, float s01,
                   float s10, float s11, float2* __restrict__ y) {
  float2 read[UNROLL];
  load(read, rows, cols, x, ldx);
  each(rows, cols, [&](index_t row, index_t col, int u) {
    float2* const to = y + 2 * row * cols + col;
    to[0] = float2{read[u].x, s01 * read[u].y};
    to[cols] = float2{s10 * read[u].y, s11 * read[u].x};
  });
}

extern "C" __global__ void __launch_bounds__(THREADS)
    split_complex(index_t rows, index_t cols, const float2* __restrict__ x, index_t ldx, float sign,
                  float* __restrict__ y) {
  float2 read[UNROLL];
  load(read, rows, cols, x, ldx);
  each(rows, cols, [&](index_t row, index_t col, int u) {
    float* const to = y + 2 * row * cols + col;
    to[0] = read[u].x;
    to[cols] = sign * read[u].y;
  });
}

extern "C" __global__ void __launch_bounds__(THREADS)
    join_complex(index_t rows, index_t cols, const float* __restrict__ y, float sign, float alpha,
                 const float2* __restrict__ p, index_t ldp, float2* __restrict__ d, index_t ldd) {
  float2 sums[UNROLL] = {};
  if (p) load(sums, rows, cols, p, ldp);
  each(rows, cols, [&](index_t row, index_t col, int u) {
    const float* const from = y + 2 * row * cols + col;
    const float re = from[0], im = sign * from[cols];
    // Without P nothing is added: it would make 0 of -0.
    const float2 sum = p ? float2{add_rn(re, sums[u].x), add_rn(im, sums[u].y)} : float2{re, im};
    d[row * ldd + col] = float2{mul_rn(alpha, sum.x), mul_rn(alpha, sum.y)};
  });
}
