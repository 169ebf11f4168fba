// Repeats calls that failed because the service could not be reached, with growing waits.
#ifndef BALLAST_CLIENT_SESSION_RETRY_H_
#define BALLAST_CLIENT_SESSION_RETRY_H_

#include <functional>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "client/transport/clock.h"

namespace ballast::client {

// Waits between attempts: 20 ms, doubled up to 1 s, less what the attempt before took, and never
// past the deadline. So a service that is back is found within a second.
class Backoff {
 public:
  Backoff(Clock& clock, absl::Time deadline) : clock_(clock), deadline_(deadline) {}
  // False, without waiting, if the deadline has passed.
  bool Wait();
  // How long to wait, for callers that wait themselves. Zero if the deadline has passed.
  absl::Duration Next();
  absl::Duration left() const { return deadline_ - clock_.Now(); }

 private:
  static constexpr absl::Duration kShortest = absl::Milliseconds(20);

  Clock& clock_;
  const absl::Time deadline_;
  absl::Duration next_ = kShortest;
  absl::Time attempt_ = clock_.Now();  // When the last one began.
};

// Calls `call`, which may be done twice, until `may_heal` returns false for its status or `limit`
// has passed. Returns the last status.
absl::Status Retry(Clock& clock, absl::Duration limit, const std::function<absl::Status()>& call,
                   const std::function<bool(const absl::Status&)>& may_heal = absl::IsUnavailable);

}  // namespace ballast::client

#endif  // BALLAST_CLIENT_SESSION_RETRY_H_
