// Buckets of gradients, and the partitions after reduce-scattering them.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_BUCKETS_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_BUCKETS_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "cpu_optimizer_service/common/layout.h"

namespace ballast {

// The unit of reduce-scatter: elements [begin, end) of a group's flat space. Rank r owns [begin + r
// * shard_elements, begin + (r + 1) * shard_elements) cut at `end`. A collective works on
// world_size * shard_elements elements; those past `end` are zeros that are not sent.
struct Bucket {
  int group = 0;
  int64_t begin = 0;
  int64_t end = 0;
  int64_t shard_elements = 0;  // Whole blocks.
};

// Cuts each flat space into buckets of about `bucket_elements` (rounded up to world_size blocks),
// in order of (group, begin).
std::vector<Bucket> MakeBuckets(absl::Span<const int64_t> flat_elements, int world_size,
                                int64_t bucket_elements);
// The partitions after reduce-scattering those buckets, without empty shards.
std::vector<PartitionRange> PartitionsOf(absl::Span<const Bucket> buckets, int world_size);

// Gives `layout`, which must pass CheckParameters, the partitions of such buckets of its spaces,
// for its world_size. INVALID_ARGUMENT: more chunks than a job may have.
absl::Status CutInBuckets(int64_t bucket_elements, LayoutSpec& layout);

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_BUCKETS_H_
