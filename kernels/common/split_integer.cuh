// Sums of integers (INTEGER, with PARTS 1): see sgemm_split.cu.
//
// Of integers float32 holds all up to 2^24, and so do the tensor cores: `promote` slabs of products
// cannot go beyond. What they have summed is then added to 32-bit integers, modulo 2^32.
#pragma once

#include "common/index.cuh"

#ifdef INTEGER
typedef int sum_t;  // of P and of D
#else
typedef float sum_t;
#endif

// sums += total;  total = 0
template <int COUNT>
__device__ __forceinline__ void take_integers(int (&sums)[COUNT], float (&total)[COUNT]) {
#pragma unroll
  for (int j = 0; j < COUNT; ++j) {
    sums[j] = static_cast<int>(static_cast<unsigned>(sums[j]) +
                               static_cast<unsigned>(__float2int_rn(total[j])));
    total[j] = 0.0f;
  }
}

// A thread's part of a tile of D, as `Finish` of common/split_finish.cuh has it: pointers are at its
// first value, from which on `rows` and `cols` exist. It has pairs of neighbours in two rows, which
// are 8 apart; pairs are 8 columns apart.
template <int SUMS>
struct FinishIntegers {
  static constexpr int PAIRS = SUMS / 4;

  const int* p;  // null: there is none
  int* d;
  index_t ldp, ldd;
  int rows, cols;
  bool as_float;  // D is float32: each sum is rounded once

  // D = sums + P
  __device__ __forceinline__ void store(const int (&sums)[SUMS]) const {
    const unsigned long long lowest = reinterpret_cast<unsigned long long>(d) | ldd * 4;
    const bool wide = lowest % 8 == 0;  // the same in all threads
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int j = 0; j < PAIRS; ++j) {
        const int count = 8 * h < rows ? cols - 8 * j : 0;
        const int2 pair{value(sums[4 * j + 2 * h], h, 8 * j, count > 0),
                        value(sums[4 * j + 2 * h + 1], h, 8 * j + 1, count > 1)};
        int* const to = d + 8 * h * ldd + 8 * j;
        if (wide && count > 1) {
          *reinterpret_cast<int2*>(to) = pair;
        } else {
          if (count > 0) to[0] = pair.x;
          if (count > 1) to[1] = pair.y;
        }
      }
    }
  }

 private:
  __device__ __forceinline__ int value(int sum, int h, int col, bool there) const {
    if (p && there) {
      sum = static_cast<int>(static_cast<unsigned>(sum) +
                             static_cast<unsigned>(p[8 * h * ldp + col]));
    }
    return as_float ? __float_as_int(__int2float_rn(sum)) : sum;
  }
};
