// What becomes of a thread's sums of sgemm_split: scaled, added to P and C, stored.
//
// A thread has values of a tile as the tensor cores leave them (common/wgmma.cuh, common/mma.cuh):
// pairs of neighbours in two rows, which are 8 apart; pairs are 8 columns apart. Four lanes have 32
// neighbouring bytes, one sector.
#pragma once

#include "common/index.cuh"
#ifdef BROAD
#include "common/broad.cuh"
constexpr int SHIFT = BROAD_SHIFT;  // rows are packed as numbers 2^SHIFT times as large
#else
constexpr int SHIFT = 0;
#endif

// Two neighbouring values of a row, of which `count` exist; `wide`: their addresses are aligned.
__device__ __forceinline__ float2 load_pair(const float* from, index_t at, int count, bool wide) {
  if (wide && count >= 2) return *reinterpret_cast<const float2*>(from + at);
  return float2{count > 0 ? from[at] : 0.0f, count > 1 ? from[at + 1] : 0.0f};
}
__device__ __forceinline__ void store_pair(float* to, index_t at, float2 pair, int count,
                                           bool wide) {
  if (wide && count >= 2) {
    *reinterpret_cast<float2*>(to + at) = pair;
  } else {
    if (count > 0) to[at] = pair.x;
    if (count > 1) to[at + 1] = pair.y;
  }
}

// 2^e as the product of two factors, each a normal number for the exponents of packed rows. The
// first factors of a row and of a column multiply to half of the whole scale: sums times that over-
// or underflow only where the result does.
struct Scale {
  float first, second;
};
__device__ __forceinline__ Scale scale_of(int e) {
  const int half = e >> 1;
  return {__int_as_float((half + 127) << 23), __int_as_float((e - half + 127) << 23)};
}

// A thread's part of a tile of D, and what becomes of its sums. Pointers are at its first value,
// from which on `rows` and `cols` exist. It has SUMS values, in PAIRS pairs of each of its two rows.
template <int SUMS>
struct Finish {
  static constexpr int PAIRS = SUMS / 4;

  const int* ea;  // null: A and B were not read
  const int* eb;
  const float* c;
  const float* p;
  float* d;
  index_t ldc, ldp, ldd;
  int rows, cols;
  float alpha, beta;

  __device__ __forceinline__ int count(int j, int h) const {
    return 8 * h < rows ? cols - 8 * j : 0;
  }
  __device__ __forceinline__ bool wide() const {
    const unsigned long long lowest = reinterpret_cast<unsigned long long>(d) |
                                      reinterpret_cast<unsigned long long>(c) |
                                      reinterpret_cast<unsigned long long>(p);
    return (lowest | (ldd | (c ? ldc : 0) | (p ? ldp : 0)) * 4) % 8 == 0;
  }

  // Lay sums down in D, unscaled, on the way to the next slabs.
  __device__ __forceinline__ void keep(const float (&sums)[SUMS]) const {
    const bool aligned = wide();
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int j = 0; j < PAIRS; ++j) {
        const float2 values{sums[4 * j + 2 * h], sums[4 * j + 2 * h + 1]};
        store_pair(d, 8 * h * ldd + 8 * j, values, count(j, h), aligned);
      }
    }
  }

  // Add what keep() left in D.
  __device__ __forceinline__ void add_kept(float (&sums)[SUMS]) const {
    const bool aligned = wide();
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int j = 0; j < PAIRS; ++j) {
        const float2 kept = load_pair(d, 8 * h * ldd + 8 * j, count(j, h), aligned);
        sums[4 * j + 2 * h] += kept.x;
        sums[4 * j + 2 * h + 1] += kept.y;
      }
    }
  }

  // D = alpha * (2^(ea + eb) * sums + P) + beta * C; PLAIN: without P and C
  template <bool PLAIN>
  __device__ __forceinline__ void store(const float (&sums)[SUMS]) const {
    // Loads on their way.
    constexpr int TOGETHER = PLAIN && PAIRS % 16 == 0 ? 16 : PLAIN && PAIRS % 8 == 0 ? 8
                             : PAIRS % 4 == 0 ? 4 : 2;
    static_assert(PAIRS % TOGETHER == 0, "every pair is stored");
    const bool aligned = wide();
    const bool pairs = (reinterpret_cast<unsigned long long>(d) | ldd * 4) % 8 == 0;
    const bool shifted = reinterpret_cast<unsigned long long>(d) % 8 != 0;
    Scale a[2] = {};
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (ea && 8 * h < rows) a[h] = scale_of(ea[8 * h] - SHIFT);
    }
    float2 before[2];  // the pairs left of those that are being made
#pragma unroll
    for (int first = 0; first < PAIRS; first += TOGETHER) {
      int2 e[TOGETHER];
      float2 pv[2][TOGETHER], cv[2][TOGETHER];
#pragma unroll
      for (int i = 0; i < TOGETHER; ++i) {
        const int j = first + i;
        e[i] = int2{0, 0};  // there is an even number of exponents: they come in pairs
        if (eb && 8 * j < cols) e[i] = *reinterpret_cast<const int2*>(eb + 8 * j);
#pragma unroll
        for (int h = 0; h < 2 && !PLAIN; ++h) {
          pv[h][i] = load_pair(p, 8 * h * ldp + 8 * j, p ? count(j, h) : 0, aligned);
          cv[h][i] = load_pair(c, 8 * h * ldc + 8 * j, c ? count(j, h) : 0, aligned);
        }
      }
#pragma unroll
      for (int i = 0; i < TOGETHER; ++i) {
        const int j = first + i;
        const Scale b[2] = {scale_of(e[i].x - SHIFT), scale_of(e[i].y - SHIFT)};
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          float2 pair;
          pair.x = value<PLAIN>(sums[4 * j + 2 * h], a[h], b[0], pv[h][i].x, cv[h][i].x);
          pair.y = value<PLAIN>(sums[4 * j + 2 * h + 1], a[h], b[1], pv[h][i].y, cv[h][i].y);
          if (j > 0) store_shifted<false>(j - 1, h, before[h], pair.x, pairs, shifted);
          before[h] = pair;
        }
      }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      store_shifted<true>(PAIRS - 1, h, before[h], 0.0f, pairs, shifted);
    }
  }

  // Store pair j of row h, where neighbours are aligned. Otherwise (`shifted`) the second value and
  // the first one of the pair to the right are: that is the next lane's, or for the fourth lane
  // the first one's pair j + 1, whose own first value is `after`. With `pairs` no row is shifted.
  template <bool LAST>
  __device__ __forceinline__ void store_shifted(int j, int h, float2 pair, float after, bool pairs,
                                                bool shifted) const {
    const int lane = threadIdx.x % 4;
    float right = 0.0f;
    if (!pairs) {  // the same in all threads
      right = __shfl_sync(~0u, lane == 0 ? after : pair.x, (lane + 1) % 4, 4);
    }
    const index_t at = 8 * h * ldd + 8 * j;
    const int left = count(j, h);
    if (!shifted) {
      store_pair(d, at, pair, left, true);
    } else {
      if (j == 0 && lane == 0 && left > 0) d[at] = pair.x;
      store_pair(d, at + 1, float2{pair.y, right}, LAST && lane == 3 ? min(left - 1, 1) : left - 1,
                 true);
    }
  }

  template <bool PLAIN>
  __device__ __forceinline__ float value(float sum, Scale a, Scale b, float pv, float cv) const {
    const float product = sum * (a.first * b.first) * (a.second * b.second);
    if (PLAIN) return alpha * product;
    const float whole = p ? product + pv : product;
    return c ? fmaf(alpha, whole, beta * cv) : alpha * whole;
  }
};
