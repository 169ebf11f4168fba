// How glibc's heap treats memory that is free again, in a process that receives messages.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_SYSTEM_HEAP_SETTINGS_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_SYSTEM_HEAP_SETTINGS_H_

#include <cstddef>
#include <functional>
#include <utility>

namespace ballast {

// Keeps free memory in the process, up to half a GiB at the end of each of the heap's arenas,
// instead of giving it back to the system after every few messages and faulting it in again. The
// first call counts. Thread-safe.
void KeepHeapWarm();

// Makes all threads share one arena of the heap, which can be given back to the system: of the
// arenas that threads otherwise get for themselves, up to 64 MiB each stay at the end, whatever is
// asked for. Threads keep small pieces of their own all the same, so they rarely meet. To be called
// before the first thread is started.
void KeepHeapInOneArena();

// Gives back to the system what has been free for a while, wherever it lies in the heap: after a
// burst of connections or of large requests free memory lies between used memory, where no
// threshold reaches it. What is taken again at once costs its faults four times a minute at most.
class HeapTrimmer {
 public:
  static constexpr size_t kKeptBytes = size_t{32} << 20;  // Less is not worth it.
  static constexpr int kShortestWait = 3;                 // In ticks.
  static constexpr int kLongestWait = 15;

  // Of this process.
  HeapTrimmer();
  HeapTrimmer(std::function<size_t()> free_bytes, std::function<void()> trim)
      : free_bytes_(std::move(free_bytes)), trim_(std::move(trim)) {}

  // To be called every second, by one thread.
  void Tick();

 private:
  const std::function<size_t()> free_bytes_;
  const std::function<void()> trim_;
  size_t always_free_bytes_ = static_cast<size_t>(-1);  // Since the wait began.
  int ticks_ = 0;                                       // Of the wait.
  int wait_ = kShortestWait;
};

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_SYSTEM_HEAP_SETTINGS_H_
