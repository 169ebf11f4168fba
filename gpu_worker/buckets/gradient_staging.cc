#include "gpu_worker/buckets/gradient_staging.h"

#include <chrono>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/check.h"
#include "cpu_optimizer_service/common/float_format.h"

namespace ballast::worker {

GradientStaging::GradientStaging(const Layout& layout, std::vector<DType> wire_dtypes, int rank,
                                 absl::Duration timeout)
    : timeout_(timeout), slots_(layout.chunks().size()) {
  for (const int chunk : layout.chunks_of_rank(rank)) {
    Slot& slot = slots_[chunk];
    slot.dtype = wire_dtypes[layout.chunks()[chunk].group];
    slot.size_bytes = layout.chunks()[chunk].elements * SizeBytes(slot.dtype);
  }
}

void GradientStaging::Use(const std::function<absl::Span<std::byte>(int chunk)>& memory) {
  for (size_t chunk = 0; chunk < slots_.size(); ++chunk) {
    Slot& slot = slots_[chunk];
    if (slot.size_bytes == 0) continue;
    slot.optimizers = memory(static_cast<int>(chunk));
    Check(slot.optimizers.empty() || slot.optimizers.size() == slot.size_bytes,
          "the optimizer's memory for a chunk has its size");
  }
}

absl::StatusOr<GradientStaging::Payload> GradientStaging::Fill(int chunk, uint32_t micro_step,
                                                               absl::Span<const float> values) {
  Slot& slot = slots_[chunk];
  Check(slot.size_bytes == values.size() * SizeBytes(slot.dtype), "a payload fills its slot");
  {
    const auto deadline = std::chrono::steady_clock::now() + absl::ToChronoNanoseconds(timeout_);
    MutexLock lock(mutex_);
    while (slot.taken) {
      // The slot decides and not the clock: it may have become free at the deadline.
      if (freed_.WaitUntil(mutex_, deadline) || !slot.taken) continue;
      return absl::DeadlineExceededError(absl::StrCat(
          "chunk ", chunk, " of micro-step ", micro_step, " waited ",
          absl::FormatDuration(timeout_),
          " for the optimizer to take what it was sent before; see whether it still runs"));
    }
    slot.taken = true;
  }
  // Without the lock: the slot belongs to this call until it is released.
  if (slot.optimizers.empty()) slot.own.resize(slot.size_bytes);
  const absl::Span<std::byte> bytes =
      slot.optimizers.empty() ? absl::MakeSpan(slot.own) : slot.optimizers;
  for (size_t i = 0; i < values.size(); ++i) {
    StoreElement(bytes.data(), slot.dtype, i, values[i]);
  }
  // NotifyAll, because calls for other chunks may wait on `freed_` too.
  return Payload{.bytes = bytes, .released = [this, &slot] {
                   MutexLock lock(mutex_);
                   slot.taken = false;
                   freed_.NotifyAll();
                 }};
}

}  // namespace ballast::worker
