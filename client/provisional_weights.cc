#include "client/provisional_weights.h"

#include <cstring>
#include <new>

#include "absl/strings/str_cat.h"
#include "client/payload_pieces.h"

namespace ballast::client {

absl::StatusOr<ProvisionalWeights> ProvisionalWeights::Reserve(const Layout& layout,
                                                               const std::vector<GroupSpec>& groups,
                                                               int rank, int64_t available_bytes) {
  ProvisionalWeights self;
  self.places_.resize(layout.chunks().size());
  size_t total_bytes = 0;
  for (int chunk : layout.chunks_of_rank(rank)) {
    const Chunk& of = layout.chunks()[chunk];
    const size_t bytes = of.elements * SizeBytes(groups[of.group].return_dtype);
    self.places_[chunk] = {.offset_bytes = total_bytes, .bytes = bytes, .expected = true};
    total_bytes += bytes;
  }
  if (static_cast<int64_t>(total_bytes) > available_bytes) {
    return absl::ResourceExhaustedError(absl::StrCat("there is no memory for ", total_bytes,
                                                     " bytes of provisional weights, ",
                                                     available_bytes, " are available"));
  }
  self.memory_.reset(new (std::nothrow) std::byte[total_bytes]);
  if (self.memory_ == nullptr) {
    return absl::ResourceExhaustedError(
        absl::StrCat("there is no memory for ", total_bytes, " bytes of provisional weights"));
  }
  std::memset(self.memory_.get(), 0, total_bytes);
  return self;
}

absl::Status ProvisionalWeights::Keep(const v1::WeightHeader& header, PayloadPieces payload) {
  const size_t chunk = header.chunk();
  if (chunk >= places_.size() || !places_[chunk].expected || places_[chunk].kept) {
    return absl::DataLossError(absl::StrCat("provisional weights of chunk ", chunk,
                                            " came, which this rank does not expect",
                                            " (not its own, or they came twice)"));
  }
  Place& place = places_[chunk];
  if (const size_t came = TotalBytes(payload); came != place.bytes) {
    return absl::DataLossError(absl::StrCat("provisional weights of chunk ", chunk, " came with ",
                                            came, " bytes, expected ", place.bytes));
  }
  CopyPieces(payload, memory_.get() + place.offset_bytes);
  place.kept = true;
  return absl::OkStatus();
}

absl::Span<const std::byte> ProvisionalWeights::weights(int chunk) const {
  return {memory_.get() + places_[chunk].offset_bytes, places_[chunk].bytes};
}

void ProvisionalWeights::Forget() {
  for (Place& place : places_) place.kept = false;
}

}  // namespace ballast::client
