#include "client/session/retry.h"

#include <algorithm>

namespace ballast::client {

absl::Duration Backoff::Next() {
  const absl::Time now = clock_.Now();
  const absl::Duration spaced = std::max(kShortest, next_ - (now - attempt_));
  // Cut at the deadline, so that a last attempt is made just then.
  const absl::Duration wait = std::max(absl::ZeroDuration(), std::min(spaced, deadline_ - now));
  attempt_ = now + wait;
  // A service that restarts is found soon after, and an absent one is not flooded with calls.
  next_ = std::min(2 * next_, absl::Seconds(1));
  return wait;
}

bool Backoff::Wait() {
  const absl::Duration wait = Next();
  if (wait == absl::ZeroDuration()) return false;
  clock_.SleepFor(wait);
  return true;
}

absl::Status Retry(Clock& clock, absl::Duration limit, const std::function<absl::Status()>& call,
                   const std::function<bool(const absl::Status&)>& may_heal) {
  Backoff backoff(clock, clock.Now() + limit);
  for (;;) {
    const absl::Status status = call();
    if (status.ok() || !may_heal(status) || !backoff.Wait()) return status;
  }
}

}  // namespace ballast::client
