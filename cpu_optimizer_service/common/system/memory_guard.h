// For the few places from which an exception must not go further: bodies of tasks and threads,
// callbacks of a transport, calls that a peer makes. What runs out of memory there ends with it, and
// not the process. Any other exception is a bug, and is left to end it.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_SYSTEM_MEMORY_GUARD_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_SYSTEM_MEMORY_GUARD_H_

#include <new>
#include <stdexcept>
#include <utility>

#include "absl/status/status.h"

namespace ballast {

// False: there was no memory for all of `body` (std::bad_alloc, or std::length_error, which a size
// that no memory has gives).
template <typename Body>
[[nodiscard]] bool RunsInMemory(Body&& body) noexcept {
  try {
    std::forward<Body>(body)();
    return true;
  } catch (const std::bad_alloc&) {
  } catch (const std::length_error&) {
  }
  return false;
}

// Made at its first call: what has to say it later needs no memory for that.
inline const absl::Status& OutOfMemoryError() {
  static const absl::Status status = absl::ResourceExhaustedError(
      "the service's process has no memory for this; see its limits (ulimit -v, the control "
      "group), or try again later");
  return status;
}

// What `body` returns, a Status or StatusOr; or OutOfMemoryError.
template <typename Body>
auto OrOutOfMemory(Body&& body) -> decltype(std::forward<Body>(body)()) {
  try {
    return std::forward<Body>(body)();
  } catch (const std::bad_alloc&) {
  } catch (const std::length_error&) {
  }
  return OutOfMemoryError();
}

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_SYSTEM_MEMORY_GUARD_H_
