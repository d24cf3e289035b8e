// A ring of slots in shared memory: one thread copies into them, two warpgroups multiply (sm_90a).
//
//   full    of each slot: all bytes that were announced have landed
//   empty   all warps that multiply have read it
//
// Behind the slots lie their barriers, 8 bytes each.
#pragma once

#include "common/mbarrier.cuh"

// A place in the ring, and the parity of the round that is going on there.
template <int COUNT>
struct RingPlace {
  int slot, parity;
  __device__ __forceinline__ void next() {
    if (++slot == COUNT) {
      slot = 0;
      parity ^= 1;
    }
  }
};

template <int COUNT, int BYTES>
struct SlotRing {
  shared_t slots, full, empty;

  __device__ __forceinline__ explicit SlotRing(const void* memory)
      : slots((shared_address(memory) + 1023) / 1024 * 1024),  // what the swizzle needs
        full(slots + COUNT * BYTES),
        empty(full + COUNT * 8) {}
  // By one thread, in front of a barrier of the thread block; `warps` read each slot.
  __device__ __forceinline__ void begin(int warps) const {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      barrier_init(full_at(i), 1);
      barrier_init(empty_at(i), warps);
    }
    barrier_init_fence();
  }
  __device__ __forceinline__ shared_t slot(int i) const { return slots + i * BYTES; }
  __device__ __forceinline__ shared_t full_at(int i) const { return full + i * 8; }
  __device__ __forceinline__ shared_t empty_at(int i) const { return empty + i * 8; }
};
