// The local optimizer's state and arithmetic on the device, with the bits of the scalar references.
// Fp32 master weights and moments of this rank's partition stay there, 12 bytes an element. If a
// step has several pushes of a chunk, there is also an fp32 sum of gradients, 4 bytes an element.
#ifndef BALLAST_GPU_WORKER_PIPELINE_DEVICE_ARITHMETIC_H_
#define BALLAST_GPU_WORKER_PIPELINE_DEVICE_ARITHMETIC_H_

#include <memory>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "cpu_optimizer_service/common/job_spec.h"
#include "cpu_optimizer_service/common/layout.h"
#include "gpu_worker/device/device.h"
#include "gpu_worker/training/local_arithmetic.h"
#include "gpu_worker/training/optimizer.h"

namespace ballast::worker {

// `sums`: a step may have several pushes of a chunk. Without that a payload is the gradient itself,
// read in place, and released by ForgetGradients. `weights(chunk)` and payloads are device memory;
// those of adjacent chunks in a flat space are adjacent. `device`, `layout` and `groups` are
// borrowed until destruction, before which all payloads are released. RESOURCE_EXHAUSTED with the
// sizes.
absl::StatusOr<std::unique_ptr<LocalArithmetic>> MakeDeviceArithmetic(
    Device& device, const Layout& layout, absl::Span<const GroupSpec> groups, int rank, bool sums,
    WeightsAt weights);

}  // namespace ballast::worker

#endif  // BALLAST_GPU_WORKER_PIPELINE_DEVICE_ARITHMETIC_H_
