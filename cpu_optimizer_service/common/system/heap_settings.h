// How glibc's heap treats freed memory, in a process that receives messages.
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

// Makes all threads share one arena of the heap, which can be given back to the system. Otherwise
// each thread's arena keeps up to 64 MiB at its end, whatever the settings. Threads still cache
// small pieces, so they rarely contend. Call it before the first thread starts.
void KeepHeapInOneArena();

// Gives memory that has been free for a while back to the system, wherever it lies in the heap.
// After a burst of connections or large requests free memory lies between used memory, where no
// threshold reaches it. Memory that is needed again at once costs its faults at most four times a
// minute.
class HeapTrimmer {
 public:
  static constexpr size_t kKeptBytes = size_t{32} << 20;  // Less is not worth it.
  static constexpr int kShortestWait = 3;                 // In ticks.
  static constexpr int kLongestWait = 15;

  // Of this process.
  HeapTrimmer();
  HeapTrimmer(std::function<size_t()> free_bytes, std::function<void()> trim)
      : free_bytes_(std::move(free_bytes)), trim_(std::move(trim)) {}

  // Call it every second, from one thread.
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
