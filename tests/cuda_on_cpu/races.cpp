// Two threads at one byte of shared memory, one of them writing, with no barrier between: an error,
// in whatever order they happened to run.
//
// The kernel is compiled with -fsanitize=thread, which calls a function at every access; these
// are here, in place of ThreadSanitizer's own. block.cpp counts the barriers that have opened.
#include <stdio.h>

#include <vector>

#include "block.h"

namespace cuda_on_cpu {

namespace {

constexpr int SEVERAL = -2, NOBODY = -1;

struct Access {
  unsigned epoch = 0, warp_epoch = 0;
  int thread = NOBODY, warp = NOBODY;  // or SEVERAL

  // Whether a barrier, or it being the same thread, puts this before what happens now.
  bool before_now() const {
    if (epoch != block_epoch || thread == NOBODY || thread == current) return true;
    return warp == current / 32 && warp_epoch < warp_epochs[warp];
  }

  void now() { *this = {block_epoch, warp_epochs[current / 32], current, current / 32}; }

  void join() {
    const bool fresh = epoch != block_epoch || thread == NOBODY;
    const int other = thread, other_warp = warp;
    now();
    if (!fresh && other != current) thread = SEVERAL;
    if (!fresh && other_warp != current / 32) warp = SEVERAL;
  }
};

struct Byte {
  Access written, read;
  int copying = NOBODY;  // the thread whose asynchronous copy is on its way here
};

std::vector<Byte> bytes;

Byte* first_byte(const void* at) {
  const ptrdiff_t offset = shared_offset(at);
  if (offset < 0) return nullptr;
  if (bytes.size() < shared_bytes() + 64) bytes.resize(shared_bytes() + 64);
  return &bytes[offset];
}

void race(const char* what, ptrdiff_t offset, const Access& other, const void* code) {
  fail("race in shared memory, byte %td: thread %d %s thread %d with no barrier between; code %p",
       offset, current, what, other.thread, code);
}

void check_copying(const Byte& b, ptrdiff_t offset, const void* code) {
  if (b.copying != NOBODY)
    fail("shared memory, byte %td: thread %d comes before the wait for the asynchronous copy of "
         "thread %d; code %p", offset, current, b.copying, code);
}

void on_read(const void* at, size_t size, const void* code) {
  Byte* first = first_byte(at);
  for (Byte* b = first; b && b < first + size; ++b) {
    check_copying(*b, b - bytes.data(), code);
    if (!b->written.before_now()) race("reads what was written by", b - bytes.data(), b->written, code);
    b->read.join();
  }
}

void on_write(const void* at, size_t size, const void* code) {
  Byte* first = first_byte(at);
  for (Byte* b = first; b && b < first + size; ++b) {
    check_copying(*b, b - bytes.data(), code);
    if (!b->read.before_now()) race("overwrites what was read by", b - bytes.data(), b->read, code);
    if (!b->written.before_now())
      race("overwrites what was written by", b - bytes.data(), b->written, code);
    b->written.now();
  }
}

}  // namespace

void race_block_begins() {
  for (Byte& b : bytes) b.copying = NOBODY;
}

void race_copy(void* to, int size, bool lands) {
  Byte* first = first_byte(to);
  for (Byte* b = first; b && b < first + size; ++b) b->copying = NOBODY;
  on_write(to, size, __builtin_return_address(0));
  for (Byte* b = first; b && b < first + size && !lands; ++b) b->copying = current;
}

}  // namespace cuda_on_cpu

extern "C" {
#define CUDA_ON_CPU_ACCESS(name, size)                                          \
  void __tsan_read##name(void* at) {                                            \
    cuda_on_cpu::on_read(at, size, __builtin_return_address(0));                \
  }                                                                             \
  void __tsan_write##name(void* at) {                                           \
    cuda_on_cpu::on_write(at, size, __builtin_return_address(0));               \
  }                                                                             \
  void __tsan_unaligned_read##name(void* at) {                                  \
    cuda_on_cpu::on_read(at, size, __builtin_return_address(0));                \
  }                                                                             \
  void __tsan_unaligned_write##name(void* at) {                                 \
    cuda_on_cpu::on_write(at, size, __builtin_return_address(0));               \
  }
CUDA_ON_CPU_ACCESS(1, 1)
CUDA_ON_CPU_ACCESS(2, 2)
CUDA_ON_CPU_ACCESS(4, 4)
CUDA_ON_CPU_ACCESS(8, 8)
CUDA_ON_CPU_ACCESS(16, 16)
void __tsan_read_range(void* at, size_t size) {
  cuda_on_cpu::on_read(at, size, __builtin_return_address(0));
}
void __tsan_write_range(void* at, size_t size) {
  cuda_on_cpu::on_write(at, size, __builtin_return_address(0));
}
void* __tsan_memcpy(void* to, const void* from, size_t size) {
  cuda_on_cpu::on_read(from, size, __builtin_return_address(0));
  cuda_on_cpu::on_write(to, size, __builtin_return_address(0));
  return memcpy(to, from, size);
}
void* __tsan_memset(void* to, int value, size_t size) {
  cuda_on_cpu::on_write(to, size, __builtin_return_address(0));
  return memset(to, value, size);
}
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
}
