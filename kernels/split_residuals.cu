// D += alpha * (R * B + A' * S)      what the packed parts of a product do not carry
//
//   A = A' + R, m x k; B = B' + S, n x k: A' and B' are the parts that split_pack.cu has made, R and
//   S its residuals, of which each has at most CAP, in any order
//   D   m x n, rows ldd apart: A' * B', times alpha, is in it already
//
// Most operands have no residuals, and the launch does nothing. It does nothing either where one is
// refused (common/refused.cuh).
//
//            64 columns, walked by the residuals of A: a thread has one column
//          +-----------+
//   64     |  tile of  |   residuals of B walk its columns: a thread has one row, SLOTS threads
//   rows   |     D     |   share the lines. An element of D belongs to one block, so that its sums
//          +-----------+   have one order: by line, then by k, R before S.
//
// Every block sorts the lists for itself, then takes one tile after the other.
//
// Cost: 8 bytes of parts read for each residual and each element of its row or column of D.

// What an editor, which sees this file alone, gets; see multimm/gpu/emulated/outliers.py.
#ifdef __CLANGD__
#define PARTS 2
#define CAP 1024
#endif
#if !defined(PARTS) || !defined(CAP)
#error "PARTS and CAP must be defined: see multimm.gpu.emulated.outliers"
#endif

#include "common/ieee.cuh"
#include "common/index.cuh"
#include "common/pack_map.cuh"
#include "common/refused.cuh"
#include "common/split.cuh"

static_assert(PARTS == 1 || PARTS == 2, "the high part, or the high and the low part");

typedef unsigned long long place_t;  // row * 2^32 + k
constexpr int SLOTS = THREADS / TILE;

struct Packed {
  index_t slabs;
  const unsigned short* tiles;
  const int* exponents;

  // An element of A' or B'.
  __device__ __forceinline__ float at(index_t row, index_t k) const {
    const int inside = static_cast<int>(k % TILE);
    const unsigned short* const from =
        tiles + (row / TILE * slabs + k / TILE) * PARTS * TILE_ELEMENTS + inside % VECTOR +
        swizzled(static_cast<int>(row % TILE), inside / VECTOR);
    float sum = value_of(from[0]);
    if (PARTS == 2) sum += value_of(from[TILE_ELEMENTS]) * LOW_UNIT;
    return taken_back(sum, power_of_two(exponents[row]));
  }
};

struct Sorted {
  place_t at[CAP];
  float values[CAP];
};

struct Residuals {
  const Sorted& sorted;
  int count;

  // The first one of this place, or of a later one.
  __device__ __forceinline__ int from(place_t place) const {
    int first = 0, last = count;
    while (first < last) {
      const int middle = (first + last) / 2;
      if (sorted.at[middle] < place) {
        first = middle + 1;
      } else {
        last = middle;
      }
    }
    return first;
  }
  __device__ __forceinline__ float value(place_t place) const {
    const int i = from(place);
    return i < count && sorted.at[i] == place ? sorted.values[i] : 0.0f;
  }
};

__device__ __forceinline__ void sort(Sorted& sorted, int count, const place_t* at,
                                     const float* values) {
  for (int i = threadIdx.x; i < count; i += THREADS) {
    const place_t place = at[i];
    int rank = 0;
    for (int j = 0; j < count; ++j) rank += at[j] < place;
    sorted.at[rank] = place;
    sorted.values[rank] = values[i];
  }
}

// Adds, to what thread `thread` has of the lines of D from `line0` on, the residuals of these
// lines; `there`: whether it has any. Its element of a line lies `line_step` apart from that of the
// next one. With `rests`, the other operand's residuals belong to it.
__device__ __forceinline__ void add_lines(const Residuals& residuals, index_t line0, bool there,
                                          const Packed& other, index_t other_row,
                                          const Residuals* rests, float alpha, float* d,
                                          index_t line_step) {
  const int last = residuals.from(static_cast<place_t>(line0 + TILE) << 32);
  const int slot = threadIdx.x / TILE;
  int end, number = 0;
  for (int first = residuals.from(static_cast<place_t>(line0) << 32); first < last; first = end) {
    const place_t line = residuals.sorted.at[first] >> 32;
    for (end = first + 1; end < last && residuals.sorted.at[end] >> 32 == line;) ++end;
    if (number++ % SLOTS != slot || !there) continue;
    float sum = 0.0f;
    for (int i = first; i < end; ++i) {
      const index_t k = static_cast<index_t>(residuals.sorted.at[i] & 0xffffffffu);
      float factor = other.at(other_row, k);
      if (rests) factor += rests->value(static_cast<place_t>(other_row) << 32 | k);
      sum = fma_rn(residuals.sorted.values[i], factor, sum);
    }
    float& sums = d[static_cast<index_t>(line) * line_step];
    // What has overflowed stays: with an infinity of the other sign it would be no number any more,
    // and with an infinite alpha neither, where the residuals have met zeros.
    if (magnitude_bits(sums) < INFINITE) sums = fma_rn(alpha, sum, sums);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    split_residuals(index_t m, index_t n, index_t k, float alpha,
                    const unsigned short* __restrict__ a_tiles, const int* __restrict__ ea,
                    index_t a_known, const place_t* __restrict__ a_at,
                    const float* __restrict__ a_values,
                    const unsigned short* __restrict__ b_tiles, const int* __restrict__ eb,
                    index_t b_known, const place_t* __restrict__ b_at,
                    const float* __restrict__ b_values, float* __restrict__ d, index_t ldd,
                    const unsigned long long* __restrict__ counts) {
  __shared__ Sorted a_sorted, b_sorted;
  // What was counted on the device, or else what the host knows.
  const int a_count = clip(counts ? static_cast<index_t>(counts[1]) : a_known, CAP);
  const int b_count = clip(counts ? static_cast<index_t>(counts[3]) : b_known, CAP);
  if (a_count + b_count == 0 || way_of(counts, CAP) != CARRIED) return;
  sort(a_sorted, a_count, a_at, a_values);
  sort(b_sorted, b_count, b_at, b_values);
  __syncthreads();  // both lists are there
  const Residuals of_a{a_sorted, a_count}, of_b{b_sorted, b_count};
  const index_t slabs = ceil_div(k, TILE), across = ceil_div(n, TILE);
  const Packed a{slabs, a_tiles, ea}, b{slabs, b_tiles, eb};
  const index_t tiles = ceil_div(m, TILE) * across;
  for (index_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const index_t row0 = tile / across * TILE, col0 = tile % across * TILE;
    const index_t row = row0 + threadIdx.x % TILE, col = col0 + threadIdx.x % TILE;
    add_lines(of_a, row0, col < n, b, col, b_count ? &of_b : nullptr, alpha, d + col, ldd);
    __syncthreads();  // R * B is in the tile
    add_lines(of_b, col0, row < m, a, row, nullptr, alpha, d + row * ldd, 1);
  }
}
