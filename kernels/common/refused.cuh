// Whether a product is computed from A and B themselves, for their FP16 parts do not carry them.
//
// split_pack.cu leaves two counts for each operand: elements that are not finite, and others that
// the parts do not carry. Kernels that are launched before the host has seen them look here.
#pragma once

// Of the `cap` others that are added apart there are not too many; null: nothing was counted.
__device__ __forceinline__ bool refused(const unsigned long long* counts, unsigned long long cap) {
  return counts && (counts[0] | counts[2] || counts[1] > cap || counts[3] > cap);
}
