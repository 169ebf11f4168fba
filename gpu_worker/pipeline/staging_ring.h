// Host memory through which gradients leave the device: a fixed number of slots, and waiters in
// order when all are taken, so that the memory is bounded and backpressure can be seen.
//
//   StagingRing::Slot slot = ring->Take().value();        // waits for one
//   copies->CopyToHost(slot.bytes().subspan(0, n), from);
//   ...                                                   // returned by the slot's destructor
//
// Thread-safe. A ring outlives its slots.
#ifndef BALLAST_GPU_WORKER_PIPELINE_STAGING_RING_H_
#define BALLAST_GPU_WORKER_PIPELINE_STAGING_RING_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "cpu_optimizer_service/common/system/mutex.h"
#include "gpu_worker/device/device.h"

namespace ballast::worker {

class StagingRing {
 public:
  class Slot {
   public:
    Slot() = default;
    Slot(Slot&& other) noexcept { *this = std::move(other); }
    Slot& operator=(Slot&& other) noexcept;
    ~Slot();
    absl::Span<std::byte> bytes() const { return bytes_; }

   private:
    friend class StagingRing;
    Slot(StagingRing* ring, size_t index, absl::Span<std::byte> bytes)
        : ring_(ring), index_(index), bytes_(bytes) {}
    StagingRing* ring_ = nullptr;
    size_t index_ = 0;
    absl::Span<std::byte> bytes_;
  };

  // At least one slot. RESOURCE_EXHAUSTED with the sizes if the host has no memory; pageable, with
  // the device's warning, if it cannot be pinned. Every slot begins a page.
  static absl::StatusOr<std::unique_ptr<StagingRing>> Create(Device& device, int slots,
                                                             size_t slot_bytes,
                                                             absl::Duration timeout);
  ~StagingRing();

  // Waits for a slot, in the order of the calls. DEADLINE_EXCEEDED after the timeout: the optimizer
  // has all slots; CANCELLED after Cancel, for waiting and later calls.
  absl::StatusOr<Slot> Take();
  // Whether a Take would not wait, if it is the next one.
  bool HasFree() const;
  void Cancel();

  bool pinned() const { return memory_->pinned(); }
  int slots() const { return slots_; }
  int waiting() const;  // Calls of Take that wait.

 private:
  StagingRing(std::unique_ptr<HostMemory> memory, int slots, size_t slot_bytes,
              absl::Duration timeout);
  void Give(size_t index);

  const std::unique_ptr<HostMemory> memory_;
  const size_t slot_bytes_;
  const int slots_;
  const absl::Duration timeout_;
  mutable Mutex mutex_;
  CondVar changed_;
  std::vector<size_t> free_ ABSL_GUARDED_BY(mutex_);
  // One number for each call that waits, in order: the front's turn is next.
  std::deque<uint64_t> queue_ ABSL_GUARDED_BY(mutex_);
  uint64_t next_number_ ABSL_GUARDED_BY(mutex_) = 0;
  bool cancelled_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace ballast::worker

#endif  // BALLAST_GPU_WORKER_PIPELINE_STAGING_RING_H_
