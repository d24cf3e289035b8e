// Copies from global to shared memory that run on while a thread computes.
//
// A thread's copies since its last commit_copies() form a group, wait_copies<N>() returns once all
// groups but its N latest have landed, and a barrier after that shows them to the other threads.
// Chips before sm_80 have no such copies: there each one has landed when it is issued.
#pragma once

// Copy BYTES = 4 or 16, both addresses aligned to them, where `exists`; leave the rest as it is.
// Shared memory is addressed by 32 bits. TO and FROM, bytes, are added to the addresses by the
// instruction itself: a compiler that is left to add them may keep every sum in a register.
// 16 bytes pass L1 by: they are used once per block. 4 bytes go through it, for a 32-byte sector
// of global memory is shared by copies of one thread, or of its neighbours, at different times.
template <int BYTES, int TO, int FROM>
__device__ __forceinline__ void copy_async(unsigned to, const char* from, bool exists) {
  static_assert(BYTES == 4 || BYTES == 16, "4 or 16 bytes");
#if __CUDA_ARCH__ >= 800
  if constexpr (BYTES == 16) {
    asm volatile(
        "{\n .reg .pred exists;\n setp.ne.b32 exists, %2, 0;\n"
        " @exists cp.async.cg.shared.global [%0 + %3], [%1 + %4], 16;\n}" ::"r"(to),
        "l"(from), "r"(static_cast<int>(exists)), "n"(TO), "n"(FROM));
  } else {
    asm volatile(
        "{\n .reg .pred exists;\n setp.ne.b32 exists, %2, 0;\n"
        " @exists cp.async.ca.shared.global [%0 + %3], [%1 + %4], 4;\n}" ::"r"(to),
        "l"(from), "r"(static_cast<int>(exists)), "n"(TO), "n"(FROM));
  }
#else
  if (!exists) return;
  void* shared = __cvta_shared_to_generic(to + TO);
  if constexpr (BYTES == 16) {
    *static_cast<float4*>(shared) = *reinterpret_cast<const float4*>(from + FROM);
  } else {
    *static_cast<float*>(shared) = *reinterpret_cast<const float*>(from + FROM);
  }
#endif
}

__device__ __forceinline__ void commit_copies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

template <int LATEST>
__device__ __forceinline__ void wait_copies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(LATEST) : "memory");
#endif
}

// Sums that stay where they are written. A compiler that sees how several of them hang together
// keeps all multiples of a step, or one sum per unrolled turn, in registers, and spills.
__device__ __forceinline__ const char* advance(const char* from, long long bytes) {
  const char* to;
  asm("add.s64 %0, %1, %2;" : "=l"(to) : "l"(from), "l"(bytes));
  return to;
}
__device__ __forceinline__ int as_written(int sum) {
  int same;
  asm("mov.b32 %0, %1;" : "=r"(same) : "r"(sum));
  return same;
}
