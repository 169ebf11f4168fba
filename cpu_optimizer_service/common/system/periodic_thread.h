// A thread that calls a function again and again.
//
//   PeriodicThread thread("looks", std::chrono::seconds(1), [this] { Look(); });
//
// As a member it comes after all that the function uses, so that it ends before that does.
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
  // returned. A call that has no memory ends there, and the next one comes as usual. The thread has
  // `name` in the system's tools, at most 15 bytes, which are not copied.
  PeriodicThread(const char* name, std::chrono::nanoseconds period, std::function<void()> function);
  // At once, or after a call that runs: no other one begins. Not from the function itself.
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
