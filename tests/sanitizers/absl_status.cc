// absl::Status counts its copies in headers, which ThreadSanitizer sees, but lets go of them in its library,
// which it does not see: each last release would look like a race with the copies before it. This takes
// that function's place in the tsan preset, in code that is instrumented.
#include <atomic>

#include "absl/status/internal/status_internal.h"
#include "absl/status/status.h"

void absl::Status::UnrefNonInlined(uintptr_t rep) {
  status_internal::StatusRep* counted = RepToPointer(rep);
  if (counted->ref.fetch_sub(1, std::memory_order_acq_rel) == 1) delete counted;
}
