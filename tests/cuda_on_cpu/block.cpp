// Runs a grid: one block after the other, in drawn order.
//
// A block's threads are fibers. The one to go on is drawn among those that can, and runs until it
// waits or ends. A barrier opens when all threads of the block (of the warp) wait at it; when
// nobody can go on and that is not so, the barrier was reached by some threads only: an error.
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

#include <algorithm>
#include <string>
#include <vector>

#include "block.h"
#include "fibers.h"

dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace cuda_on_cpu {

Kernel* Kernel::first = nullptr;
int current = 0;  // the running thread
unsigned block_epoch = 0, warp_epochs[32];
int left_out = -1;
bool sites_reached[MAX_SITES];

namespace {

enum State { READY, AT_BLOCK, AT_WARP, ENDED };

struct Thread {
  void* stack = nullptr;
  void* saved = nullptr;
  State state = ENDED;
  const char* file = "";
  int line = 0;
};

std::vector<Thread> threads;
std::vector<int> ready;
int running = 0;
void* scheduler = nullptr;
const Grid* grid = nullptr;
uint64_t random_state = 1;
std::vector<uint64_t> slots;

unsigned draw(unsigned below) {  // xorshift64*
  random_state ^= random_state >> 12;
  random_state ^= random_state << 25;
  random_state ^= random_state >> 27;
  return static_cast<unsigned>((random_state * 2685821657736338717ull >> 33) % below);
}

void fiber() {
  grid->kernel->call(grid->kernel->function, grid->values);
  threads[current].state = ENDED;
  cuda_on_cpu_switch(&threads[current].saved, scheduler);
}

void wait(State state, const char* file, int line) {
  Thread& t = threads[current];
  t.state = state;
  t.file = file;
  t.line = line;
  cuda_on_cpu_switch(&t.saved, scheduler);
}

void resume(int index) {
  current = index;
  const unsigned i = static_cast<unsigned>(index);
  threadIdx = {i % blockDim.x, i / blockDim.x % blockDim.y, i / blockDim.x / blockDim.y};
  cuda_on_cpu_switch(&scheduler, threads[index].saved);
}

std::string where(int index) {
  const Thread& t = threads[index];
  char text[512];
  if (t.state == ENDED) {
    snprintf(text, sizeof text, "thread %d has ended", index);
  } else {
    snprintf(text, sizeof text, "thread %d waits at %s:%d for its %s", index, t.file, t.line,
             t.state == AT_WARP ? "warp" : "block");
  }
  return text;
}

// Open the barrier at which threads first ... last - 1 wait, if all of them do.
bool open_barrier(int first, int last, State state) {
  for (int i = first; i < last; ++i) {
    const Thread &t = threads[i], &other = threads[first];
    if (t.state != state || t.line != other.line) return false;
    if (t.file != other.file && strcmp(t.file, other.file)) return false;  // mostly the same text
  }
  for (int i = first; i < last; ++i) {
    threads[i].state = READY;
    ready.push_back(i);
  }
  ++(state == AT_BLOCK ? block_epoch : warp_epochs[first / 32]);
  return true;
}

void divergent() {
  int other = 0;
  while (other + 1 < running && threads[other].state == threads[0].state &&
         threads[other].line == threads[0].line)
    ++other;
  fail("a barrier was reached by some threads only: %s, but %s", where(0).c_str(),
       where(other).c_str());
}

void run_block() {
  ++block_epoch;
  begin_shared(*grid);
  ready.clear();
  for (int i = 0; i < running; ++i) {
    Thread& t = threads[i];
    t.saved = new_fiber(t.stack, fiber);
    t.state = READY;
    ready.push_back(i);
  }
  for (;;) {
    while (!ready.empty()) {
      const unsigned pick = draw(static_cast<unsigned>(ready.size()));
      const int index = ready[pick];
      ready[pick] = ready.back();
      ready.pop_back();
      resume(index);
      const int warp = index / 32 * 32;
      if (threads[index].state == AT_WARP) open_barrier(warp, std::min(warp + 32, running), AT_WARP);
    }
    const auto ended = [](const Thread& t) { return t.state == ENDED; };
    if (std::all_of(threads.begin(), threads.begin() + running, ended)) return;
    if (!open_barrier(0, running, AT_BLOCK)) divergent();
  }
}

}  // namespace

void run_grid(const Grid& given) {
  grid = &given;
  gridDim = given.blocks;
  blockDim = given.threads;
  random_state = given.seed * 2 + 1;
  for (int i = 0; i < 8; ++i) draw(2);  // small seeds make small numbers at first
  running = static_cast<int>(blockDim.x * blockDim.y * blockDim.z);
  if (running < 1 || running > 1024) fail("a block of %d threads: 1 to 1024 are allowed", running);
  if (static_cast<int>(threads.size()) < running) threads.resize(running);
  for (Thread& t : threads)
    if (!t.stack)
      t.stack = mmap(nullptr, STACK_BYTES, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  slots.assign((running + 31) / 32 * 64, 0);
  std::vector<unsigned> order(size_t(gridDim.x) * gridDim.y * gridDim.z);
  for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<unsigned>(i);
  for (size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[draw(i)]);
  for (unsigned block : order) {
    blockIdx = {block % gridDim.x, block / gridDim.x % gridDim.y, block / gridDim.x / gridDim.y};
    run_block();
  }
}

// ---- what kernels call ----
void fail(const char* format, ...) {
  va_list args;
  va_start(args, format);
  fprintf(stderr, "cuda_on_cpu: block (%u, %u, %u) thread %d: ", blockIdx.x, blockIdx.y, blockIdx.z,
          current);
  vfprintf(stderr, format, args);
  fprintf(stderr, "\n");
  va_end(args);
  _Exit(3);
}

void block_barrier(const char* file, int line) {
  asm volatile("" ::: "memory");
  wait(AT_BLOCK, file, line);
  asm volatile("" ::: "memory");
}

// Counted apart for even and odd epochs: nobody is two barriers ahead of who has yet to look.
int block_count(const char* file, int line, bool holds) {
  static int counts[2];
  static unsigned epochs[2];
  const unsigned epoch = block_epoch;
  int& count = counts[epoch % 2];
  if (epochs[epoch % 2] != epoch) count = 0, epochs[epoch % 2] = epoch;
  count += holds;
  block_barrier(file, line);
  return count;
}

void warp_barrier_all(const char* file, int line) { wait(AT_WARP, file, line); }

uint64_t* warp_slots() {
  const int warp = current / 32;
  return &slots[warp * 64 + warp_epochs[warp] % 2 * 32];
}

bool kept(int site) {
  sites_reached[site] = true;
  return site != left_out;
}

}  // namespace cuda_on_cpu
