// Trying again, with growing waits, what the way to the service made fail.
#ifndef BALLAST_CLIENT_SESSION_RETRY_H_
#define BALLAST_CLIENT_SESSION_RETRY_H_

#include <functional>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "client/transport/clock.h"

namespace ballast::client {

// Waits between attempts: 20 ms, doubled up to 1 s, never past the deadline.
class Backoff {
 public:
  Backoff(Clock& clock, absl::Time deadline) : clock_(clock), deadline_(deadline) {}
  // False, without waiting, if the deadline has passed.
  bool Wait();
  // The same for those who wait in their own way: how long; zero if the deadline has passed.
  absl::Duration Next();
  absl::Duration left() const { return deadline_ - clock_.Now(); }

 private:
  Clock& clock_;
  const absl::Time deadline_;
  absl::Duration next_ = absl::Milliseconds(20);
};

// Calls `call`, which may be done twice, until its status is one that `may_heal` does not hold for,
// or `limit` has passed; returns the last status.
absl::Status Retry(Clock& clock, absl::Duration limit, const std::function<absl::Status()>& call,
                   const std::function<bool(const absl::Status&)>& may_heal = absl::IsUnavailable);

}  // namespace ballast::client

#endif  // BALLAST_CLIENT_SESSION_RETRY_H_
