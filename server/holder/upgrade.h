// What an operator asks of a service that runs, by the number of its parent, the holder: an upgrade, and
// whether another program could take over what it holds. Only the service's user, and root, may.
#ifndef BALLAST_SERVER_HOLDER_UPGRADE_H_
#define BALLAST_SERVER_HOLDER_UPGRADE_H_

#include <sys/types.h>

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"

namespace ballast::server {

// In which format the service keeps its jobs. NOT_FOUND, PERMISSION_DENIED; FAILED_PRECONDITION: the
// process is no holder, or one of another version; UNAVAILABLE: the service has not served yet. In
// one line.
absl::StatusOr<uint32_t> StateFormatOf(pid_t holder);

// Has it upgrade, and waits until the new program serves. A line for people. Besides as above;
// ABORTED: it goes on as it was, and why; DEADLINE_EXCEEDED: nothing came of it within `seconds`.
absl::StatusOr<std::string> Upgrade(pid_t holder, double seconds);

}  // namespace ballast::server

#endif  // BALLAST_SERVER_HOLDER_UPGRADE_H_
