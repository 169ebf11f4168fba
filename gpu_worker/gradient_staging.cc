#include "gpu_worker/gradient_staging.h"

#include "cpu_optimizer_service/common/float_format.h"
#include "gpu_worker/check.h"

namespace ballast::worker {

GradientStaging::GradientStaging(const Layout& layout, std::vector<DType> wire_dtypes, int rank)
    : slots_(layout.chunks().size()) {
  for (const int chunk : layout.chunks_of_rank(rank)) {
    Slot& slot = slots_[chunk];
    slot.dtype = wire_dtypes[layout.chunks()[chunk].group];
    slot.bytes.resize(layout.chunks()[chunk].elements * SizeBytes(slot.dtype));
  }
}

GradientStaging::Payload GradientStaging::Fill(int chunk, absl::Span<const float> values) {
  Slot& slot = slots_[chunk];
  Check(slot.bytes.size() == values.size() * SizeBytes(slot.dtype), "a payload fills its slot");
  {
    MutexLock lock(mutex_);
    while (slot.taken) freed_.Wait(mutex_);
    slot.taken = true;
  }
  for (size_t i = 0; i < values.size(); ++i) {
    StoreElement(slot.bytes.data(), slot.dtype, i, values[i]);
  }
  return {.bytes = slot.bytes, .released = [this, &slot] {
            MutexLock lock(mutex_);
            slot.taken = false;
            freed_.NotifyAll();
          }};
}

}  // namespace ballast::worker
