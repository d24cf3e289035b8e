// What decides how the rows of an operand become integers (common/residues.cuh).
//
//   x  rows x k     op(A), or the transpose of op(B); lines ld elements of PARTS numbers apart
//   squares[rows]   the sum of each row's squares
//   lowest[rows]    the largest e for which all numbers of the row are integers times 2^e
//   summary         of all rows: which are refused, bits, and |a|_1 / |a|_2
//
// Rows that lie along k: a thread block each. Else 32 neighbouring ones, a lane each, and every warp
// has the k of its number, of 32. Sums are added in an order that sizes alone decide.
//
// Cost: each element is read once.

#ifdef __CLANGD__
#define ALONG_K 1
#define PARTS 1
#define SINGLE 0
#endif
#if !defined(ALONG_K) || !defined(PARTS) || !defined(SINGLE)
#error "ALONG_K, PARTS and SINGLE must be defined: see multimm.gpu.residues.gemm"
#endif

#include "common/residues.cuh"

constexpr int WARPS = ALONG_K ? 8 : 32, THREADS = 32 * WARPS;
// Squares of numbers beyond these, and their sums, may leave what a double holds.
constexpr int LEAST = -400, MOST = 400;
constexpr int NO_BIT = 1 << 20;

struct Found {
  double squares, sum;
  unsigned long long largest;  // bits of the largest |x|
  int lowest;

  __device__ __forceinline__ void take_element(const real_t* from) {
#pragma unroll
    for (int part = 0; part < PARTS; ++part) take(from[part]);
  }
  __device__ __forceinline__ void take(double x) {
    const unsigned long long bits = __double_as_longlong(x) & 0x7fffffffffffffffull;
    if (bits == 0) return;
    squares = fma(x, x, squares);
    sum += fabs(x);
    largest = bits > largest ? bits : largest;
    const int biased = static_cast<int>(bits >> 52);
    const unsigned long long digits = (bits & 0xfffffffffffffull) | (biased ? 1ull << 52 : 0);
    const int low = (biased ? biased : 1) - 1075 + __ffsll(digits) - 1;
    lowest = low < lowest ? low : lowest;
  }
  __device__ __forceinline__ void add(const Found& other) {
    squares += other.squares;
    sum += other.sum;
    largest = other.largest > largest ? other.largest : largest;
    lowest = other.lowest < lowest ? other.lowest : lowest;
  }
  __device__ __forceinline__ Found of_lane(int apart) const {
    return {__shfl_xor_sync(~0u, squares, apart), __shfl_xor_sync(~0u, sum, apart),
            __shfl_xor_sync(~0u, largest, apart), __shfl_xor_sync(~0u, lowest, apart)};
  }
};

__device__ __forceinline__ void tell(const Found& row, index_t at, double* squares, int* lowest,
                                     Summary* summary) {
  squares[at] = row.squares;
  lowest[at] = row.lowest;
  if (row.largest == 0) return;
  const int largest = static_cast<int>(row.largest >> 52) - 1023;
  if (largest < LEAST || largest > MOST) {
    atomicMax(&summary->refused, 1ull);
    return;
  }
  const double norm = norm_of(row.squares);
  const int bits = exponent(norm) + 1 - row.lowest;  // norm < 2^(exponent + 1)
  atomicMax(&summary->bits, static_cast<unsigned long long>(bits > 0 ? bits : 0));
  atomicMax(&summary->sum, static_cast<unsigned long long>(__double_as_longlong(row.sum / norm *
                                                                                (1 + 1.0 / (1 << 19)))));
}

extern "C" __global__ void __launch_bounds__(THREADS)
    residue_rows(const real_t* __restrict__ x, index_t ld, index_t rows, index_t k,
                 double* __restrict__ squares, int* __restrict__ lowest, Summary* summary) {
  __shared__ Found of_warps[WARPS][32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  Found found{0.0, 0.0, 0, NO_BIT};
#if ALONG_K
  const index_t row = blockIdx.x;
  const real_t* const from = x + row * ld * PARTS;
  for (index_t c = threadIdx.x; c < k; c += THREADS) found.take_element(from + c * PARTS);
#pragma unroll
  for (int apart = 1; apart < 32; apart *= 2) found.add(found.of_lane(apart));
  if (lane == 0) of_warps[warp][0] = found;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int w = 1; w < WARPS; ++w) found.add(of_warps[w][0]);
    tell(found, row, squares, lowest, summary);
  }
#else
  const index_t row = static_cast<index_t>(blockIdx.x) * 32 + lane;
  if (row < rows) {
    for (index_t c = warp; c < k; c += WARPS) found.take_element(x + (c * ld + row) * PARTS);
  }
  of_warps[warp][lane] = found;
  __syncthreads();
  if (warp == 0 && row < rows) {
    for (int w = 1; w < WARPS; ++w) found.add(of_warps[w][lane]);
    tell(found, row, squares, lowest, summary);
  }
#endif
}
