// Matrices as integers, and these by their remainders for some moduli (Chinese remainders).
//
//   integer of row i of A     a' = rint(a * 2^s)        s: of the row, see residue_rows.cu
//   residue for modulus p     r = a' mod p, the one nearest to 0: a byte
//   A' B' mod p               the product of residues, mod p
//
// Moduli are pairwise coprime, 256 at most. Of all that are used, P is the product; a number between
// -P / 2 and P / 2 is known from its residues (residue_join.cu).
//
// Complex numbers (PARTS 2) have moduli for which some i has i^2 = -1: x + iy and x - iy, mod p, are two
// residues, and products of these are those of the complex numbers. A modulus has two planes then.
#pragma once

#include "common/index.cuh"

constexpr int MOST_MODULI = 16, MOST_PLANES = 2 * MOST_MODULI;
constexpr int ROWS_OF_TILE = 64, K_OF_TILE = 128, BYTES_OF_TILE = ROWS_OF_TILE * K_OF_TILE;

// Of operands and results: double, or with SINGLE float.
#if defined(SINGLE) && SINGLE
using real_t = float;
#else
using real_t = double;
#endif

// What is known of all rows of an operand; of minima the complement, so that all begin with 0.
struct Summary {
  unsigned long long refused;    // rows with infinities, NaNs, or numbers too large or too small
  unsigned long long bits;       // rows are integers of so many bits at most, times a power of two
  unsigned long long sum;        // largest |a|_1 / |a|_2 of a row's parts, as the bits of a double
  unsigned long long rounded;    // rows whose integers are rounded
  unsigned long long norm;       // ~: smallest norm of those rows' integers, as the bits of a double
  unsigned long long large[3];   // ~: fewest numbers of a row's part beyond 1/2, 1/4, 1/8 (residue_pack.cu)
};

// 2^n of -1022 <= n <= 1023.
__device__ __forceinline__ double power(int n) {
  return __hiloint2double((n + 1023) << 20, 0);
}

// The exponent of a normal number.
__device__ __forceinline__ int exponent(double x) {
  return (__double2hiint(x) >> 20 & 0x7ff) - 1023;
}

// Of a row: the norm, a little more than it may be; sums of squares are rounded.
__device__ __forceinline__ double norm_of(double squares) {
  return sqrt(squares) * (1 + 1.0 / (1 << 20));
}
