// Reads launches from standard input, runs them, and writes what their buffers then hold.
//
// Numbers have 8 bytes, in the order of program.py. Compiled without sanitizers.
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

#include <string>
#include <vector>

#include "block.h"

namespace cuda_on_cpu {
namespace {

template <class T>
T read() {
  T value;
  if (fread(&value, sizeof value, 1, stdin) != 1) fail("the input ends too early");
  return value;
}

// Memory of which only some spans are given and looked at: the rest costs nothing (zeros that
// nobody touches), so a matrix may be larger than the machine.
struct Buffer {
  struct Span {
    uint64_t offset, bytes;
  };
  char* data;
  uint64_t bytes;
  bool sparse;
  std::vector<Span> spans;
};

Buffer read_buffer() {
  Buffer b{};
  b.bytes = read<uint64_t>();
  b.sparse = b.bytes >= (1u << 28);
  if (b.sparse) {
    void* at = mmap(nullptr, b.bytes, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED) fail("no address space for %llu bytes", (unsigned long long)b.bytes);
    b.data = static_cast<char*>(at);
  } else {
    // As cudaMalloc: 256-byte aligned. To the byte, so that the red zone follows at once.
    b.data = nullptr;
    void* at = nullptr;
    if (posix_memalign(&at, 256, b.bytes)) fail("no memory for %llu bytes", (unsigned long long)b.bytes);
    b.data = static_cast<char*>(at);
  }
  b.spans.resize(read<uint64_t>());
  for (auto& span : b.spans) {
    span = {read<uint64_t>(), read<uint64_t>()};
    if (span.bytes && fread(b.data + span.offset, span.bytes, 1, stdin) != 1)
      fail("the input ends too early");
  }
  return b;
}

Value read_value(const std::vector<Buffer>& buffers) {
  Value v{};
  v.kind = static_cast<char>(read<uint64_t>());
  const int64_t buffer = read<int64_t>();
  v.integer = read<int64_t>();
  v.floating = read<double>();
  if (v.kind == 'p' && buffer >= 0) v.pointer = buffers[buffer].data + v.integer;
  if (v.kind == 's') {  // of so many pointers and integers, which follow; never given back
    auto* members = new std::vector<uint64_t>;
    for (int64_t i = 0; i < v.integer; ++i) {
      const Value member = read_value(buffers);
      members->push_back(member.kind == 'p' ? reinterpret_cast<uintptr_t>(member.pointer)
                                            : static_cast<uint64_t>(member.integer));
    }
    v.pointer = members->data();
    v.integer *= 8;
  }
  return v;
}

dim3 read_dim3() {
  dim3 d{};
  for (unsigned* side : {&d.x, &d.y, &d.z}) *side = static_cast<unsigned>(read<uint64_t>());
  return d;
}

void run_launch() {
  std::string name(read<uint64_t>(), ' ');
  for (char& letter : name) letter = read<char>();
  Grid grid{};
  grid.blocks = read_dim3();
  grid.threads = read_dim3();
  grid.dynamic_bytes = read<uint64_t>();
  grid.seed = read<uint64_t>();
  std::vector<Buffer> buffers(read<uint64_t>());
  for (Buffer& b : buffers) b = read_buffer();
  std::vector<Value> values(read<uint64_t>());
  for (Value& v : values) v = read_value(buffers);
  grid.values = values.data();

  for (const Kernel* k = Kernel::first; k; k = k->next)
    if (name == k->name) grid.kernel = k;
  if (!grid.kernel) fail("no kernel is called %s", name.c_str());
  if (grid.kernel->arguments != static_cast<int>(values.size()))
    fail("%s declares %d parameters, the call table gives %d", name.c_str(),
         grid.kernel->arguments, static_cast<int>(values.size()));
  void* arena = nullptr;
  if (posix_memalign(&arena, 1024, grid.dynamic_bytes)) fail("no memory");
  grid.dynamic = static_cast<char*>(arena);
  run_grid(grid);
  free(arena);
  for (const Buffer& b : buffers) {
    for (const auto& span : b.spans) fwrite(b.data + span.offset, 1, span.bytes, stdout);
    b.sparse ? static_cast<void>(munmap(b.data, b.bytes)) : free(b.data);
  }
  fflush(stdout);
}

}  // namespace
}  // namespace cuda_on_cpu

// The argument is the number of the barrier, wait or commit to leave out. After the results of
// all launches come the numbers of those that were reached.
int main(int argc, char** argv) {
  using namespace cuda_on_cpu;
  if (argc > 1) left_out = atoi(argv[1]);
  for (uint64_t launches = read<uint64_t>(); launches > 0; --launches) run_launch();
  for (int site = 0; site < MAX_SITES; ++site)
    if (sites_reached[site]) fwrite(&site, sizeof site, 1, stdout);
  return 0;
}
