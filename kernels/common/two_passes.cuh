// Two passes over a matrix in one launch: tasks of thread blocks, in an order without deadlocks.
//
// A panel of rows is read by one pass, in spans, and then by the other, in runs, while it is still
// in L2. Blocks draw tickets; tasks in the order of their tickets, for ahead = 2:
//
//   first pass of panel 0 | of 1 | of 2 | second pass of 0 | first of 3 | second of 1 | ...
//                                                    ... | second of the last | of the one before
//
// The second pass waits for the first of its panel: for tickets below its own, which are held by
// blocks that run and never wait themselves. So nobody waits for ever, however few blocks run at a
// time, and in whatever order the hardware starts them.
#pragma once

#include "common/index.cuh"

// How a matrix is cut. 32 bits: the grid bounds the number of tasks.
struct Cut {
  unsigned panels, spans, runs;
  unsigned ahead;  // panels that are read once before the first is read again; at most all
};

struct Task {
  bool second;           // pass
  unsigned panel, part;  // part: a span, or a run
};

__device__ __forceinline__ unsigned tasks_of(const Cut& cut) {
  return cut.panels * (cut.spans + cut.runs);
}

__device__ __forceinline__ Task task_of(unsigned ticket, const Cut& cut) {
  const unsigned first = cut.ahead * cut.spans, both = cut.spans + cut.runs;
  if (ticket < first) return {false, ticket / cut.spans, ticket % cut.spans};
  ticket -= first;
  const unsigned panel = ticket / both, part = ticket % both, rest = cut.panels - cut.ahead;
  if (panel < rest) {
    if (part < cut.spans) return {false, cut.ahead + panel, part};
    return {true, panel, part - cut.spans};
  }
  ticket -= rest * both;
  // What was read last comes first: it is in L2.
  return {true, cut.panels - 1 - ticket / cut.runs, ticket % cut.runs};
}

// What a block leaves for another one is a word that is not 0, where 0 was before.
__device__ __forceinline__ void leave(unsigned* at, unsigned word) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(at), "r"(word) : "memory");
}

__device__ __forceinline__ unsigned look(const unsigned* at) {
  unsigned word;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(word) : "l"(at) : "memory");
  return word;
}
