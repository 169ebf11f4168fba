// Time as an interface, so that a test controls it.
#ifndef BALLAST_CLIENT_TRANSPORT_CLOCK_H_
#define BALLAST_CLIENT_TRANSPORT_CLOCK_H_

#include "absl/base/thread_annotations.h"
#include "absl/time/time.h"
#include "cpu_optimizer_service/common/system/mutex.h"

namespace ballast::client {

class Clock {
 public:
  virtual ~Clock() = default;
  // Only differences are meaningful: setting the host's clock does not change it.
  virtual absl::Time Now() = 0;
  virtual void SleepFor(absl::Duration duration) = 0;
  // Returns when `changed` is notified or `duration` has passed, or sooner.
  virtual void WaitFor(Mutex& mutex, CondVar& changed, absl::Duration duration)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) = 0;
  // The steady time of this host.
  static Clock& Real();
};

}  // namespace ballast::client

#endif  // BALLAST_CLIENT_TRANSPORT_CLOCK_H_
