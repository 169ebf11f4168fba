// A warning about an event that may be frequent: a line now and then, with its count.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_SYSTEM_RARE_WARNING_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_SYSTEM_RARE_WARNING_H_

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>

#include "cpu_optimizer_service/common/system/mutex.h"

namespace ballast {

// Thread-safe.
class RareWarning {
 public:
  using Clock = std::chrono::steady_clock;
  static constexpr std::chrono::seconds kEvery{10};

  explicit RareWarning(std::function<void(const std::string& line)> warn)
      : warn_(std::move(warn)) {}

  // The event happened. Unless the last line was less than kEvery ago, warns with line(count),
  // where `count` is the number of events since.
  template <typename Line>
  void Happened(const Line& line, Clock::time_point now = Clock::now()) {
    int64_t count = 0;
    {
      MutexLock lock(mutex_);
      ++count_;
      if (now - warned_ < kEvery) return;
      warned_ = now;
      count = std::exchange(count_, 0);
    }
    warn_(line(count));
  }

 private:
  const std::function<void(const std::string&)> warn_;
  Mutex mutex_;
  int64_t count_ ABSL_GUARDED_BY(mutex_) = 0;  // Since:
  Clock::time_point warned_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_SYSTEM_RARE_WARNING_H_
