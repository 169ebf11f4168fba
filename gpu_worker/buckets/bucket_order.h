// The parameters in each gradient bucket, the order in which buckets are reduced, and the chunks of
// a rank in a bucket's shard. Pure arithmetic, equal on every rank.
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
  // Indices of buckets in the order of reduction: the order in which a backward pass through
  // `backward_order` completes them. Equal on all ranks, even if a rank's own become ready in
  // another order.
  std::vector<int> reduction;
};

BucketOrder MakeBucketOrder(const Layout& layout, absl::Span<const Bucket> buckets,
                            absl::Span<const int> backward_order);

// A rank's shard of a bucket, cut at the bucket's end, so possibly empty.
struct RankShard {
  int64_t begin = 0;  // Its first element in the group's flat space.
  int64_t elements = 0;
  std::vector<int> chunks;  // They tile it, in order.
};

RankShard ShardOf(const Layout& layout, const Bucket& bucket, int rank);

// FAILED_PRECONDITION with the parameters: a backward pass gave none of them a gradient.
absl::Status NoParameterReached(const Layout& layout, int rank, uint32_t micro_step);

}  // namespace ballast::worker

#endif  // BALLAST_GPU_WORKER_BUCKETS_BUCKET_ORDER_H_
