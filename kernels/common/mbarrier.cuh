// Barriers in shared memory that also count bytes, and the bulk copies that arrive at them (sm_90).
//
// A barrier completes a phase when it has seen the expected number of arrivals and all bytes that
// were announced; waiting names the parity of the phase. Addresses are 32-bit offsets into shared
// memory. What arrives here was read by tensor cores or written by bulk copies, never by ordinary
// accesses, so nothing wider than the instructions' default order is asked for.
#pragma once

#include "common/shared_address.cuh"

__device__ __forceinline__ void barrier_init(shared_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes initialised barriers visible to bulk copies.
__device__ __forceinline__ void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void barrier_arrive(shared_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrive, and announce bytes that copies will bring in this phase.
__device__ __forceinline__ void barrier_expect(shared_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// Wait until the phase of this parity is complete. The instruction sleeps for a while by itself.
__device__ __forceinline__ void barrier_wait(shared_t barrier, int parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra over;\n"
      "bra again;\n"
      "over:\n"
      "}\n" ::"r"(barrier), "r"(parity)
      : "memory");
}

// Copy `bytes` from global to shared memory; all three are multiples of 16.
__device__ __forceinline__ void copy_bulk(shared_t to, const void* from, int bytes,
                                          shared_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(to), "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(barrier)
      : "memory");
}
