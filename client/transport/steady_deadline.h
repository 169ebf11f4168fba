// The end of a wait that begins now.
#ifndef BALLAST_CLIENT_TRANSPORT_STEADY_DEADLINE_H_
#define BALLAST_CLIENT_TRANSPORT_STEADY_DEADLINE_H_

#include <algorithm>
#include <chrono>

#include "absl/time/time.h"

namespace ballast::client {

inline std::chrono::steady_clock::time_point SteadyDeadline(absl::Duration limit) {
  // Bounded, so that an infinite limit does not overflow the clock.
  return std::chrono::steady_clock::now() +
         absl::ToChronoMilliseconds(std::min(limit, absl::Hours(24 * 365)));
}

}  // namespace ballast::client

#endif  // BALLAST_CLIENT_TRANSPORT_STEADY_DEADLINE_H_
