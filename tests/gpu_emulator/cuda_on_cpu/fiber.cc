#include "tests/gpu_emulator/cuda_on_cpu/fiber.h"

#include <sys/mman.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <utility>

#include "tests/support/sanitizers.h"

#if BALLAST_ASAN
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#if BALLAST_TSAN
#include <sanitizer/tsan_interface.h>
#endif

// The registers that a call keeps, and the stack pointer. swapcontext does the same with two system
// calls more, which is a hundred times slower: kernels switch at every shuffle.
//
//   ballast_switch_stack(save, next): stores the stack pointer at `save`, and goes on where `next`
//   was stored.
//   ballast_fiber_start: where a new fiber goes on; calls its entry with its argument.
extern "C" void ballast_switch_stack(void** save, void* next);
extern "C" void ballast_fiber_start();

#if defined(__x86_64__)
asm(R"(
.text
.globl ballast_switch_stack
.type ballast_switch_stack, @function
ballast_switch_stack:
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
.size ballast_switch_stack, .-ballast_switch_stack
.globl ballast_fiber_start
.type ballast_fiber_start, @function
ballast_fiber_start:
  movq %r12, %rdi
  callq *%r13
  ud2
.size ballast_fiber_start, .-ballast_fiber_start
)");
#elif defined(__aarch64__)
asm(R"(
.text
.globl ballast_switch_stack
.type ballast_switch_stack, @function
ballast_switch_stack:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
.size ballast_switch_stack, .-ballast_switch_stack
.globl ballast_fiber_start
.type ballast_fiber_start, @function
ballast_fiber_start:
  mov x0, x19
  blr x20
  brk #0
.size ballast_fiber_start, .-ballast_fiber_start
)");
#else
#error "fibers are written for x86-64 and for 64-bit Arm"
#endif

namespace ballast::worker::cuda {
namespace {

constexpr size_t kGuardBytes = 4096;

// How far below its end a stack begins: were it the same for all, they would meet in the same few
// lines of the caches.
size_t NextStackOffset() {
  static std::atomic<size_t> stacks = 0;
  return stacks++ % 32 * 576;
}

// What ballast_switch_stack finds on a new fiber's stack; returns the stack pointer.
void* FirstFrame(std::byte* top, void (*entry)(Fiber*), Fiber* self) {
  auto** words = reinterpret_cast<void**>(top);
  void* const start = reinterpret_cast<void*>(&ballast_fiber_start);
#if defined(__x86_64__)
  // r15, r14, r13, r12, rbx, rbp, the return address. At the entry's call the stack pointer is a
  // multiple of 16, as the ABI wants it.
  words -= 9;
  void* const frame[] = {nullptr, nullptr, reinterpret_cast<void*>(entry),
                         self,    nullptr, nullptr,
                         start,   nullptr, nullptr};
#else
  // x19 to x30, d8 to d15.
  words -= 20;
  void* frame[20] = {self, reinterpret_cast<void*>(entry)};
  frame[11] = start;
#endif
  size_t i = 0;
  for (void* const word : frame) words[i++] = word;
  return words;
}

}  // namespace

Fiber::Fiber() {
#if BALLAST_TSAN
  tsan_fiber_ = __tsan_get_current_fiber();
#endif
}

Fiber::Fiber(size_t stack_bytes, std::function<void()> body) : body_(std::move(body)) {
  mapping_bytes_ = kGuardBytes + stack_bytes;
  void* const mapping = mmap(nullptr, mapping_bytes_, PROT_READ | PROT_WRITE,
                             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapping == MAP_FAILED || mprotect(mapping, kGuardBytes, PROT_NONE) != 0) {
    std::perror("no memory for a fiber's stack");
    std::abort();
  }
  mapping_ = static_cast<std::byte*>(mapping);
  stack_bottom_ = mapping_ + kGuardBytes;
  stack_bytes_ = stack_bytes;
  stack_pointer_ = FirstFrame(mapping_ + mapping_bytes_ - NextStackOffset(), &Fiber::Enter, this);
#if BALLAST_TSAN
  tsan_fiber_ = __tsan_create_fiber(0);
#endif
}

Fiber::~Fiber() {
  if (mapping_ == nullptr) return;
#if BALLAST_TSAN
  __tsan_destroy_fiber(tsan_fiber_);
#endif
#if BALLAST_ASAN
  ASAN_UNPOISON_MEMORY_REGION(mapping_, mapping_bytes_);  // For the next user of these pages.
#endif
  munmap(mapping_, mapping_bytes_);
}

void Fiber::SwitchTo(Fiber& next) {
  next.came_from_ = this;
#if BALLAST_ASAN
  __sanitizer_start_switch_fiber(&fake_stack_, next.stack_bottom_, next.stack_bytes_);
#endif
#if BALLAST_TSAN
  __tsan_switch_to_fiber(next.tsan_fiber_, 0);
#endif
  ballast_switch_stack(&stack_pointer_, next.stack_pointer_);
  AfterSwitch();
}

void Fiber::AfterSwitch() {
#if BALLAST_ASAN
  // Only the sanitizer knows the OS thread's own stack; it returns it here.
  const void* bottom = nullptr;
  size_t bytes = 0;
  __sanitizer_finish_switch_fiber(fake_stack_, &bottom, &bytes);
  came_from_->stack_bottom_ = bottom;
  came_from_->stack_bytes_ = bytes;
#endif
}

void Fiber::Enter(Fiber* self) {
  self->AfterSwitch();
  self->body_();
  std::fputs("a fiber's body has returned\n", stderr);
  std::abort();
}

}  // namespace ballast::worker::cuda
