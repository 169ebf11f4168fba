#include "gpu_worker/buckets/non_finite.h"

#include "gpu_worker/base/log.h"

namespace ballast::worker {

void LogNonFinite(const Layout& layout, int rank, uint64_t step, uint32_t micro_step,
                  const std::optional<NonFinite>& found) {
  if (!found.has_value()) return;
  Log().warn("step {} micro-step {}: rank {} has a gradient of {} at element {} of {}", step,
             micro_step, rank, found->value, found->element,
             layout.spec().parameters[found->parameter].name);
}

}  // namespace ballast::worker
