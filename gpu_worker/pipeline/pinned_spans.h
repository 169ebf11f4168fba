// Pins the optimizer's memory, given in many pieces, in as few pieces as possible.
#ifndef BALLAST_GPU_WORKER_PIPELINE_PINNED_SPANS_H_
#define BALLAST_GPU_WORKER_PIPELINE_PINNED_SPANS_H_

#include <cstddef>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "gpu_worker/device/device.h"

namespace ballast::worker {

// Pins `spans`, some of which may be empty. Spans that share a page are pinned together, because
// pages are pinned whole and only once. `what` and errors as in Device::PinHost.
absl::StatusOr<std::vector<std::unique_ptr<HostMemory>>> PinSpans(
    Device& device, std::vector<absl::Span<std::byte>> spans, absl::string_view what);

}  // namespace ballast::worker

#endif  // BALLAST_GPU_WORKER_PIPELINE_PINNED_SPANS_H_
