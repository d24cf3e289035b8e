// Instructions of PTX as functions: translate.py turns
//
//   asm volatile("cp.async.wait_group %0;" ::"n"(LATEST) : "memory");
//
// into ptx::cp_async_wait_group((LATEST)). "_" stands for ".", operands keep their order.
#pragma once

#include "cuda_on_cpu.h"

namespace cuda_on_cpu {
namespace ptx {
inline void fma_rn_f32(float& d, float a, float b, float c) { d = __builtin_fmaf(a, b, c); }
inline void mul_rn_f32(float& d, float a, float b) { d = a * b; }
inline void add_rn_f32(float& d, float a, float b) { d = a + b; }
inline void fma_rn_f64(double& d, double a, double b, double c) { d = __builtin_fma(a, b, c); }
inline void mul_rn_f64(double& d, double a, double b) { d = a * b; }
inline void add_rn_f64(double& d, double a, double b) { d = a + b; }
// Integers of 64 bits may be pointers: "l" operands are both.
template <class D, class A, class B>
void add_s64(D& d, A a, B b) { d = (D)((int64_t)a + (int64_t)b); }
template <class D, class A>
void mov_b32(D& d, A a) { d = a; }
inline void setp_ne_b32(bool& p, int a, int b) { p = a != b; }
// FP16 numbers are rounded to nearest even. The second operand is the lower half of d.
inline uint16_t half_bits(float a) {
  const double size = a < 0 ? -static_cast<double>(a) : a;
  const uint16_t sign = signbit(a) ? 0x8000 : 0;
  if (!(size == size)) return sign | 0x7fff;
  if (size >= 65520) return sign | 0x7c00;
  int exponent;  // of half's last place: -24 for subnormal numbers
  frexp(size, &exponent);
  exponent = size < 0x1p-14 ? -24 : exponent - 11;
  // A significand of 2^11 carries into the exponent, as it should.
  return sign | static_cast<uint16_t>(nearbyint(ldexp(size, -exponent)) + 1024 * (exponent + 24));
}
inline void cvt_rn_f16x2_f32(unsigned& d, float high, float low) {
  d = static_cast<unsigned>(half_bits(high)) << 16 | half_bits(low);
}
// The upper half of a float32, rounded to nearest even; of NaN no payload is lost.
inline unsigned bfloat_bits(float a) {
  const unsigned bits = cuda_on_cpu_bits<unsigned>(a);
  return a == a ? (bits + 0x7fff + (bits >> 16 & 1)) >> 16 : bits >> 16 | 1;
}
inline void cvt_rn_bf16x2_f32(unsigned& d, float high, float low) {
  d = bfloat_bits(high) << 16 | bfloat_bits(low);
}
inline void cvt_rn_f16_f32(uint16_t& d, float a) { d = half_bits(a); }
inline void cvt_f32_f16(float& d, uint16_t a) {
  const int exponent = a >> 10 & 31, significand = a & 1023;
  const float size = exponent == 31 ? (significand ? NAN : INFINITY)
                     : exponent ? ldexpf(1024 + significand, exponent - 25)
                                : ldexpf(significand, -24);
  d = a >> 15 ? -size : size;
}
// Blocks run one after the other: what is not there now is not there later either.
inline void ld_relaxed_gpu_global_u32(unsigned& word, const unsigned* from) {
  word = *static_cast<const volatile unsigned*>(from);
}
inline void ld_acquire_gpu_global_u32(unsigned& word, const unsigned* from) {
  word = *static_cast<const volatile unsigned*>(from);
}
inline void red_release_gpu_global_add_u32(unsigned* at, unsigned more) { *at += more; }

// AddressSanitizer looks here, in the kernel's own code: the copy itself comes later.
inline void touch(const void* memory, int bytes) {
#ifdef __SANITIZE_ADDRESS__
  for (int i = 0; i < bytes; ++i) (void)static_cast<const volatile char*>(memory)[i];
#endif
}

inline void cp_async_ca_shared_global(uint32_t to, const void* from, int bytes, int read) {
  touch(shared_pointer(to), bytes);
  touch(from, read);
  copy_issue(shared_pointer(to), from, bytes, read);
}
inline void cp_async_ca_shared_global(uint32_t to, const void* from, int bytes) {
  cp_async_ca_shared_global(to, from, bytes, bytes);
}
inline void cp_async_cg_shared_global(uint32_t to, const void* from, int bytes, int read) {
  if (bytes != 16) fail("cp.async.cg copies 16 bytes, not %d", bytes);
  cp_async_ca_shared_global(to, from, bytes, read);
}
inline void cp_async_cg_shared_global(uint32_t to, const void* from, int bytes) {
  cp_async_cg_shared_global(to, from, bytes, bytes);
}

// Four blocks of 8 rows by 16 bytes; lane 8 i + r names row r of block i.
inline void ldmatrix_sync_aligned_m8n8_x4_shared_b16(unsigned& d0, unsigned& d1, unsigned& d2,
                                                     unsigned& d3, uint32_t row) {
  if (row % 16) fail("ldmatrix reads 16 bytes from address %u", row);
  touch(shared_pointer(row), 16);
  const void* rows[4];
  matrix_rows(row, rows);
  const int word = threadIdx.x % 4;
  d0 = static_cast<const unsigned*>(rows[0])[word];
  d1 = static_cast<const unsigned*>(rows[1])[word];
  d2 = static_cast<const unsigned*>(rows[2])[word];
  d3 = static_cast<const unsigned*>(rows[3])[word];
}

inline void mma_sync_aligned_m16n8k16_row_col_f32_f16_f16_f32(
    float& d0, float& d1, float& d2, float& d3, unsigned a0, unsigned a1, unsigned a2, unsigned a3,
    unsigned b0, unsigned b1, float c0, float c1, float c2, float c3) {
  const unsigned a[] = {a0, a1, a2, a3}, b[] = {b0, b1};
  float sums[] = {c0, c1, c2, c3};
  warp_product(a, b, sums);
  d0 = sums[0], d1 = sums[1], d2 = sums[2], d3 = sums[3];
}

inline void cp_async_commit_group() { copy_commit(); }
inline void cp_async_wait_group(int newest_left) { copy_wait(newest_left); }
inline void cp_async_wait_all() { copy_wait(-1); }

}  // namespace ptx
}  // namespace cuda_on_cpu
