// Which kernels compute a product whose operands were packed as FP16 parts.
//
// split_pack.cu leaves two counts for each operand: elements that are not finite, and others that
// the parts do not carry. Where only the range of a row is too wide, broad_pack.cu packs once more.
// It leaves whether it did, and whether there are elements that its numbers do not carry either.
// Kernels that are launched before the host has seen the counts look here.
#pragma once

constexpr int CARRIED = 0;      // the product of the FP16 parts, and of a few elements beside them
constexpr int FROM_SOURCE = 1;  // FP32 multiply-adds of A and B themselves
constexpr int BROAD_RANGE = 2;  // the product of what broad_pack.cu has made

// Whether the FP16 parts carry too little of finite operands.
__device__ __forceinline__ bool is_broad(const unsigned long long* counts, unsigned long long cap) {
  return (counts[0] | counts[2]) == 0 && (counts[1] > cap || counts[3] > cap);
}

// Of the elements that are added apart there are `cap` at most; null: nothing was counted.
__device__ __forceinline__ int way_of(const unsigned long long* counts, unsigned long long cap) {
  if (!counts) return CARRIED;
  if (is_broad(counts, cap)) return counts[4] != 0 && counts[5] == 0 ? BROAD_RANGE : FROM_SOURCE;
  return (counts[0] | counts[2]) != 0 ? FROM_SOURCE : CARRIED;
}
