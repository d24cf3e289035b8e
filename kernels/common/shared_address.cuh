// Addresses in shared memory, as instructions take them.
#pragma once

typedef unsigned int shared_t;

__device__ __forceinline__ shared_t shared_address(const void* pointer) {
  return static_cast<shared_t>(__cvta_generic_to_shared(pointer));
}
