#include "gpu_worker/pipeline/gradient_slots.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/check.h"
#include "cpu_optimizer_service/common/status.h"
#include "cpu_optimizer_service/common/system/mutex.h"
#include "gpu_worker/base/stopwatch.h"
#include "gpu_worker/pipeline/pinned_spans.h"
#include "gpu_worker/pipeline/pipeline_errors.h"

namespace ballast::worker {

struct GradientSlots::Shared {
  std::unique_ptr<StagingRing> ring;  // Null where the optimizer is on the device.
  mutable Mutex mutex;
  CondVar changed;
  std::vector<bool> taken ABSL_GUARDED_BY(mutex);  // By chunk.
  int awaited ABSL_GUARDED_BY(mutex) = -1;         // The chunk that a wait is for.
  bool cancelled ABSL_GUARDED_BY(mutex) = false;
  double waited_seconds ABSL_GUARDED_BY(mutex) = 0;
};

GradientSlots::GradientSlots(Device& device, const Layout& layout,
                             const GradientSlotsOptions& options)
    : device_(device),
      layout_(layout),
      options_(options),
      shared_(std::make_shared<Shared>()),
      size_bytes_(layout.chunks().size(), 0),
      own_(layout.chunks().size()) {
  MutexLock lock(shared_->mutex);
  shared_->taken.assign(layout.chunks().size(), false);
}

absl::StatusOr<std::unique_ptr<GradientSlots>> GradientSlots::Create(
    Device& device, const Layout& layout, absl::Span<const GroupSpec> groups,
    const GradientSlotsOptions& options) {
  std::unique_ptr<GradientSlots> places(new GradientSlots(device, layout, options));
  size_t largest = 0;
  size_t all = 0;
  for (const int index : layout.chunks_of_rank(options.rank)) {
    const Chunk& chunk = layout.chunks()[index];
    places->size_bytes_[index] = chunk.elements * SizeBytes(groups[chunk.group].wire_dtype);
    // All slots have one size, so that any chunk fits any slot.
    largest = std::max(largest, places->size_bytes_[index]);
    all += places->size_bytes_[index];
  }
  // A rank without chunks never takes a place and needs no memory for any.
  if (all == 0) return places;
  if (!options.on_device) {
    BALLAST_ASSIGN_OR_RETURN(
        places->shared_->ring,
        StagingRing::Create(device, options.staging_slots, largest, options.timeout));
    return places;
  }
  BALLAST_ASSIGN_OR_RETURN(places->on_device_, device.Allocate(all, "gradients for the optimizer"));
  // In the order of the chunks and without gaps: a kernel of the optimizer goes on from one chunk
  // into the next (device_arithmetic.h).
  std::byte* next = places->on_device_->data();
  for (const int index : layout.chunks_of_rank(options.rank)) {
    places->own_[index] = {next, places->size_bytes_[index]};
    next += places->size_bytes_[index];
  }
  return places;
}

absl::Status GradientSlots::Use(const std::function<absl::Span<std::byte>(int chunk)>& memory) {
  if (options_.on_device) return absl::OkStatus();
  // Before the new pins are made: no page may be pinned twice, and the new memory may have pages of
  // the old.
  pins_.clear();
  std::vector<absl::Span<std::byte>> spans;
  for (const int index : layout_.chunks_of_rank(options_.rank)) {
    own_[index] = memory(index);
    if (own_[index].empty()) continue;
    Check(own_[index].size() == size_bytes_[index],
          "the optimizer's memory for a chunk has its size");
    spans.push_back(own_[index]);
  }
  BALLAST_ASSIGN_OR_RETURN(
      pins_, PinSpans(device_, std::move(spans), "the optimizer's memory for gradients"));
  return absl::OkStatus();
}

absl::StatusOr<GradientSlots::Place> GradientSlots::TakeSlot(int chunk, uint32_t micro_step) {
  Stopwatch stopwatch;
  absl::StatusOr<StagingRing::Slot> slot = shared_->ring->Take();
  {
    MutexLock lock(shared_->mutex);
    shared_->waited_seconds += stopwatch.Lap();
  }
  if (!slot.ok()) {
    return Annotate(slot.status(), absl::StrCat("chunk ", chunk, " of micro-step ", micro_step));
  }
  // A std::function is copied, a slot is not; the ring outlives it.
  struct TakenSlot {
    // Declared first, so destroyed last: the slot returns to a ring that still exists.
    std::shared_ptr<Shared> shared;
    StagingRing::Slot slot;
  };
  const auto taken = std::make_shared<TakenSlot>(TakenSlot{shared_, *std::move(slot)});
  return Place{.bytes = taken->slot.bytes().subspan(0, size_bytes_[chunk]),
               .released = [taken] { taken->slot = StagingRing::Slot(); }};
}

absl::StatusOr<GradientSlots::Place> GradientSlots::Take(int chunk, uint32_t micro_step) {
  if (own_[chunk].empty()) return TakeSlot(chunk, micro_step);
  MutexLock lock(shared_->mutex);
  if (shared_->taken[chunk] && !shared_->cancelled) {
    const auto deadline =
        std::chrono::steady_clock::now() + absl::ToChronoNanoseconds(options_.timeout);
    Stopwatch stopwatch;
    bool late = false;
    shared_->awaited = chunk;
    while (shared_->taken[chunk] && !shared_->cancelled && !late) {
      late = !shared_->changed.WaitUntil(shared_->mutex, deadline);
    }
    shared_->awaited = -1;
    shared_->waited_seconds += stopwatch.Lap();
  }
  if (shared_->cancelled) return Stopped();
  // The place decides and not the clock: it may have become free at the deadline.
  if (shared_->taken[chunk]) {
    return absl::DeadlineExceededError(
        absl::StrCat("chunk ", chunk, " of micro-step ", micro_step, " waited ",
                     absl::FormatDuration(options_.timeout),
                     ": the optimizer has not taken the chunk's previous gradient, or its sum "
                     "waits for another rank; check that both still run"));
  }
  shared_->taken[chunk] = true;
  // A release wakes the thread only if it waits for this chunk: the others of its bucket would wake
  // it for nothing.
  return Place{.bytes = own_[chunk], .released = [shared = shared_, chunk] {
                 MutexLock lock(shared->mutex);
                 shared->taken[chunk] = false;
                 if (shared->awaited == chunk) shared->changed.NotifyAll();
               }};
}

// From the last on: the optimizer releases them in the order in which it was given them.
bool GradientSlots::AwaitFree(absl::Span<const int> chunks) {
  for (const int chunk : chunks) {
    // A slot of the ring may be occupied by chunks of this same bucket that are not pushed yet: a
    // wait for all could not end.
    if (own_[chunk].empty()) return false;
  }
  // One deadline for all chunks. If it passes, the caller's Take waits once more, and its error
  // names the chunk.
  const auto deadline =
      std::chrono::steady_clock::now() + absl::ToChronoNanoseconds(options_.timeout);
  Stopwatch stopwatch;
  MutexLock lock(shared_->mutex);
  for (auto chunk = chunks.rbegin(); chunk != chunks.rend(); ++chunk) {
    shared_->awaited = *chunk;
    while (shared_->taken[*chunk] && !shared_->cancelled) {
      if (!shared_->changed.WaitUntil(shared_->mutex, deadline)) break;
    }
    shared_->awaited = -1;
    if (shared_->taken[*chunk] || shared_->cancelled) {
      shared_->waited_seconds += stopwatch.Lap();
      return false;
    }
  }
  shared_->waited_seconds += stopwatch.Lap();
  return true;
}

bool GradientSlots::IsFree(int chunk) const {
  if (own_[chunk].empty()) return shared_->ring->HasFree();
  MutexLock lock(shared_->mutex);
  // If it is free, it stays free: only the thread that asks takes places.
  return !shared_->taken[chunk];
}

void GradientSlots::Cancel() {
  if (shared_->ring != nullptr) shared_->ring->Cancel();
  MutexLock lock(shared_->mutex);
  shared_->cancelled = true;
  shared_->changed.NotifyAll();
}

double GradientSlots::waited_seconds() const {
  MutexLock lock(shared_->mutex);
  return shared_->waited_seconds;
}

}  // namespace ballast::worker
