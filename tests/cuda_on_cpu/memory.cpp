// Shared memory: its addresses, what it holds at first, and asynchronous copies into it.
//
// Compiled without sanitizers: it may look at, and fill, what the kernel may not.
#include <vector>

#include "block.h"

extern "C" {
// The shared variables of the kernels, if there are any: the linker names the ends of a section.
extern char __start_cuda_shared[] __attribute__((weak));
extern char __stop_cuda_shared[] __attribute__((weak));
}

namespace cuda_on_cpu {
namespace {

constexpr unsigned char NAN_BYTE = 0xFF;  // four of them are a NaN
constexpr uint32_t DYNAMIC = 1u << 30;    // shared addresses: static ones below, dynamic above

struct Copy {
  void* to;
  const void* from;
  int bytes, read_bytes, group;
};

struct Copies {  // of one thread
  int group = 0;  // that the next commit closes
  std::vector<Copy> waiting;
};

const Grid none{};  // before the first launch
const Grid* grid = &none;
std::vector<Copies> copies;

// Shared addresses have 32 bits on a GPU too, and the alignment of the pointer up to 1024 bytes.
char* static_base() {
  return __start_cuda_shared - reinterpret_cast<uintptr_t>(__start_cuda_shared) % 1024;
}

}  // namespace

void begin_shared(const Grid& given) {
  grid = &given;
  copies.assign(given.threads.x * given.threads.y * given.threads.z, Copies());
  // Byte by byte: memset would refuse the red zones between the variables.
  for (volatile char* at = __start_cuda_shared; at < __stop_cuda_shared; ++at)
    *at = static_cast<char>(NAN_BYTE);
  for (size_t i = 0; i < grid->dynamic_bytes; ++i) grid->dynamic[i] = static_cast<char>(NAN_BYTE);
  if (race_block_begins) race_block_begins();
}

void* dynamic_shared() { return grid->dynamic; }

size_t shared_bytes() { return __stop_cuda_shared - __start_cuda_shared + grid->dynamic_bytes; }

ptrdiff_t shared_offset(const void* pointer) {
  const char* at = static_cast<const char*>(pointer);
  if (at >= __start_cuda_shared && at < __stop_cuda_shared) return at - __start_cuda_shared;
  if (at >= grid->dynamic && at < grid->dynamic + grid->dynamic_bytes)
    return at - grid->dynamic + (__stop_cuda_shared - __start_cuda_shared);
  return -1;
}

uint32_t shared_address(const void* shared) {
  const char* at = static_cast<const char*>(shared);
  if (at >= __start_cuda_shared && at <= __stop_cuda_shared)
    return static_cast<uint32_t>(at - static_base());
  if (at >= grid->dynamic && at <= grid->dynamic + grid->dynamic_bytes)
    return DYNAMIC + static_cast<uint32_t>(at - grid->dynamic);
  fail("the shared address of something that is not in shared memory was asked for");
}

void* shared_pointer(uint32_t address) {
  return address >= DYNAMIC ? grid->dynamic + (address - DYNAMIC) : static_base() + address;
}

// Nothing may look at the destination before the wait: it is NaN until then. What is copied is
// what the source holds at the wait.
void copy_issue(void* to, const void* from, int bytes, int read_bytes) {
  if (bytes != 4 && bytes != 8 && bytes != 16)
    fail("an asynchronous copy has 4, 8 or 16 bytes, not %d", bytes);
  if (read_bytes < 0 || read_bytes > bytes)
    fail("an asynchronous copy of %d bytes cannot read %d", bytes, read_bytes);
  if (reinterpret_cast<uintptr_t>(to) % bytes || reinterpret_cast<uintptr_t>(from) % bytes)
    fail("an asynchronous copy of %d bytes from %p to %p is misaligned", bytes, from, to);
  if (race_copy) race_copy(to, bytes, false);
  memset(to, NAN_BYTE, bytes);
  Copies& mine = copies[current];
  mine.waiting.push_back({to, from, bytes, read_bytes, mine.group});
}

void copy_commit() { ++copies[current].group; }

void copy_wait(int newest_left) {
  Copies& mine = copies[current];
  size_t left = 0;
  for (const Copy& copy : mine.waiting) {
    if (newest_left >= 0 && copy.group >= mine.group - newest_left) {
      mine.waiting[left++] = copy;
      continue;
    }
    if (race_copy) race_copy(copy.to, copy.bytes, true);
    memset(copy.to, 0, copy.bytes);
    memcpy(copy.to, copy.from, copy.read_bytes);
  }
  mine.waiting.resize(left);
}

}  // namespace cuda_on_cpu
