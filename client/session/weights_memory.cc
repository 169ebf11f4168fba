#include "client/session/weights_memory.h"

#include <cstring>
#include <new>

#include "absl/strings/str_cat.h"
#include "client/session/payload_pieces.h"

namespace ballast::client {

absl::StatusOr<WeightsMemory> WeightsMemory::Reserve(const Layout& layout,
                                                     const std::vector<GroupSpec>& groups, int rank,
                                                     int64_t available_bytes) {
  const auto bytes_of = [&](int chunk) {
    const Chunk& of = layout.chunks()[chunk];
    return static_cast<size_t>(of.elements * SizeBytes(groups[of.group].return_dtype));
  };
  size_t total_bytes = 0;
  for (int chunk : layout.chunks_of_rank(rank)) total_bytes += bytes_of(chunk);
  // Compared beforehand, because an allocation may succeed and its pages be missing when they are
  // touched: the kernel gives out more addresses than it has memory.
  if (static_cast<int64_t>(total_bytes) > available_bytes) {
    return absl::ResourceExhaustedError(absl::StrCat("there is no memory for ", total_bytes,
                                                     " bytes of weights; ", available_bytes,
                                                     " are available"));
  }
  WeightsMemory self(layout.chunks().size());
  self.memory_.reset(new (std::nothrow) std::byte[total_bytes]);
  if (self.memory_ == nullptr) {
    return absl::ResourceExhaustedError(
        absl::StrCat("there is no memory for ", total_bytes, " bytes of weights"));
  }
  std::memset(self.memory_.get(), 0, total_bytes);  // Touches every page.
  std::byte* place = self.memory_.get();
  for (int chunk : layout.chunks_of_rank(rank)) {
    self.places_[chunk] = {place, bytes_of(chunk)};
    place += bytes_of(chunk);
  }
  return self;
}

WeightsMemory WeightsMemory::In(const SharedMapping& shared, const Layout& layout, int rank) {
  WeightsMemory self(layout.chunks().size());
  for (int chunk : layout.chunks_of_rank(rank)) self.places_[chunk] = shared.weights(chunk);
  return self;
}

absl::Status WeightsMemory::KeepProvisional(const v1::WeightHeader& header, PayloadPieces payload) {
  const size_t chunk = header.chunk();
  const absl::Span<std::byte> place = at(chunk);
  // A chunk comes twice only after a push that may_guess; the caller has dropped the first then.
  if (place.empty() || kept_[chunk]) {
    return absl::DataLossError(absl::StrCat("provisional weights of chunk ", chunk,
                                            " arrived, which this rank does not expect",
                                            " (the chunk is not its own, or they arrived twice)"));
  }
  if (const size_t bytes = TotalBytes(payload); bytes != place.size()) {
    return absl::DataLossError(absl::StrCat("provisional weights of chunk ", chunk, " have ", bytes,
                                            " bytes, expected ", place.size()));
  }
  CopyPieces(payload, place.data());
  kept_[chunk] = true;
  return absl::OkStatus();
}

void WeightsMemory::ForgetProvisional() { kept_.assign(kept_.size(), false); }

}  // namespace ballast::client
