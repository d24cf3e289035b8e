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
inline void setp_ne_b32(bool& p, int a, int b) { p = a != b; }

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
inline void cp_async_commit_group() { copy_commit(); }
inline void cp_async_wait_group(int newest_left) { copy_wait(newest_left); }
inline void cp_async_wait_all() { copy_wait(-1); }

}  // namespace ptx
}  // namespace cuda_on_cpu
