// Where a chunk's gradient is between the reduction and the optimizer, in the wire dtype: the
// optimizer's memory on the host, pinned; a slot of the staging ring; or, where the optimizer is on
// the device too, device memory as large as the partition.
//
// A chunk's own place is taken by one micro-step at a time, a slot by one chunk; both wait. So the
// memory is bounded, and a slow optimizer delays the reductions.
//
// Threads: one takes and waits; any releases, and cancels. A place may be released after the
// destruction of this object.
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

  // TrainingBackend::UseGradientMemory; nothing may be taken. On the device nothing changes.
  absl::Status Use(const std::function<absl::Span<std::byte>(int chunk)>& memory);

  struct Place {
    absl::Span<std::byte> bytes;     // As large as the chunk's payload.
    std::function<void()> released;  // To be called once, from any thread.
  };
  // DEADLINE_EXCEEDED, naming the chunk and the micro-step, if the optimizer still occupies the
  // place; CANCELLED once Cancel was called.
  absl::StatusOr<Place> Take(int chunk, uint32_t micro_step);
  // Whether Take would not wait. Called by the thread that takes.
  bool IsFree(int chunk) const;
  // Waits until all of these are free, if each has a place of its own: one wait costs less than one
  // for each. False if they are not, or Take would return an error.
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
