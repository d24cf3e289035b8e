// Packs a float64 operand as residues of integers, for residue_mma.cu (common/residues.cuh).
//
//   x  rows x k     op(A), or the transpose of op(B); lines ld elements apart
//   squares, lowest of each row: what residue_rows.cu has found
//   limit           what the norm of a row's integers may be, before these are rounded
//   tiles[count][R / 64][S][64][128] int8, R = rows rounded up to 128 and S = ceil(k / 128); zeros
//                   where x has no elements
//   scales[rows]    s of each row
//   large[rows]     how many integers of the row are at least 1/2, 1/4 and 1/8 of their mean square,
//                   21 bits each
//
// A row is scaled so that its norm just stays below `limit`; where all its elements are integers
// before, no further: then nothing is rounded.
//
// Element (r, c) of a tile lies at byte 128 r + (c ^ 16 (r % 8)): see common/wgmma.cuh. A thread block
// packs a tile; of 16 neighbours along k, a piece, one thread makes the 16 bytes for each modulus.
//
// Cost: 8 bytes read and `count` written of each element; 3 operations in float64 for each byte.

#ifdef __CLANGD__
#define ALONG_K 1
#endif
#ifndef ALONG_K
#error "ALONG_K must be defined: see multimm.gpu.residues.launch"
#endif

#include "common/residues.cuh"

constexpr int THREADS = 256, PIECE = 16, PIECES = K_OF_TILE / PIECE, LANE_ROWS = 32 / PIECES;
constexpr int FIELD = 21;                       // bits of what is counted of a row
constexpr double ROUNDER = 6755399441055744.0;  // 1.5 * 2^52: added, it rounds to integers
constexpr double HALF = 1 << 28;                // an integer is high * 2^28 + low

struct Moduli {
  double modulus[MOST_MODULI], inverse[MOST_MODULI];
  double half[MOST_MODULI];  // 2^28, modulo each
};

// Sixteen integers of a row.
struct Piece {
  double high[PIECE], low[PIECE];

  __device__ __forceinline__ void take(int i, double integer) {
    high[i] = fma(integer, 1 / HALF, ROUNDER) - ROUNDER;
    low[i] = fma(-HALF, high[i], integer);
  }
  // The residue of one of them: its lowest byte counts. `smaller` is below 2^36, so that the multiple
  // of the modulus is right, and the last 32 bits of both are enough.
  __device__ __forceinline__ unsigned residue(int i, double half, double inverse,
                                              unsigned modulus) const {
    const double smaller = fma(high[i], half, low[i]);
    return __double2loint(smaller + ROUNDER) -
           modulus * __double2loint(fma(smaller, inverse, ROUNDER));
  }
  __device__ __forceinline__ unsigned four(int i, double half, double inverse,
                                           unsigned modulus) const {
    const unsigned first = __byte_perm(residue(i, half, inverse, modulus),
                                       residue(i + 1, half, inverse, modulus), 0x0040);
    const unsigned second = __byte_perm(residue(i + 2, half, inverse, modulus),
                                        residue(i + 3, half, inverse, modulus), 0x0040);
    return __byte_perm(first, second, 0x5410);
  }
};

extern "C" __global__ void __launch_bounds__(THREADS)
    residue_pack(const double* __restrict__ x, index_t ld, index_t rows, index_t k,
                 const double* __restrict__ squares, const int* __restrict__ lowest, double limit,
                 int count, const __grid_constant__ Moduli moduli, signed char* __restrict__ tiles,
                 int* __restrict__ scales, unsigned long long* __restrict__ large,
                 Summary* summary) {
  const index_t slabs = ceil_div(k, K_OF_TILE), panels = ceil_div(rows, 2 * ROWS_OF_TILE) * 2;
  const index_t panel = blockIdx.x / slabs, slab = blockIdx.x % slabs;
#pragma unroll 1
  for (int i = threadIdx.x; i < ROWS_OF_TILE * PIECES; i += THREADS) {
    // Lanes write whole rows. They read pieces of rows, or of lines of 32 bytes across these.
    const int lane = i % 32;
    const int row = i / 32 * LANE_ROWS + (ALONG_K ? lane / PIECES : lane % LANE_ROWS);
    const int place = ALONG_K ? lane % PIECES : lane / LANE_ROWS;
    const index_t r = panel * ROWS_OF_TILE + row, c = slab * K_OF_TILE + place * PIECE;
    const bool there = r < rows;
    const double own = there ? squares[r] : 0.0;
    const int low_bit = there ? lowest[r] : 0;
    int scale = 0;
    double norm = 0.0;
    if (own > 0) {
      norm = norm_of(own);
      const int fitting = exponent(limit / norm);
      scale = -low_bit < fitting ? -low_bit : fitting;
      norm *= power(scale);
    }
    if (there && slab == 0 && place == 0) {
      scales[r] = scale;
      if (own > 0 && scale < -low_bit) {
        atomicMax(&summary->rounded, 1ull);
        atomicMax(&summary->norm, ~static_cast<unsigned long long>(__double_as_longlong(norm)));
      }
    }
    const double unit = power(scale), mean = norm / sqrt(static_cast<double>(k));
    const int left = there ? clip(k - c, PIECE) : 0;
    const double* const from = x + (ALONG_K ? r * ld + c : c * ld + r);
    Piece piece;
    unsigned beyond[3] = {};
#pragma unroll
    for (int e = 0; e < PIECE; ++e) {
      const double integer = rint((e < left ? from[ALONG_K ? e : e * ld] : 0.0) * unit);
      const double size = fabs(integer);
      beyond[0] += size >= mean * 0.5;
      beyond[1] += size >= mean * 0.25;
      beyond[2] += size >= mean * 0.125;
      piece.take(e, integer);
    }
    // Of the lanes that have the row: 128 at most, each in a byte.
    unsigned counts = beyond[0] | beyond[1] << 8 | beyond[2] << 16;
#pragma unroll
    for (int apart = 1; apart < PIECES; apart *= 2) {
      counts += __shfl_xor_sync(~0u, counts, ALONG_K ? apart : apart * LANE_ROWS);
    }
    if (own > 0 && place == 0) {
      atomicAdd(&large[r], (counts & 255ull) | (counts >> 8 & 255ull) << FIELD |
                               (counts >> 16 & 255ull) << 2 * FIELD);
    }
    signed char* to = tiles + (panel * slabs + slab) * BYTES_OF_TILE + row * K_OF_TILE +
                      (place ^ row % 8) * PIECE;
#pragma unroll 1
    for (int l = 0; l < count; ++l) {
      const double half = moduli.half[l], inverse = moduli.inverse[l];
      const unsigned modulus = static_cast<unsigned>(moduli.modulus[l]);
      *reinterpret_cast<uint4*>(to) =
          uint4{piece.four(0, half, inverse, modulus), piece.four(4, half, inverse, modulus),
                piece.four(8, half, inverse, modulus), piece.four(12, half, inverse, modulus)};
      to += panels * slabs * BYTES_OF_TILE;
    }
  }
}

// The fewest large elements of any row that is not 0.
extern "C" __global__ void __launch_bounds__(THREADS)
    residue_fewest(index_t rows, const double* __restrict__ squares,
                   const unsigned long long* __restrict__ large, Summary* summary) {
  for (index_t r = blockIdx.x * static_cast<index_t>(THREADS) + threadIdx.x; r < rows;
       r += static_cast<index_t>(gridDim.x) * THREADS) {
    if (squares[r] == 0) continue;
    for (int t = 0; t < 3; ++t) {
      atomicMax(&summary->large[t], ~(large[r] >> t * FIELD & ((1ull << FIELD) - 1)));
    }
  }
}
