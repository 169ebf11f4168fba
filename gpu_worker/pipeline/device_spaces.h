// The device memory of a model's flat spaces: weights in bf16 and gradients in fp32; by group, as
// long as its buckets reach.
#ifndef BALLAST_GPU_WORKER_PIPELINE_DEVICE_SPACES_H_
#define BALLAST_GPU_WORKER_PIPELINE_DEVICE_SPACES_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "gpu_worker/device/device.h"
#include "gpu_worker/training/training_job.h"

namespace ballast::worker {

struct DeviceSpaces {
  std::vector<std::unique_ptr<DeviceMemory>> weights;
  std::vector<std::unique_ptr<DeviceMemory>> gradients;

  template <typename T>
  static std::vector<T*> PointersTo(const std::vector<std::unique_ptr<DeviceMemory>>& spaces) {
    std::vector<T*> pointers;
    for (const auto& space : spaces) pointers.push_back(space->template as<T>());
    return pointers;
  }
  std::vector<absl::Span<std::byte>> WeightBytes() const;
};

// A rank's needs on the device besides activations.
struct DeviceNeeds {
  bool provisional_weights = false;  // Provisional weights of its partition.
  int world_size = 1;
};

// Allocates the spaces for `needs`. Errors are Device::Allocate's, explained.
absl::StatusOr<DeviceSpaces> AllocateSpaces(Device& device, const TrainingJob& job,
                                            const DeviceNeeds& needs);

// Adds to a device's RESOURCE_EXHAUSTED what the model needs there and what to make smaller. Other
// errors, and those about the host's memory, do not change.
absl::Status ExplainMemory(const absl::Status& status, const TrainingJob& job,
                           const DeviceNeeds& needs);

}  // namespace ballast::worker

#endif  // BALLAST_GPU_WORKER_PIPELINE_DEVICE_SPACES_H_
