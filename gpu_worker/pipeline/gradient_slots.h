// Where a chunk's gradient is between the reduction and the optimizer, in the wire dtype. It is in
// the optimizer's memory on the host, pinned; in a slot of the staging ring; or, if the optimizer
// is on the device too, in device memory as large as the partition.
//
// One micro-step at a time takes a chunk's own place, and one chunk at a time takes a slot; both
// wait. So the memory is bounded, and a slow optimizer delays the reductions.
//
// Threads: one takes and waits; any releases, and cancels. A place may be released after this
// object's destruction.
#ifndef BALLAST_GPU_WORKER_PIPELINE_GRADIENT_SLOTS_H_
#define BALLAST_GPU_WORKER_PIPELINE_GRADIENT_SLOTS_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "cpu_optimizer_service/common/job_spec.h"
#include "cpu_optimizer_service/common/layout.h"
#include "gpu_worker/device/device.h"
#include "gpu_worker/pipeline/staging_ring.h"

namespace ballast::worker {

struct GradientSlotsOptions {
  int rank = 0;
  bool on_device = false;
  int staging_slots = 32;
  absl::Duration timeout = absl::Minutes(10);
};

class GradientSlots {
 public:
  // RESOURCE_EXHAUSTED with the sizes.
  static absl::StatusOr<std::unique_ptr<GradientSlots>> Create(Device& device, const Layout& layout,
                                                               absl::Span<const GroupSpec> groups,
                                                               const GradientSlotsOptions& options);

  // TrainingBackend::UseGradientMemory; no place may be taken. No effect on the device.
  absl::Status Use(const std::function<absl::Span<std::byte>(int chunk)>& memory);

  struct Place {
    absl::Span<std::byte> bytes;     // As large as the chunk's payload.
    std::function<void()> released;  // Call it once, from any thread.
  };
  // DEADLINE_EXCEEDED, with the chunk and the micro-step, if the optimizer still occupies the
  // place; CANCELLED after Cancel.
  absl::StatusOr<Place> Take(int chunk, uint32_t micro_step);
  // Whether Take would not wait. Called by the thread that takes.
  bool IsFree(int chunk) const;
  // If each of these has its own place, waits until all are free: one wait costs less than many.
  // False if they do not, or if Take would return an error.
  bool AwaitFree(absl::Span<const int> chunks);
  void Cancel();

  // Seconds that Take waited, since the beginning.
  double waited_seconds() const;

 private:
  // Outlives the object while a place is taken.
  struct Shared;

  GradientSlots(Device& device, const Layout& layout, const GradientSlotsOptions& options);
  absl::StatusOr<Place> TakeSlot(int chunk, uint32_t micro_step);

  Device& device_;
  const Layout& layout_;
  const GradientSlotsOptions options_;
  const std::shared_ptr<Shared> shared_;
  std::vector<size_t> size_bytes_;                 // By chunk; 0 for other ranks'.
  std::vector<absl::Span<std::byte>> own_;         // By chunk; empty: the ring.
  std::vector<std::unique_ptr<HostMemory>> pins_;  // Pin the optimizer's memory.
  std::unique_ptr<DeviceMemory> on_device_;
};

}  // namespace ballast::worker

#endif  // BALLAST_GPU_WORKER_PIPELINE_GRADIENT_SLOTS_H_
