// CUDA C++ for a host compiler: what a kernel of kernels/ sees instead of a GPU.
//
// kernel text --translate.py--> host C++ --g++ -fsanitize=address,undefined--> with block.cpp,
//                                          a program that reads launches and writes results
//
// One thread block runs at a time, each of its threads on a stack of its own. A thread runs until
// it waits at a barrier; which one goes on next is drawn by chance. So whatever lacks a barrier is
// read before it is written, or overwritten before it is read. block.cpp has the rules, races.cpp the stricter ones.
#pragma once

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <type_traits>
#include <utility>

#if defined(__has_feature)  // clang's way to say so
#if __has_feature(address_sanitizer) && !defined(__SANITIZE_ADDRESS__)
#define __SANITIZE_ADDRESS__ 1
#endif
#endif

#define MULTIMM_CUDA_ON_CPU 1

// Kernels stand in an unnamed namespace (translate.py): all variables of this section are local.
// "used" keeps the optimiser from thinking that nobody else writes them.
#define __shared__ static __attribute__((section("cuda_shared"), used))
#define __constant__ static const
#define __global__
#define __device__
#define __host__
#define __grid_constant__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __launch_bounds__(...)
#define __syncthreads() ::cuda_on_cpu::block_barrier(__FILE__, __LINE__)
#define __syncwarp(...) ::cuda_on_cpu::warp_barrier(__FILE__, __LINE__, {__VA_ARGS__})
#define __shfl_sync(...) ::cuda_on_cpu::shuffle(__FILE__, __LINE__, 'i', __VA_ARGS__)
#define __shfl_xor_sync(...) ::cuda_on_cpu::shuffle(__FILE__, __LINE__, 'x', __VA_ARGS__)
#define __shfl_up_sync(...) ::cuda_on_cpu::shuffle(__FILE__, __LINE__, 'u', __VA_ARGS__)
#define __shfl_down_sync(...) ::cuda_on_cpu::shuffle(__FILE__, __LINE__, 'd', __VA_ARGS__)
#define __any_sync(...) ::cuda_on_cpu::any(__FILE__, __LINE__, __VA_ARGS__)
#define __syncthreads_or(...) (::cuda_on_cpu::block_count(__FILE__, __LINE__, __VA_ARGS__) > 0)
#define __syncthreads_and(...) (::cuda_on_cpu::block_count(__FILE__, __LINE__, !(__VA_ARGS__)) == 0)

struct dim3 {
  unsigned x, y, z;
};
extern dim3 threadIdx, blockIdx, blockDim, gridDim;
constexpr int warpSize = 32;

// Vectors have the alignment that CUDA gives them: a misaligned access is an error of UBSan.
#define CUDA_ON_CPU_VECTORS(scalar, name)                                              \
  struct alignas(2 * sizeof(scalar)) name##2 { scalar x, y; };                         \
  struct name##3 { scalar x, y, z; };                                                  \
  struct alignas(4 * sizeof(scalar) < 16 ? 4 * sizeof(scalar) : 16) name##4 {          \
    scalar x, y, z, w;                                                                 \
  };                                                                                   \
  inline name##2 make_##name##2(scalar x, scalar y) { return {x, y}; }                 \
  inline name##3 make_##name##3(scalar x, scalar y, scalar z) { return {x, y, z}; }    \
  inline name##4 make_##name##4(scalar x, scalar y, scalar z, scalar w) { return {x, y, z, w}; }
CUDA_ON_CPU_VECTORS(signed char, char)
CUDA_ON_CPU_VECTORS(unsigned char, uchar)
CUDA_ON_CPU_VECTORS(short, short)
CUDA_ON_CPU_VECTORS(unsigned short, ushort)
CUDA_ON_CPU_VECTORS(int, int)
CUDA_ON_CPU_VECTORS(unsigned int, uint)
CUDA_ON_CPU_VECTORS(long long, longlong)
CUDA_ON_CPU_VECTORS(unsigned long long, ulonglong)
CUDA_ON_CPU_VECTORS(float, float)
CUDA_ON_CPU_VECTORS(double, double)

namespace cuda_on_cpu {

// ---- block.cpp, and from dynamic_shared on memory.cpp ----
[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));
void block_barrier(const char* file, int line);
int block_count(const char* file, int line, bool holds);  // threads for which it does; a barrier
void warp_barrier_all(const char* file, int line);
// 32 places in which the lanes of a warp leave values for each other. Behind the next barrier of
// the warp come others: what was left stays until all lanes have come to the barrier after it.
uint64_t* warp_slots();
bool kept(int site);     // false for the one barrier, wait or commit that is to be left out
void* dynamic_shared();
uint32_t shared_address(const void* shared);
void* shared_pointer(uint32_t address);
void copy_issue(void* shared, const void* global, int bytes, int read_bytes);
void copy_commit();
void copy_wait(int newest_left);  // -1: everything, committed or not

// ---- tensor_cores.cpp ----
void matrix_rows(uint32_t row, const void* (&rows)[4]);
void warp_product(const unsigned (&a)[4], const unsigned (&b)[2], float (&sums)[4]);

struct Mask {
  unsigned lanes = 0xffffffffu;
};

inline void full_warp(const char* file, int line, unsigned lanes) {
  if (lanes != 0xffffffffu) fail("%s:%d: lanes %#x: only whole warps are run", file, line, lanes);
}

inline void warp_barrier(const char* file, int line, Mask mask) {
  full_warp(file, line, mask.lanes);
  warp_barrier_all(file, line);
}

template <class T>
T shuffle(const char* file, int line, char how, unsigned mask, T value, int arg, int width = 32) {
  static_assert(sizeof(T) <= 8, "a shuffle moves at most 8 bytes");
  full_warp(file, line, mask);
  const int lane = threadIdx.x % 32, first = lane / width * width;
  int source = how == 'i' ? first + arg % width
               : how == 'x' ? lane ^ arg : how == 'u' ? lane - arg : lane + arg;
  if (source < first || source >= first + width) source = lane;
  uint64_t* const slots = warp_slots();
  memcpy(slots + lane, &value, sizeof(T));
  warp_barrier_all(file, line);
  memcpy(&value, slots + source, sizeof(T));
  return value;
}

inline int any(const char* file, int line, unsigned mask, int predicate) {
  for (int other = 1; other < 32; other *= 2)
    predicate |= shuffle(file, line, 'x', mask, predicate, other);
  return predicate != 0;
}

// ---- how launches.cpp calls a kernel: by the types that the kernel itself declares ----
struct Value {
  char kind;  // 'p' pointer, 'i' integer, 'f' floating point, 's' struct of pointers and integers
  void* pointer;  // of a struct: its bytes
  int64_t integer;  // of a struct: how many
  double floating;
};

template <class T>
T argument(const Value& value, int position) {
  constexpr char kind = std::is_pointer<T>::value    ? 'p'
                        : std::is_integral<T>::value ? 'i'
                        : std::is_class<T>::value    ? 's'
                                                     : 'f';
  if (value.kind != kind)
    fail("argument %d: the kernel declares kind '%c', the call table gives '%c'", position, kind,
         value.kind);
  if constexpr (kind == 'p') {
    return static_cast<T>(value.pointer);
  } else if constexpr (kind == 'i') {
    return static_cast<T>(value.integer);
  } else if constexpr (kind == 's') {
    if (value.integer != sizeof(T))
      fail("argument %d: the kernel's struct has %d bytes, that of the call table %d", position,
           static_cast<int>(sizeof(T)), static_cast<int>(value.integer));
    T copy;
    memcpy(&copy, value.pointer, sizeof(T));
    return copy;
  } else {
    return static_cast<T>(value.floating);
  }
}

struct Kernel {
  const char* name;
  void* function;
  int arguments;
  void (*call)(void* function, const Value* values);
  Kernel* next;
  static Kernel* first;

  template <class... T>
  Kernel(const char* name_, void (*kernel)(T...))
      : name(name_),
        function(reinterpret_cast<void*>(kernel)),
        arguments(sizeof...(T)),
        call(&call_as<T...>),
        next(first) {
    first = this;
  }

  template <class... T>
  static void call_as(void* kernel, const Value* values) {
    call_with<T...>(reinterpret_cast<void (*)(T...)>(kernel), values,
                    std::index_sequence_for<T...>());
  }
  template <class... T, size_t... I>
  static void call_with(void (*kernel)(T...), const Value* values, std::index_sequence<I...>) {
    kernel(argument<T>(values[I], static_cast<int>(I))...);
  }
};

}  // namespace cuda_on_cpu

// ---- device functions ----
template <class T> inline T __ldg(const T* from) { return *from; }
template <class T> inline T __ldcs(const T* from) { return *from; }
template <class T> inline T __ldcg(const T* from) { return *from; }
template <class T> inline T __ldca(const T* from) { return *from; }
template <class T> inline void __stcs(T* to, T value) { *to = value; }
template <class T> inline void __stcg(T* to, T value) { *to = value; }
template <class T> inline T min(T a, T b) { return b < a ? b : a; }
template <class T> inline T max(T a, T b) { return a < b ? b : a; }
template <class To, class From> inline To cuda_on_cpu_bits(From from) {
  static_assert(sizeof(To) == sizeof(From), "as many bits");
  To to;
  memcpy(&to, &from, sizeof(To));
  return to;
}
inline unsigned __float_as_uint(float a) { return cuda_on_cpu_bits<unsigned>(a); }
inline int __float_as_int(float a) { return cuda_on_cpu_bits<int>(a); }
inline float __uint_as_float(unsigned a) { return cuda_on_cpu_bits<float>(a); }
inline float __int_as_float(int a) { return cuda_on_cpu_bits<float>(a); }
inline long long __double_as_longlong(double a) { return cuda_on_cpu_bits<long long>(a); }
inline int __double2hiint(double a) { return static_cast<int>(__double_as_longlong(a) >> 32); }
inline int __double2loint(double a) { return static_cast<int>(__double_as_longlong(a)); }
inline double __hiloint2double(int high, int low) {
  return cuda_on_cpu_bits<double>(static_cast<uint64_t>(static_cast<uint32_t>(high)) << 32 |
                                  static_cast<uint32_t>(low));
}
inline int __ffsll(long long a) { return __builtin_ffsll(a); }
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned from) {
  const uint64_t both = static_cast<uint64_t>(b) << 32 | a;
  unsigned picked = 0;
  for (int i = 0; i < 4; ++i)
    picked |= static_cast<unsigned>(both >> (from >> 4 * i & 7) * 8 & 0xff) << 8 * i;
  return picked;
}
inline int __float2int_rn(float a) { return static_cast<int>(__builtin_rintf(a)); }
inline float __int2float_rn(int a) { return static_cast<float>(a); }
inline float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline size_t __cvta_generic_to_shared(const void* p) { return cuda_on_cpu::shared_address(p); }
inline void* __cvta_shared_to_generic(size_t address) {
  return cuda_on_cpu::shared_pointer(static_cast<uint32_t>(address));
}
inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __trap() { cuda_on_cpu::fail("__trap() was called"); }
// One thread runs at a time: everything is atomic.
template <class T> inline T atomicAdd(T* at, T value) { T old = *at; *at += value; return old; }
template <class T> inline T atomicMax(T* at, T value) {
  const T old = *at;
  if (value > old) *at = value;
  return old;
}
template <class T> inline T atomicExch(T* at, T value) { T old = *at; *at = value; return old; }

#include "ptx.h"
