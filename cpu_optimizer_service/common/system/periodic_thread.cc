#include "cpu_optimizer_service/common/system/periodic_thread.h"

#include <pthread.h>

#include <utility>

namespace ballast {

PeriodicThread::PeriodicThread(const char* name, std::chrono::nanoseconds period,
                               std::function<void()> function)
    // thread_ is the last member, so all that Run uses is there when the thread begins.
    : name_(name), period_(period), function_(std::move(function)), thread_([this] { Run(); }) {}

PeriodicThread::~PeriodicThread() {
  {
    MutexLock lock(mutex_);
    stopped_ = true;
  }
  stopping_.NotifyAll();
  thread_.join();
}

void PeriodicThread::Run() {
  pthread_setname_np(pthread_self(), name_);
  while (true) {
    {
      MutexLock lock(mutex_);
      // It is counted from the end of the call before: a slow call is not followed by several at
      // once.
      const auto next = std::chrono::steady_clock::now() + period_;
      // A wait may also end without a reason: only the deadline or a stop counts.
      while (!stopped_ && stopping_.WaitUntil(mutex_, next)) continue;
      if (stopped_) return;
    }
    // Without the lock, which the destructor wants: it may then ask for the stop meanwhile.
    function_();
  }
}

}  // namespace ballast
