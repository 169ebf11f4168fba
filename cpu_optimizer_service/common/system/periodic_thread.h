// A thread that calls a function periodically.
//
//   PeriodicThread thread("looks", std::chrono::seconds(1), [this] { Look(); });
//
// Declare it after all members that the function uses, so that it ends before they do.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_SYSTEM_PERIODIC_THREAD_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_SYSTEM_PERIODIC_THREAD_H_

#include <chrono>
#include <functional>
#include <thread>

#include "cpu_optimizer_service/common/system/mutex.h"

namespace ballast {

class PeriodicThread {
 public:
  // Calls `function` for the first time after one period, and then one period after each call has
  // returned. The thread has `name` in the system's tools, at most 15 bytes, which are not copied.
  PeriodicThread(const char* name, std::chrono::nanoseconds period, std::function<void()> function);
  // Returns at once, or after a running call; no further call begins. Not from the function itself.
  ~PeriodicThread();

 private:
  void Run();

  const char* const name_;
  const std::chrono::nanoseconds period_;
  const std::function<void()> function_;
  Mutex mutex_;
  CondVar stopping_;
  bool stopped_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_SYSTEM_PERIODIC_THREAD_H_
