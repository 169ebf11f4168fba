#include "client/session/weight_sink.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "client/session/payload_pieces.h"

namespace ballast::client {

WeightSink::WeightSink(const Layout& layout, const std::vector<GroupSpec>& groups, int rank,
                       std::function<absl::Span<std::byte>(int chunk)> weights,
                       std::function<void(int chunk)> on_weights)
    : layout_(layout),
      groups_(groups),
      rank_(rank),
      weights_(std::move(weights)),
      on_weights_(std::move(on_weights)) {}

void WeightSink::Begin() {
  expected_.assign(layout_.chunks().size(), false);
  for (int chunk : layout_.chunks_of_rank(rank_)) expected_[chunk] = true;
  missing_chunks_ = static_cast<int64_t>(layout_.chunks_of_rank(rank_).size());
}

std::vector<int> WeightSink::ListMissing() const {
  std::vector<int> missing;
  for (int chunk : layout_.chunks_of_rank(rank_)) {
    if (expected_[chunk]) missing.push_back(chunk);
  }
  return missing;
}

absl::Status WeightSink::Place(const v1::WeightHeader& header, PayloadPieces payload) {
  const size_t chunk = header.chunk();
  if (chunk >= expected_.size() || !expected_[chunk]) {
    return absl::DataLossError(absl::StrCat("weights of chunk ", chunk,
                                            " arrived, which this rank does not expect",
                                            " (the chunk is not its own, or they arrived twice)"));
  }
  const Chunk& place = layout_.chunks()[chunk];
  const size_t wanted = place.elements * SizeBytes(groups_[place.group].return_dtype);
  const size_t bytes = TotalBytes(payload);
  if (bytes != wanted) {
    return absl::DataLossError(
        absl::StrCat("weights of chunk ", chunk, " have ", bytes, " bytes, expected ", wanted));
  }
  // Everything about the message is checked before the trainer's memory is touched.
  const absl::Span<std::byte> memory = weights_(static_cast<int>(chunk));
  if (memory.size() != wanted) {
    return absl::InvalidArgumentError(absl::StrCat("SessionOptions::weights gave ", memory.size(),
                                                   " bytes for chunk ", chunk,
                                                   ", whose weights are ", wanted, " bytes"));
  }
  CopyPieces(payload, memory.data());
  // From here on the chunk is the trainer's: should it come again, it is refused above.
  expected_[chunk] = false;
  --missing_chunks_;
  if (on_weights_) on_weights_(static_cast<int>(chunk));
  return absl::OkStatus();
}

}  // namespace ballast::client
