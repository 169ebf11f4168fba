#include "tests/support/failing_memory.h"

#include <cstddef>
#include <cstdlib>
#include <new>

namespace ballast {

std::atomic<int64_t> left_until_failure = -1;
std::atomic<int64_t> failures = 0;
thread_local bool spared_from_failure = false;

}  // namespace ballast

namespace {

void* Allocate(std::size_t bytes, std::size_t alignment) {
  if (!ballast::spared_from_failure && ballast::left_until_failure.load() >= 0 &&
      ballast::left_until_failure.fetch_sub(1) == 0) {
    ++ballast::failures;
    throw std::bad_alloc();
  }
  void* const memory =
      alignment <= alignof(std::max_align_t)
          ? std::malloc(bytes == 0 ? 1 : bytes)
          : std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

}  // namespace

void* operator new(std::size_t bytes) { return Allocate(bytes, 1); }
void* operator new[](std::size_t bytes) { return Allocate(bytes, 1); }
void* operator new(std::size_t bytes, std::align_val_t alignment) {
  return Allocate(bytes, static_cast<std::size_t>(alignment));
}
void* operator new[](std::size_t bytes, std::align_val_t alignment) {
  return Allocate(bytes, static_cast<std::size_t>(alignment));
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t, std::align_val_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::size_t, std::align_val_t) noexcept { std::free(memory); }
