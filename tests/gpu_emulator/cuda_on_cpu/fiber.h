// A thread of control with a stack of its own, that runs when another of the same OS thread
// switches to it. Sanitizers are notified of every switch.
//
// Threads: a fiber belongs to the OS thread that made it.
#ifndef BALLAST_TESTS_GPU_EMULATOR_CUDA_ON_CPU_FIBER_H_
#define BALLAST_TESTS_GPU_EMULATOR_CUDA_ON_CPU_FIBER_H_

#include <cstddef>
#include <functional>

namespace ballast::worker::cuda {

class Fiber {
 public:
  // The one that the calling OS thread runs on already.
  Fiber();
  // Runs `body` when it is first switched to. `body` never returns: it switches away, and the fiber
  // may then be destroyed.
  Fiber(size_t stack_bytes, std::function<void()> body);
  ~Fiber();
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  // Returns when another switches back. Called on this fiber.
  void SwitchTo(Fiber& next);

 private:
  static void Enter(Fiber* self);
  void AfterSwitch();

  void* stack_pointer_ = nullptr;  // While it does not run.
  std::byte* mapping_ = nullptr;   // A guard page, then the stack.
  size_t mapping_bytes_ = 0;
  std::function<void()> body_;

  const void* stack_bottom_ = nullptr;  // As sanitizers ask for it.
  size_t stack_bytes_ = 0;
  [[maybe_unused]] void* fake_stack_ = nullptr;
  [[maybe_unused]] void* tsan_fiber_ = nullptr;
  Fiber* came_from_ = nullptr;
};

}  // namespace ballast::worker::cuda

#endif  // BALLAST_TESTS_GPU_EMULATOR_CUDA_ON_CPU_FIBER_H_
