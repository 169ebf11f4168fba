// An operator's requests to a running service, by the number of its parent, the holder: an upgrade,
// and whether another program could take over its state. Only the service's user and root may make
// them.
#ifndef BALLAST_SERVER_HOLDER_UPGRADE_H_
#define BALLAST_SERVER_HOLDER_UPGRADE_H_

#include <sys/types.h>

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"

namespace ballast::server {

// The format in which the service keeps its jobs. Errors in one line: NOT_FOUND, PERMISSION_DENIED;
// FAILED_PRECONDITION: the process is not a holder, or one of another version; UNAVAILABLE: the
// service has not served yet.
absl::StatusOr<uint32_t> StateFormatOf(pid_t holder);

// Upgrades it, and waits until the new program serves. Returns a line for people. Further errors:
// ABORTED: the old program continues, with the reason; DEADLINE_EXCEEDED: no result within
// `seconds`.
absl::StatusOr<std::string> Upgrade(pid_t holder, double seconds);

}  // namespace ballast::server

#endif  // BALLAST_SERVER_HOLDER_UPGRADE_H_
