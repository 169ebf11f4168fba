// The places of a rank's chunk gradients until the service has them: in shared memory, or in their
// own memory. A chunk has one place. It is written, pushed, and written again once that push is
// released.
#ifndef BALLAST_CLIENT_TENSORS_CHUNK_PLACES_H_
#define BALLAST_CLIENT_TENSORS_CHUNK_PLACES_H_

#include <cstddef>
#include <functional>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "cpu_optimizer_service/common/dtype.h"
#include "cpu_optimizer_service/common/layout.h"
#include "cpu_optimizer_service/common/system/mutex.h"

namespace ballast::client {

// Thread-safe, except for Use, for calls about different chunks. Outlives the session that payloads
// are pushed to.
class ChunkPlaces {
 public:
  // `wire_dtypes`: one per group.
  ChunkPlaces(const Layout& layout, absl::Span<const DType> wire_dtypes, int rank);

  // From now on, until the next Use, a chunk's place is `memory(chunk)`, as large as its gradient
  // in the wire dtype. If that is empty, the chunk uses its own memory. All pushes are released.
  void Use(const std::function<absl::Span<std::byte>(int chunk)>& memory);

  // The place of one of the rank's chunks, once its last push is released. DEADLINE_EXCEEDED.
  absl::StatusOr<absl::Span<std::byte>> Await(int chunk, absl::Duration limit);
  // The place is pushed. Returns a function to call once, when it is released.
  std::function<void()> Lend(int chunk);

 private:
  struct Place {
    size_t size_bytes = 0;         // 0: another rank's chunk.
    absl::Span<std::byte> shared;  // May be empty.
    std::vector<std::byte> own;    // Empty until it is needed.
    bool lent = false;
  };

  Mutex mutex_;
  CondVar released_;
  std::vector<Place> places_;  // By chunk. The mutex guards `lent`.
};

}  // namespace ballast::client

#endif  // BALLAST_CLIENT_TENSORS_CHUNK_PLACES_H_
