// Memory in which this rank's reduced gradients wait, in the wire dtype, until the optimizer has
// copied them. It has one slot for each chunk of the rank, so it is bounded by the partition. A
// chunk's next micro-step waits until its last one is released. If the optimizer has memory for
// this, that is used.
#ifndef BALLAST_GPU_WORKER_BUCKETS_GRADIENT_STAGING_H_
#define BALLAST_GPU_WORKER_BUCKETS_GRADIENT_STAGING_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "client/tensors/chunk_places.h"
#include "cpu_optimizer_service/common/dtype.h"
#include "cpu_optimizer_service/common/layout.h"

namespace ballast::worker {

// Thread-safe, except for Use. `layout` outlives it. Must outlive the optimizer that payloads are
// pushed to.
class GradientStaging {
 public:
  // `wire_dtypes`: one per group. `timeout`: how long Fill waits for a slot.
  GradientStaging(const Layout& layout, std::vector<DType> wire_dtypes, int rank,
                  absl::Duration timeout);

  // As ChunkPlaces::Use.
  void Use(const std::function<absl::Span<std::byte>(int chunk)>& memory) { places_.Use(memory); }

  struct Payload {
    absl::Span<const std::byte> bytes;
    std::function<void()> released;  // Call it once, when the bytes are no longer needed.
  };

  // Waits until the chunk's slot is free, and rounds `values` to the wire dtype into it.
  // DEADLINE_EXCEEDED, with the chunk and the micro-step, if its last payload is not released in
  // time.
  absl::StatusOr<Payload> Fill(int chunk, uint32_t micro_step, absl::Span<const float> values);

 private:
  const Layout& layout_;
  const std::vector<DType> wire_dtypes_;
  const absl::Duration timeout_;
  client::ChunkPlaces places_;
};

}  // namespace ballast::worker

#endif  // BALLAST_GPU_WORKER_BUCKETS_GRADIENT_STAGING_H_
