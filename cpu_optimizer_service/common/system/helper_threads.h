// A few threads for work that would delay the calling thread. They start with the first work, and
// stay.
//
// Threads of Priority::kLowest leave the processors to other threads. On busy processors each still
// gets 1.4% of one (nice 19 against nice 0: weights 15 and 1024), so that its work ends. Their work
// must not hold a lock that others wait for: it might hold it long.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_SYSTEM_HELPER_THREADS_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_SYSTEM_HELPER_THREADS_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <thread>
#include <vector>

#include "cpu_optimizer_service/common/system/mutex.h"

namespace ballast {

// Thread-safe. The caller of Run bounds the number of tasks. It gets std::bad_alloc if the system
// has no thread at all. Tasks do not throw.
class HelperThreads {
 public:
  enum class Priority : uint8_t { kNormal, kLowest };

  explicit HelperThreads(size_t most, Priority priority = Priority::kNormal)
      : most_(most), priority_(priority) {}
  ~HelperThreads() { Stop(); }

  void Run(std::function<void()> task);
  // Waits for running tasks. Drops tasks that have not begun, and later ones.
  void Stop();

 private:
  void Help();

  const size_t most_;
  const Priority priority_;
  Mutex mutex_;
  CondVar changed_;
  bool stopped_ ABSL_GUARDED_BY(mutex_) = false;
  size_t idle_ ABSL_GUARDED_BY(mutex_) = 0;
  std::deque<std::function<void()>> tasks_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::thread> threads_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_SYSTEM_HELPER_THREADS_H_
