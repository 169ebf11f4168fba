#include "client/tensors/chunk_places.h"

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "client/transport/steady_deadline.h"
#include "cpu_optimizer_service/common/check.h"

namespace ballast::client {

ChunkPlaces::ChunkPlaces(const Layout& layout, absl::Span<const DType> wire_dtypes, int rank)
    : places_(layout.chunks().size()) {
  for (const int index : layout.chunks_of_rank(rank)) {
    const Chunk& chunk = layout.chunks()[index];
    places_[index].size_bytes = chunk.elements * SizeBytes(wire_dtypes[chunk.group]);
  }
}

void ChunkPlaces::Use(const std::function<absl::Span<std::byte>(int chunk)>& memory) {
  for (size_t chunk = 0; chunk < places_.size(); ++chunk) {
    Place& place = places_[chunk];
    if (place.size_bytes == 0) continue;
    place.shared = memory(static_cast<int>(chunk));
    Check(place.shared.empty() || place.shared.size() == place.size_bytes,
          "the memory for a chunk's gradient has its size");
  }
}

absl::StatusOr<absl::Span<std::byte>> ChunkPlaces::Await(int chunk, absl::Duration limit) {
  Place& place = places_[chunk];
  {
    const auto deadline = SteadyDeadline(limit);
    MutexLock lock(mutex_);
    while (place.lent) {
      // The place decides and not the clock: it may have become free at the deadline.
      if (released_.WaitUntil(mutex_, deadline) || !place.lent) continue;
      return absl::DeadlineExceededError(absl::StrCat("the last gradient of chunk ", chunk,
                                                      " has not left within ",
                                                      absl::FormatDuration(limit)));
    }
  }
  if (!place.shared.empty()) return place.shared;
  place.own.resize(place.size_bytes);
  return absl::MakeSpan(place.own);
}

std::function<void()> ChunkPlaces::Lend(int chunk) {
  MutexLock lock(mutex_);
  places_[chunk].lent = true;
  // NotifyAll, because calls for other chunks may wait, too.
  return [this, chunk] {
    MutexLock lock(mutex_);
    places_[chunk].lent = false;
    released_.NotifyAll();
  };
}

}  // namespace ballast::client
