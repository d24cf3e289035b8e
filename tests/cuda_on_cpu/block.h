// What block.cpp, memory.cpp, launches.cpp and races.cpp know of each other.
#pragma once

#include "cuda_on_cpu.h"

namespace cuda_on_cpu {

constexpr int MAX_SITES = 4096;

struct Grid {
  const Kernel* kernel;
  const Value* values;
  dim3 blocks, threads;
  uint64_t seed;
  char* dynamic;  // dynamic shared memory
  size_t dynamic_bytes;
};

// ---- block.cpp ----
void run_grid(const Grid& grid);
extern int left_out;                   // number of the barrier, wait or commit to leave out
extern bool sites_reached[MAX_SITES];  // the numbers of those that a thread came to
extern int current;                    // the running thread
extern unsigned block_epoch;           // barriers that have opened
extern unsigned warp_epochs[32];

// ---- memory.cpp ----
void begin_shared(const Grid& grid);           // all NaN, as every block finds it
ptrdiff_t shared_offset(const void* pointer);  // in all shared memory; negative: elsewhere
size_t shared_bytes();

// ---- races.cpp, in programs that look for races ----
void race_block_begins() __attribute__((weak));
void race_copy(void* to, int bytes, bool lands) __attribute__((weak));

}  // namespace cuda_on_cpu
