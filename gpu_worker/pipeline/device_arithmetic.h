// The local optimizer's state and arithmetic on the device, with the bits of the scalar references.
// Fp32 master weights and moments of this rank's partition stay there, 12 bytes an element; and an
// fp32 sum of gradients, 4 more, only where a step has several pushes of a chunk.
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
// read where it is, and released by ForgetGradients. `weights(chunk)` and payloads are device
// memory; those of chunks that follow one another in a flat space lie one after the other.
// `device`, `layout` and `groups` are borrowed until destruction, before which all payloads are
// released. RESOURCE_EXHAUSTED with the sizes.
absl::StatusOr<std::unique_ptr<LocalArithmetic>> MakeDeviceArithmetic(
    Device& device, const Layout& layout, absl::Span<const GroupSpec> groups, int rank, bool sums,
    WeightsAt weights);

}  // namespace ballast::worker

#endif  // BALLAST_GPU_WORKER_PIPELINE_DEVICE_ARITHMETIC_H_
