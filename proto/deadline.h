// Deadlines of calls by a clock that is never set. gRPC keeps a deadline unchanged. If it is
// computed from the time of day, it moves when that is set.
#ifndef BALLAST_PROTO_DEADLINE_H_
#define BALLAST_PROTO_DEADLINE_H_

#include <grpc/support/time.h>

#include <algorithm>

#include "absl/time/time.h"

namespace ballast::proto {

// Bounded, so that an infinite limit does not overflow the clock.
inline gpr_timespec Deadline(absl::Duration limit) {
  const absl::Duration bounded = std::min(limit, absl::Hours(24 * 365));
  return gpr_time_add(gpr_now(GPR_CLOCK_MONOTONIC),
                      gpr_time_from_nanos(absl::ToInt64Nanoseconds(bounded), GPR_TIMESPAN));
}

}  // namespace ballast::proto

#endif  // BALLAST_PROTO_DEADLINE_H_
