// The local optimizer's state and arithmetic on the device, with the bits of the scalar references.
// Fp32 gradients, master weights and moments of this rank's partition stay there: 16 bytes an
// element.
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

// `weights(chunk)` and payloads are device memory. `device`, `layout` and `groups` are borrowed
// until destruction, before which all payloads are released. RESOURCE_EXHAUSTED with the sizes.
absl::StatusOr<std::unique_ptr<LocalArithmetic>> MakeDeviceArithmetic(
    Device& device, const Layout& layout, absl::Span<const GroupSpec> groups, int rank,
    WeightsAt weights);

}  // namespace ballast::worker

#endif  // BALLAST_GPU_WORKER_PIPELINE_DEVICE_ARITHMETIC_H_
