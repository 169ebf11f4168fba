// Whether the system gives this process what gRPC takes as it starts.
#ifndef BALLAST_SERVER_BALLASTD_START_CHECK_H_
#define BALLAST_SERVER_BALLASTD_START_CHECK_H_

#include "absl/status/status.h"

namespace ballast::server {

// Takes as many threads and as much memory for a moment as the server takes when it starts.
// RESOURCE_EXHAUSTED: there is less; the message names the limits. gRPC itself would say nothing:
// where it gets no thread, its start waits for that thread without an end.
absl::Status CheckThatServerCanStart();

}  // namespace ballast::server

#endif  // BALLAST_SERVER_BALLASTD_START_CHECK_H_
