#include "client/transport/clock.h"

#include "absl/time/clock.h"
#include "client/transport/steady_deadline.h"
#include "cpu_optimizer_service/common/system/steady_time.h"

namespace ballast::client {
namespace {

class RealClock final : public Clock {
 public:
  absl::Time Now() override { return SteadyNow(); }
  void SleepFor(absl::Duration duration) override { absl::SleepFor(duration); }
  void WaitFor(Mutex& mutex, CondVar& changed, absl::Duration duration)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) override {
    changed.WaitUntil(mutex, SteadyDeadline(duration));
  }
};

}  // namespace

Clock& Clock::Real() {
  static RealClock clock;
  return clock;
}

}  // namespace ballast::client
