// Memory in which this rank's reduced gradients wait, in the wire dtype, until the optimizer has
// copied them: one slot for each chunk of the rank, so the memory is bounded by the partition, and
// a chunk's next micro-step waits until its last one is released. The memory is the optimizer's,
// where it has some.
#ifndef BALLAST_GPU_WORKER_BUCKETS_GRADIENT_STAGING_H_
#define BALLAST_GPU_WORKER_BUCKETS_GRADIENT_STAGING_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "cpu_optimizer_service/common/dtype.h"
#include "cpu_optimizer_service/common/layout.h"
#include "cpu_optimizer_service/common/system/mutex.h"

namespace ballast::worker {

// Thread-safe except for Use. Must outlive the optimizer that payloads are pushed to.
class GradientStaging {
 public:
  // `wire_dtypes`: one per group. `timeout`: how long Fill waits for a slot.
  GradientStaging(const Layout& layout, std::vector<DType> wire_dtypes, int rank,
                  absl::Duration timeout);

  // From now on a chunk's payloads are in `memory(chunk)`, which stays until the next Use, or where
  // that is empty in this object's own memory. All payloads must be released.
  void Use(const std::function<absl::Span<std::byte>(int chunk)>& memory);

  struct Payload {
    absl::Span<const std::byte> bytes;
    std::function<void()> released;  // To be called once, when the bytes are not needed any more.
  };

  // Waits until the chunk's slot is free, and rounds `values` to the wire dtype into it.
  // DEADLINE_EXCEEDED, naming the chunk and the micro-step, if its last payload is not released in
  // time.
  absl::StatusOr<Payload> Fill(int chunk, uint32_t micro_step, absl::Span<const float> values);

 private:
  struct Slot {
    DType dtype = DType::kFloat32;
    size_t size_bytes = 0;
    absl::Span<std::byte> optimizers;  // Empty: it has no memory for the chunk.
    std::vector<std::byte> own;        // Empty until it is needed.
    bool taken = false;
  };

  const absl::Duration timeout_;
  Mutex mutex_;
  CondVar freed_;
  // By chunk; empty for chunks of other ranks. The mutex guards `taken`; the thread that took a
  // slot has exclusive use of its bytes.
  std::vector<Slot> slots_;
};

}  // namespace ballast::worker

#endif  // BALLAST_GPU_WORKER_BUCKETS_GRADIENT_STAGING_H_
