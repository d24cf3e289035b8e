// What the lanes of a warp do together for their tensor core.
//
// Apart from the kernel, and so without sanitizers: products are asked for by the million, and all
// that they touch is registers. Shared memory is read by the kernel itself (ptx.h), where it is
// watched.
#include "block.h"

namespace cuda_on_cpu {

namespace {

// A lane's part of both factors.
struct Factors {
  double a[4][2], b[2][2];
};

// What each FP16 number is: found once.
double half_value(unsigned bits) {
  static float values[1 << 16];
  static bool known = false;
  for (int i = 0; !known && i < 1 << 16; ++i) ptx::cvt_f32_f16(values[i], static_cast<uint16_t>(i));
  known = true;
  return values[bits & 0xffff];
}

}  // namespace

// Of four blocks of 8 rows, those that this lane reads of; lane 8 i + r names row r of block i.
void matrix_rows(uint32_t row, const void* (&rows)[4]) {
  const int lane = threadIdx.x % 32;
  uint64_t* const named = warp_slots();
  named[lane] = row;
  warp_barrier_all(__FILE__, __LINE__);
  for (int i = 0; i < 4; ++i) rows[i] = shared_pointer(named[8 * i + lane / 4]);
}

// Adds to this lane's four sums of m16n8k16. They are rounded once, to nearest: exact ones tell
// nothing of how tensor cores round.
void warp_product(const unsigned (&a)[4], const unsigned (&b)[2], float (&sums)[4]) {
  static Factors factors[64][32];  // of two products of each warp: see warp_slots()
  const int lane = threadIdx.x % 32;
  Factors* const lanes = factors[current / 32 * 2 + warp_epochs[current / 32] % 2];
  Factors& mine = lanes[lane];
  for (int odd = 0; odd < 2; ++odd) {
    for (int i = 0; i < 4; ++i) mine.a[i][odd] = half_value(a[i] >> 16 * odd);
    for (int i = 0; i < 2; ++i) mine.b[i][odd] = half_value(b[i] >> 16 * odd);
  }
  warp_barrier_all(__FILE__, __LINE__);
  double exact[] = {sums[0], sums[1], sums[2], sums[3]};
  for (int k = 0; k < 16; ++k) {
    const int at = k % 8 / 2, odd = k % 2, upper = k / 8;
    const Factors& row = lanes[lane / 4 * 4 + at];
    for (int i = 0; i < 2; ++i) {
      const double other = lanes[(lane % 4 * 2 + i) * 4 + at].b[upper][odd];
      for (int h = 0; h < 2; ++h) exact[2 * h + i] += row.a[2 * upper + h][odd] * other;
    }
  }
  for (int i = 0; i < 4; ++i) sums[i] = static_cast<float>(exact[i]);
}

}  // namespace cuda_on_cpu
