// Whether the system gives this process what gRPC needs at its start.
#ifndef BALLAST_SERVER_BALLASTD_START_CHECK_H_
#define BALLAST_SERVER_BALLASTD_START_CHECK_H_

#include "absl/status/status.h"

namespace ballast::server {

// For a moment takes as many threads and as much memory as the server takes at its start.
// RESOURCE_EXHAUSTED: the system has less; the message names the limits. gRPC itself would report
// nothing: without a thread its start waits forever.
absl::Status CheckThatServerCanStart();

}  // namespace ballast::server

#endif  // BALLAST_SERVER_BALLASTD_START_CHECK_H_
