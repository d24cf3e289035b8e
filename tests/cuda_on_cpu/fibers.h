// Stacks to switch between: cuda_on_cpu_switch(save, load) leaves one and goes on with another.
#pragma once

#include <stddef.h>
#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace cuda_on_cpu {

constexpr size_t STACK_BYTES = 256 * 1024;  // an AddressSanitizer report needs much of it

#if defined(__x86_64__)
extern "C" void cuda_on_cpu_switch(void** save, void* load);
asm(R"(
.text
.globl cuda_on_cpu_switch
.type cuda_on_cpu_switch, @function
cuda_on_cpu_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size cuda_on_cpu_switch, .-cuda_on_cpu_switch
)");

// The state of a fiber that will begin with `entry`, which never returns.
inline void* new_fiber(void* stack, void (*entry)()) {
  void** top = reinterpret_cast<void**>(static_cast<char*>(stack) + STACK_BYTES) - 2;
  *--top = nullptr;  // the return address of `entry`; the ABI's alignment counts it
  *--top = reinterpret_cast<void*>(entry);
  for (int i = 0; i < 6; ++i) *--top = nullptr;
  return top;
}
#else
// Slower: every switch is a system call.
inline void cuda_on_cpu_switch(void** save, void* load) {
  ucontext_t here;
  *save = &here;
  swapcontext(&here, static_cast<ucontext_t*>(load));
}

inline void* new_fiber(void* stack, void (*entry)()) {
  ucontext_t* context = static_cast<ucontext_t*>(stack);  // at the stack's far end
  getcontext(context);
  const size_t used = (sizeof(ucontext_t) + 63) / 64 * 64;
  context->uc_stack.ss_sp = static_cast<char*>(stack) + used;
  context->uc_stack.ss_size = STACK_BYTES - used;
  context->uc_link = nullptr;
  makecontext(context, entry, 0);
  return context;
}
#endif

}  // namespace cuda_on_cpu
