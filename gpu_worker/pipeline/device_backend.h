// A rank's passes on a GPU, and the transport of its gradients and weights. device_backend.cc
// follows a step from top to bottom; it begins with the table of streams and events.
//
// It owns two threads. One gives reductions and copies to their streams, in the order of the
// buckets. One waits for the copies and calls the sink. Nothing in it synchronises the device or a
// whole stream while a step runs.
#ifndef BALLAST_GPU_WORKER_PIPELINE_DEVICE_BACKEND_H_
#define BALLAST_GPU_WORKER_PIPELINE_DEVICE_BACKEND_H_

#include <functional>
#include <memory>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "gpu_worker/base/timeline.h"
#include "gpu_worker/buckets/bucket_reducer.h"
#include "gpu_worker/device/device.h"
#include "gpu_worker/device/device_collective.h"
#include "gpu_worker/device/matmul.h"
#include "gpu_worker/gpt/architecture.h"
#include "gpu_worker/gpt/device_gpt.h"
#include "gpu_worker/training/backend.h"
#include "gpu_worker/training/training_job.h"

namespace ballast::worker {

struct DeviceBackendOptions {
  GptConfig model;
  int sequences = 1;  // The most that a micro-step of this rank has.
  Accumulation accumulation = Accumulation::kService;
  bool check_gradients = false;
  // The optimizer works on the device too (--optimizer=local): payloads are device memory, and the
  // passes read weights at weights(chunk).
  bool on_device = false;
  int staging_slots = 32;
  // How long a gradient waits for the optimizer to release the previous one.
  absl::Duration timeout = absl::Minutes(10);
};

// Borrowed until destruction.
struct DeviceBackendParts {
  Device& device;
  DeviceMatmul& matmul;
  DeviceCollective& collective;
  const TrainingJob& job;
  Timeline* timeline = nullptr;
};

// All payloads must be released before the backend is destroyed: destroy the optimizer first.
//
// INVALID_ARGUMENT unless weights return in bf16; RESOURCE_EXHAUSTED, with what to make smaller, if
// the GPU's memory is too small.
absl::StatusOr<std::unique_ptr<TrainingBackend>> MakeDeviceBackend(
    const DeviceBackendOptions& options, const DeviceBackendParts& parts);

// The same with other passes, for tests. `options.model` and `options.sequences` are not used.
using MakeDeviceModel =
    std::function<absl::StatusOr<std::unique_ptr<DeviceGpt>>(const DeviceGptParts& parts)>;
absl::StatusOr<std::unique_ptr<TrainingBackend>> MakeDeviceBackendOf(
    const DeviceBackendOptions& options, const DeviceBackendParts& parts,
    absl::Span<const int> backward_order, const MakeDeviceModel& make_model);

}  // namespace ballast::worker

#endif  // BALLAST_GPU_WORKER_PIPELINE_DEVICE_BACKEND_H_
