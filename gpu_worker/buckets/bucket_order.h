// Which parameters lie in which gradient buckets, in what order the buckets are reduced, and which
// chunks of a rank a bucket's shard is made of. Pure arithmetic, the same on every rank.
#ifndef BALLAST_GPU_WORKER_BUCKETS_BUCKET_ORDER_H_
#define BALLAST_GPU_WORKER_BUCKETS_BUCKET_ORDER_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "cpu_optimizer_service/common/buckets.h"
#include "cpu_optimizer_service/common/layout.h"

namespace ballast::worker {

struct BucketOrder {
  std::vector<std::vector<int>> buckets_of_parameter;
  std::vector<std::vector<int>> parameters_of_bucket;  // In increasing order.
  // Indices of buckets in the order of reduction: that in which a backward pass, going through
  // `backward_order`, completes them. The same on all ranks, whatever a rank's own becomes ready
  // first.
  std::vector<int> reduction;
};

BucketOrder MakeBucketOrder(const Layout& layout, absl::Span<const Bucket> buckets,
                            absl::Span<const int> backward_order);

// A rank's shard of a bucket, cut at the bucket's end, so possibly empty.
struct RankShard {
  int64_t begin = 0;  // Of its first element in the group's flat space.
  int64_t elements = 0;
  std::vector<int> chunks;  // They tile it, in order.
};

RankShard ShardOf(const Layout& layout, const Bucket& bucket, int rank);

// FAILED_PRECONDITION naming the parameters: a backward pass gave none of them a gradient.
absl::Status NoParameterReached(const Layout& layout, int rank, uint32_t micro_step);

}  // namespace ballast::worker

#endif  // BALLAST_GPU_WORKER_BUCKETS_BUCKET_ORDER_H_
