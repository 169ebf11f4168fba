#include "gpu_worker/buckets/bucket_order.h"

#include <algorithm>
#include <numeric>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "cpu_optimizer_service/common/check.h"

namespace ballast::worker {

BucketOrder MakeBucketOrder(const Layout& layout, absl::Span<const Bucket> buckets,
                            absl::Span<const int> backward_order) {
  const size_t parameters = layout.spec().parameters.size();
  BucketOrder order{.buckets_of_parameter = std::vector<std::vector<int>>(parameters),
                    .parameters_of_bucket = std::vector<std::vector<int>>(buckets.size()),
                    .reduction = std::vector<int>(buckets.size())};
  std::vector<int> completes_at(parameters, 0);
  for (size_t i = 0; i < backward_order.size(); ++i) completes_at[backward_order[i]] = i;

  // A bucket is complete when the last of its parameters is.
  std::vector<int> bucket_completes_at(buckets.size(), 0);
  for (size_t b = 0; b < buckets.size(); ++b) {
    for (size_t p = 0; p < parameters; ++p) {
      // Frozen parameters (offset -1) and those of no elements are in no bucket.
      const ParameterPlace& place = layout.place(p);
      if (layout.spec().parameters[p].group != buckets[b].group || place.elements == 0 ||
          place.offset < 0 || place.offset >= buckets[b].end ||
          place.offset + place.elements <= buckets[b].begin) {
        continue;
      }
      order.buckets_of_parameter[p].push_back(b);
      order.parameters_of_bucket[b].push_back(p);
      bucket_completes_at[b] = std::max(bucket_completes_at[b], completes_at[p]);
    }
  }
  std::iota(order.reduction.begin(), order.reduction.end(), 0);
  // Stable: one parameter may complete several buckets, whose order must be the same on every rank.
  std::stable_sort(order.reduction.begin(), order.reduction.end(),
                   [&](int a, int b) { return bucket_completes_at[a] < bucket_completes_at[b]; });
  return order;
}

RankShard ShardOf(const Layout& layout, const Bucket& bucket, int rank) {
  RankShard shard{
      .begin = bucket.begin + rank * bucket.shard_elements, .elements = 0, .chunks = {}};
  // The last bucket of a group may end before the last ranks' shards begin.
  shard.elements = std::clamp<int64_t>(bucket.end - shard.begin, 0, bucket.shard_elements);
  // PartitionsOf makes the partitions from the same buckets, so no chunk crosses the end of a
  // shard.
  for (int64_t at = shard.begin; at < shard.begin + shard.elements;) {
    const int index = layout.ChunkAt(bucket.group, at);
    const Chunk& chunk = layout.chunks()[index];
    Check(chunk.begin == at && chunk.rank == rank, "a rank's chunks tile its shards");
    shard.chunks.push_back(index);
    at += chunk.elements;
  }
  return shard;
}

absl::Status NoParameterReached(const Layout& layout, int rank, uint32_t micro_step) {
  // A model may have thousands; the error is one line of a log.
  constexpr size_t kNamed = 16;
  std::vector<std::string> names;
  size_t trainable = 0;
  for (size_t p = 0; p < layout.spec().parameters.size(); ++p) {
    if (layout.place(p).offset < 0) continue;
    if (++trainable <= kNamed) names.push_back(layout.spec().parameters[p].name);
  }
  return absl::FailedPreconditionError(absl::StrCat(
      "rank ", rank, ": the backward of micro-step ", micro_step, " gave no gradient to any of ",
      trainable, " parameters: ", absl::StrJoin(names, ", "), trainable > kNamed ? ", ..." : "",
      "; check that the loss depends on the parameters"));
}

}  // namespace ballast::worker
