// Packs an operand as residues of integers, for byte_mma.cu (common/residues.cuh).
//
//   x  rows x k     op(A), or the transpose of op(B); lines ld elements of PARTS numbers apart
//   squares, lowest of each row: what residue_rows.cu has found
//   limit           what the norm of a row's integers may be, before these are rounded
//   tiles[PARTS count][R / 64][S][64][128] int8, R = rows rounded up to 128 and S = ceil(k / 128);
//                   zeros where x has no elements
//   scales[rows]    s of each row
//   large[PARTS][rows]  how many parts of the row's elements are at least 1/2, 1/4 and 1/8 of the root
//                   of the mean square of all parts, 21 bits each
//
// A row is scaled so that its norm just stays below `limit`; where all its numbers are integers
// before, no further: then nothing is rounded.
//
// Element (r, c) of a tile lies at byte 128 r + (c ^ 16 (r % 8)): see common/wgmma.cuh. A thread block
// packs a tile; of 16 / PARTS neighbours along k, a piece, one thread makes all bytes.
//
// Cost: each element is read once, and PARTS `count` bytes are written; 3 operations in float64 for
// each byte, 4 where PARTS is 2.

#ifdef __CLANGD__
#define ALONG_K 1
#define PARTS 1
#define SINGLE 0
#endif
#if !defined(ALONG_K) || !defined(PARTS) || !defined(SINGLE)
#error "ALONG_K, PARTS and SINGLE must be defined: see multimm.gpu.residues.gemm"
#endif

#include "common/residues.cuh"

constexpr int THREADS = 256, PIECE = 16 / PARTS, PIECES = K_OF_TILE / PIECE, LANE_ROWS = 32 / PIECES;
constexpr int FIELD = 21;                       // bits of what is counted of a row
constexpr double ROUNDER = 6755399441055744.0;  // 1.5 * 2^52: added, it rounds to integers
constexpr double HALF = 1 << 28;                // an integer is high * 2^28 + low

struct Moduli {
  double modulus[MOST_MODULI], inverse[MOST_MODULI];
  double half[MOST_MODULI];  // 2^28, modulo each
  double root[MOST_MODULI];  // of -1, where PARTS is 2
};

// One of them.
struct Modulus {
  double half, inverse, root;
  unsigned modulus;
};

// Integers of a row that are neighbours.
struct Piece {
  double high[PARTS][PIECE], low[PARTS][PIECE];

  __device__ __forceinline__ void take(int part, int i, double integer) {
    high[part][i] = fma(integer, 1 / HALF, ROUNDER) - ROUNDER;
    low[part][i] = fma(-HALF, high[part][i], integer);
  }
  // The residue of one of them: its lowest byte counts. `smaller` is below 2^36, or 2^44 of two parts,
  // so that the multiple of the modulus is right, and the last 32 bits of both are enough.
  __device__ __forceinline__ unsigned residue(int i, const Modulus& of) const {
    double smaller = fma(high[0][i], of.half, low[0][i]);
#if PARTS == 2
    smaller = fma(of.root, fma(high[1][i], of.half, low[1][i]), smaller);
#endif
    return __double2loint(smaller + ROUNDER) -
           of.modulus * __double2loint(fma(smaller, of.inverse, ROUNDER));
  }
  __device__ __forceinline__ unsigned four(int i, const Modulus& of) const {
    const unsigned first = __byte_perm(residue(i, of), residue(i + 1, of), 0x0040);
    const unsigned second = __byte_perm(residue(i + 2, of), residue(i + 3, of), 0x0040);
    return __byte_perm(first, second, 0x5410);
  }
  __device__ __forceinline__ void write(signed char* to, const Modulus& of) const {
#if PARTS == 1
    *reinterpret_cast<uint4*>(to) = uint4{four(0, of), four(4, of), four(8, of), four(12, of)};
#else
    *reinterpret_cast<uint2*>(to) = uint2{four(0, of), four(4, of)};
#endif
  }
};

extern "C" __global__ void __launch_bounds__(THREADS)
    residue_pack(const real_t* __restrict__ x, index_t ld, index_t rows, index_t k,
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
    const double unit = power(scale), mean = norm / sqrt(static_cast<double>(k * PARTS));
    const int left = there ? clip(k - c, PIECE) : 0;
    const real_t* const from = x + (ALONG_K ? r * ld + c : c * ld + r) * PARTS;
    Piece piece;
    unsigned beyond[PARTS] = {};  // three counts, a byte each
#pragma unroll
    for (int e = 0; e < PIECE; ++e) {
#pragma unroll
      for (int part = 0; part < PARTS; ++part) {
        const real_t own_part = e < left ? from[(ALONG_K ? e : e * ld) * PARTS + part] : real_t(0);
        const double integer = rint(own_part * unit), size = fabs(integer);
        beyond[part] += size >= mean * 0.5;
        beyond[part] += (size >= mean * 0.25) << 8;
        beyond[part] += (size >= mean * 0.125) << 16;
        piece.take(part, e, integer);
      }
    }
    // Of the lanes that have the row: 128 at most, each in a byte.
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
      unsigned counts = beyond[part];
#pragma unroll
      for (int apart = 1; apart < PIECES; apart *= 2) {
        counts += __shfl_xor_sync(~0u, counts, ALONG_K ? apart : apart * LANE_ROWS);
      }
      if (own > 0 && place == 0) {
        atomicAdd(&large[part * rows + r], (counts & 255ull) | (counts >> 8 & 255ull) << FIELD |
                                               (counts >> 16 & 255ull) << 2 * FIELD);
      }
    }
    signed char* to = tiles + (panel * slabs + slab) * BYTES_OF_TILE + row * K_OF_TILE +
                      (place / PARTS ^ row % 8) * 16 + place % PARTS * PIECE;
#pragma unroll 1
    for (int l = 0; l < count; ++l) {
      const Modulus of{moduli.half[l], moduli.inverse[l], moduli.root[l],
                       static_cast<unsigned>(moduli.modulus[l])};
#pragma unroll
      for (int part = 0; part < PARTS; ++part, to += panels * slabs * BYTES_OF_TILE) {
        piece.write(to, {of.half, of.inverse, part ? -of.root : of.root, of.modulus});
      }
    }
  }
}

// The fewest large numbers of any row that is not 0, and of any part.
extern "C" __global__ void __launch_bounds__(THREADS)
    residue_fewest(index_t rows, const double* __restrict__ squares,
                   const unsigned long long* __restrict__ large, Summary* summary) {
  for (index_t r = blockIdx.x * static_cast<index_t>(THREADS) + threadIdx.x; r < rows;
       r += static_cast<index_t>(gridDim.x) * THREADS) {
    if (squares[r] == 0) continue;
    for (int i = 0; i < PARTS * 3; ++i) {
      const unsigned long long counts = large[i / 3 * rows + r];
      atomicMax(&summary->large[i % 3], ~(counts >> i % 3 * FIELD & ((1ull << FIELD) - 1)));
    }
  }
}
