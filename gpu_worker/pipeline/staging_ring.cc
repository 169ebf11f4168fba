#include "gpu_worker/pipeline/staging_ring.h"

#include <algorithm>
#include <chrono>
#include <limits>
#include <string>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/check.h"
#include "cpu_optimizer_service/common/rounding.h"
#include "cpu_optimizer_service/common/status.h"

namespace ballast::worker {
namespace {

// From the beginning of one slot to the next.
size_t StrideBytes(size_t slot_bytes) { return RoundUp(slot_bytes, kPageBytes); }

}  // namespace

StagingRing::Slot& StagingRing::Slot::operator=(Slot&& other) noexcept {
  if (this == &other) return *this;
  if (ring_ != nullptr) ring_->Give(index_);
  ring_ = std::exchange(other.ring_, nullptr);
  index_ = other.index_;
  bytes_ = std::exchange(other.bytes_, {});
  return *this;
}

StagingRing::Slot::~Slot() {
  if (ring_ != nullptr) ring_->Give(index_);
}

absl::StatusOr<std::unique_ptr<StagingRing>> StagingRing::Create(Device& device, int slots,
                                                                 size_t slot_bytes,
                                                                 absl::Duration timeout) {
  Check(slots > 0, "a staging ring has a slot");
  const std::string what = absl::StrCat(slots, " staging buffers of ", slot_bytes, " bytes");
  // The product below must not overflow.
  if (slot_bytes > std::numeric_limits<size_t>::max() / slots - kPageBytes) {
    return absl::ResourceExhaustedError(absl::StrCat("no host has memory for ", what));
  }
  BALLAST_ASSIGN_OR_RETURN(std::unique_ptr<HostMemory> memory,
                           device.AllocateHost(slots * StrideBytes(slot_bytes), what));
  return std::unique_ptr<StagingRing>(
      new StagingRing(std::move(memory), slots, slot_bytes, timeout));
}

StagingRing::StagingRing(std::unique_ptr<HostMemory> memory, int slots, size_t slot_bytes,
                         absl::Duration timeout)
    : memory_(std::move(memory)), slot_bytes_(slot_bytes), slots_(slots), timeout_(timeout) {
  for (int index = slots - 1; index >= 0; --index) free_.push_back(index);
}

StagingRing::~StagingRing() {
  MutexLock lock(mutex_);
  Check(free_.size() == static_cast<size_t>(slots_) && queue_.empty(),
        "a staging ring outlives its slots");
}

absl::StatusOr<StagingRing::Slot> StagingRing::Take() {
  const auto deadline = std::chrono::steady_clock::now() + absl::ToChronoNanoseconds(timeout_);
  MutexLock lock(mutex_);
  // A CondVar wakes waiting calls in any order; the numbers keep the order of the calls.
  const uint64_t number = next_number_++;
  queue_.push_back(number);
  bool in_time = true;
  while (!cancelled_ && in_time && (free_.empty() || queue_.front() != number)) {
    in_time = changed_.WaitUntil(mutex_, deadline);
  }
  // Also at the deadline: a slot may have become free at that moment.
  const bool mine = !free_.empty() && queue_.front() == number;
  // A call whose time is over may be anywhere in the queue, behind others that still have time.
  queue_.erase(std::find(queue_.begin(), queue_.end(), number));
  changed_.NotifyAll();  // It is another call's turn.
  if (cancelled_) return absl::CancelledError("the staging buffers are not needed any more");
  if (!mine) {
    return absl::DeadlineExceededError(
        absl::StrCat("waited ", absl::FormatDuration(timeout_), " for one of ", slots_,
                     " staging buffers of ", slot_bytes_,
                     " bytes: the optimizer, or a sum that waits for another rank, still uses "
                     "them; check that both run"));
  }
  const size_t index = free_.back();
  free_.pop_back();
  return Slot(this, index, memory_->bytes().subspan(index * StrideBytes(slot_bytes_), slot_bytes_));
}

bool StagingRing::HasFree() const {
  MutexLock lock(mutex_);
  // If calls wait, a free slot belongs to the first of them, which may not have woken up yet.
  return !free_.empty() && queue_.empty();
}

void StagingRing::Cancel() {
  MutexLock lock(mutex_);
  cancelled_ = true;
  changed_.NotifyAll();
}

int StagingRing::waiting() const {
  MutexLock lock(mutex_);
  return queue_.size();
}

void StagingRing::Give(size_t index) {
  MutexLock lock(mutex_);
  free_.push_back(index);
  // All, because only the first call in the queue may take it, and NotifyOne could wake another.
  changed_.NotifyAll();
}

}  // namespace ballast::worker
