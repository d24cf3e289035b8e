// What split_pack.cu gets, and how it is cut into tasks of thread blocks.
#pragma once

#include "common/index.cuh"
#include "common/pack_map.cuh"

typedef unsigned long long count_t;

struct Operand {  // members of 8 bytes each
  const float* x;
  index_t ld, rows, k;
  index_t along_k;  // whether neighbours in memory are neighbours along k
  index_t wide;     // whether every line begins at a multiple of 16 bytes
  index_t run;      // slabs that a block packs, at most HELD
  unsigned short* tiles;
  int* exponents;
  unsigned* maxima;   // R, zero before: the bits of the largest finite |x| of each row
  unsigned* arrived;  // R, zero before: blocks that have left the row's
  count_t* flags;     // both zero before
  count_t* residual_at;
  float* residuals;
};

struct Operands {
  Operand of[2];
};

// What a launch does: all; or one leaves maxima, and the next one takes them.
enum Stage { ALL, LEAVE, TAKE };

// What a block packs: some slabs of a panel.
struct Task {
  index_t panel, first, last;
  unsigned blocks;  // that share the panel
};

__device__ __forceinline__ unsigned panels_of(const Operand& x) {
  return static_cast<unsigned>(ceil_div(x.rows, 2 * TILE)) * 2;
}
__device__ __forceinline__ unsigned blocks_of(const Operand& x) {  // that share a panel
  return static_cast<unsigned>(ceil_div(ceil_div(x.k, TILE), x.run));
}

// Panel by panel, for who waits; else the neighbours in memory of panels one after the other.
__device__ __forceinline__ Task task_of(const Operand& x, unsigned number, int stage) {
  Task task;
  task.blocks = blocks_of(x);
  const unsigned panels = panels_of(x);
  const unsigned part = stage == ALL ? number % task.blocks : number / panels;
  task.panel = stage == ALL ? number / task.blocks : number % panels;
  task.first = part * x.run;
  task.last = min(task.first + x.run, ceil_div(x.k, TILE));
  return task;
}
