// D = alpha * (2^-(s + t) * C' + P) + beta * C      C' from its residues
//
//   r      PARTS count planes of residues of C', `plane` bytes apart, rows ldr bytes apart
//   s, t   scales of rows of A, and of columns of B: m and n of them
//   P, C   m x n elements of PARTS numbers, rows ldp and ldc elements apart, or null
//   D      likewise, rows ldd apart
//
// By the Chinese remainder theorem C' = Z - P round(Z / P), where Z is the sum of r_l w_l, and w_l is
// 1 for modulus l and 0 for all others. w_l and P have up to 126 bits, and come in three limbs of 42
// bits: sums of each are exact.
//
//   Z = z2 2^84 + z1 2^42 + z0        C' = (z2 - q P2) 2^84 + (z1 - q P1) 2^42 + (z0 - q P0)
//
// Of a complex number the residues are x + iy and x - iy: the weights of its parts, of their sum and of
// their difference, are w_l / 2 and w_l / 2i, mod P.
//
// A warp has a row's next 128 columns, a lane four of them.
//
// Cost per element: PARTS count bytes read, and it is written; 4 operations in float64 for each byte.

#ifdef __CLANGD__
#define PARTS 1
#define SINGLE 0
#endif
#if !defined(PARTS) || !defined(SINGLE)
#error "PARTS and SINGLE must be defined: see multimm.gpu.residues.gemm"
#endif

#include "common/residues.cuh"

constexpr int WARPS = 8, THREADS = 32 * WARPS, FOUR = 4, LIMBS = 3, UNROLLED = 14 / PARTS;
constexpr double LIMB = 4398046511104.0;            // 2^42
constexpr double BIASED = 4503599627370496.0 + 128;  // 2^52, and what makes bytes positive

struct Weights {
  double of[PARTS][MOST_MODULI][LIMBS];
  double product[LIMBS];  // P
  double inverse;         // 2^84 / P
};

// C' / 2^42, to the nearest double but for a rounding of what lies 2^-50 below it.
__device__ __forceinline__ double joined(const double (&z)[LIMBS], const Weights& weights) {
  const double q = rint((z[0] + (z[1] + z[2] * (1 / LIMB)) * (1 / LIMB)) * weights.inverse);
  double rest[LIMBS];
#pragma unroll
  for (int i = 0; i < LIMBS; ++i) rest[i] = fma(-q, weights.product[i], z[i]);
  const double high = rest[0] * LIMB, sum = high + rest[1];
  const double part = sum - high, lost = (high - (sum - part)) + (rest[1] - part);
  return sum + (lost + rest[2] * (1 / LIMB));
}

extern "C" __global__ void __launch_bounds__(THREADS)
    residue_join(index_t m, index_t n, int count, const __grid_constant__ Weights weights,
                 const unsigned char* __restrict__ r, index_t plane, index_t ldr,
                 const int* __restrict__ s, const int* __restrict__ t, double alpha, double beta,
                 const real_t* __restrict__ p, index_t ldp, const real_t* __restrict__ c,
                 index_t ldc, real_t* __restrict__ d, index_t ldd) {
  const index_t col = (static_cast<index_t>(blockIdx.x) * 32 + threadIdx.x % 32) * FOUR;
  const index_t step = static_cast<index_t>(gridDim.y) * WARPS;
  if (col >= n) return;
  for (index_t row = static_cast<index_t>(blockIdx.y) * WARPS + threadIdx.x / 32; row < m; row += step) {
    double z[PARTS][FOUR][LIMBS] = {};
    const unsigned char* from = r + row * ldr + col;
#pragma unroll UNROLLED
    for (int l = 0; l < count; ++l) {
      unsigned four[PARTS];
#pragma unroll
      for (int i = 0; i < PARTS; ++i, from += plane) {
        four[i] = *reinterpret_cast<const unsigned*>(from) ^ 0x80808080u;
      }
#pragma unroll
      for (int e = 0; e < FOUR; ++e) {
        // A byte in the last place of 2^52: faster than a conversion.
        double residue[PARTS];
#pragma unroll
        for (int i = 0; i < PARTS; ++i) {
          residue[i] = __hiloint2double(0x43300000, four[i] >> 8 * e & 255) - BIASED;
        }
#if PARTS == 2
        const double first = residue[0];
        residue[0] = first + residue[1];
        residue[1] = first - residue[1];
#endif
#pragma unroll
        for (int i = 0; i < PARTS * LIMBS; ++i) {
          const int part = i / LIMBS, limb = i % LIMBS;
          z[part][e][limb] = fma(residue[part], weights.of[part][l][limb], z[part][e][limb]);
        }
      }
    }
    const int scale = 42 - s[row];
#pragma unroll
    for (int e = 0; e < FOUR; ++e) {
      const index_t at = col + e;
      if (at >= n) break;
      const double unit = power(scale - t[at]);
#pragma unroll
      for (int part = 0; part < PARTS; ++part) {
        double value = joined(z[part][e], weights) * unit;
        if (p) value += p[(row * ldp + at) * PARTS + part];
        value *= alpha;
        if (c) value = fma(beta, static_cast<double>(c[(row * ldc + at) * PARTS + part]), value);
        d[(row * ldd + at) * PARTS + part] = value;
      }
    }
  }
}
