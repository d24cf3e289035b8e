// Copies from global to shared memory that run on while a thread computes.
//
// A thread's copies since its last commit_copies() form a group, wait_copies<N>() returns once all
// groups but its N latest have landed, and a barrier after that shows them to the other threads.
// Chips before sm_80 have no such copies: there each one has landed when it is issued.
#pragma once

#ifdef __CUDA_ARCH__

// Copy BYTES = 4 or 16, both addresses aligned to them, where `exists`; leave the rest as it is.
// 16 bytes pass L1 by: they are used once per block. 4 bytes go through it, for a 32-byte sector
// of global memory is shared by copies of one thread, or of its neighbours, at different times.
template <int BYTES>
__device__ __forceinline__ void copy_async(float* shared, const float* global, bool exists) {
  static_assert(BYTES == 4 || BYTES == 16, "4 or 16 bytes");
#if __CUDA_ARCH__ >= 800
  const unsigned to = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  if constexpr (BYTES == 16) {
    asm volatile(
        "{\n .reg .pred exists;\n setp.ne.b32 exists, %2, 0;\n"
        " @exists cp.async.cg.shared.global [%0], [%1], 16;\n}" ::"r"(to),
        "l"(global), "r"(static_cast<int>(exists)));
  } else {
    asm volatile(
        "{\n .reg .pred exists;\n setp.ne.b32 exists, %2, 0;\n"
        " @exists cp.async.ca.shared.global [%0], [%1], 4;\n}" ::"r"(to),
        "l"(global), "r"(static_cast<int>(exists)));
  }
#else
  if (!exists) return;
  if constexpr (BYTES == 16) {
    *reinterpret_cast<float4*>(shared) = *reinterpret_cast<const float4*>(global);
  } else {
    *shared = *global;
  }
#endif
}

__device__ __forceinline__ void commit_copies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// A sum that stays where it is written: a compiler that sees several of them keeps all multiples
// of a step in registers, and spills.
__device__ __forceinline__ const float* advance(const float* from, long long bytes) {
  const float* to;
  asm("add.s64 %0, %1, %2;" : "=l"(to) : "l"(from), "l"(bytes));
  return to;
}

template <int LATEST>
__device__ __forceinline__ void wait_copies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(LATEST) : "memory");
#endif
}

#else  // host compilers: whoever runs a kernel there says when a copy lands

void emulate_copy(float* shared, const float* global, int bytes);
void emulate_commit();
void emulate_wait(int latest);

inline const float* advance(const float* from, long long bytes) { return from + bytes / 4; }
template <int BYTES>
inline void copy_async(float* shared, const float* global, bool exists) {
  if (exists) emulate_copy(shared, global, BYTES);
}
inline void commit_copies() { emulate_commit(); }
template <int LATEST>
inline void wait_copies() { emulate_wait(LATEST); }

#endif
