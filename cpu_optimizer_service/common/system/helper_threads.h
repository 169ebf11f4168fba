// A few threads for work that would hold up the thread that has it to do. They are started when
// there is work, and stay.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_SYSTEM_HELPER_THREADS_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_SYSTEM_HELPER_THREADS_H_

#include <deque>
#include <functional>
#include <thread>
#include <vector>

#include "cpu_optimizer_service/common/system/mutex.h"

namespace ballast {

// Thread-safe. The caller of Run bounds the number of tasks; it may get a std::bad_alloc.
class HelperThreads {
 public:
  explicit HelperThreads(size_t most) : most_(most) {}
  // Waits for tasks that run; those that have not begun are dropped.
  ~HelperThreads();

  void Run(std::function<void()> task);

 private:
  void Help();

  const size_t most_;
  Mutex mutex_;
  CondVar changed_;
  bool stopped_ ABSL_GUARDED_BY(mutex_) = false;
  size_t idle_ ABSL_GUARDED_BY(mutex_) = 0;
  std::deque<std::function<void()>> tasks_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::thread> threads_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_SYSTEM_HELPER_THREADS_H_
