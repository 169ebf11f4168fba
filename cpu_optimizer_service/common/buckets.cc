#include "cpu_optimizer_service/common/buckets.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/rounding.h"

namespace ballast {

std::vector<Bucket> MakeBuckets(absl::Span<const int64_t> flat_elements, int world_size,
                                int64_t bucket_elements) {
  const int64_t row = world_size * kBlockElements;  // One block for each rank.
  // At least one row, also if `bucket_elements` is 0: the loop below has to go on.
  const int64_t step = std::max(row, RoundUp(bucket_elements, row));
  std::vector<Bucket> buckets;
  for (int group = 0; group < static_cast<int>(flat_elements.size()); ++group) {
    for (int64_t begin = 0; begin < flat_elements[group]; begin += step) {
      const int64_t end = std::min(begin + step, flat_elements[group]);
      // The last bucket of a group may be smaller. Its shards are whole blocks, too, but those of
      // the last ranks may be cut or empty.
      const int64_t rows = DivideUp(end - begin, row);
      buckets.push_back(
          {.group = group, .begin = begin, .end = end, .shard_elements = rows * kBlockElements});
    }
  }
  return buckets;
}

std::vector<PartitionRange> PartitionsOf(absl::Span<const Bucket> buckets, int world_size) {
  std::vector<PartitionRange> ranges;
  for (const Bucket& bucket : buckets) {
    for (int rank = 0; rank < world_size; ++rank) {
      const int64_t begin = bucket.begin + rank * bucket.shard_elements;
      // In a short bucket a late rank's shard begins behind the bucket's end: the rank owns none of
      // it.
      const int64_t end = std::min(begin + bucket.shard_elements, bucket.end);
      if (begin < end) {
        ranges.push_back({.rank = rank, .group = bucket.group, .begin = begin, .end = end});
      }
    }
  }
  return ranges;
}

absl::Status CutInBuckets(int64_t bucket_elements, LayoutSpec& layout) {
  const std::vector<Bucket> buckets =
      MakeBuckets(FlatElements(layout), layout.world_size, bucket_elements);
  // Counted before they are made: of buckets there are few, but each may be cut for every rank.
  int64_t ranges = 0;
  for (const Bucket& bucket : buckets) {
    ranges += DivideUp(bucket.end - bucket.begin, bucket.shard_elements);
  }
  if (ranges > kMaxChunks) {
    return absl::InvalidArgumentError(absl::StrCat(
        "for ", layout.world_size, " ranks it has ", ranges, " partitions; expected at most ",
        kMaxChunks, ": use fewer ranks, larger buckets, or a mesh"));
  }
  layout.partitions = PartitionsOf(buckets, layout.world_size);
  return absl::OkStatus();
}

}  // namespace ballast
