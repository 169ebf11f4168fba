// The collective of a world of one.
#ifndef BALLAST_GPU_WORKER_COLLECTIVE_SINGLE_COLLECTIVE_H_
#define BALLAST_GPU_WORKER_COLLECTIVE_SINGLE_COLLECTIVE_H_

#include <algorithm>

#include "cpu_optimizer_service/common/check.h"
#include "gpu_worker/collective/collective.h"

namespace ballast::worker {

class SingleCollective final : public Collective {
 public:
  int rank() const override { return 0; }
  int world_size() const override { return 1; }

  absl::Status ReduceScatterSum(absl::Span<const float> input, absl::Span<float> shard) override {
    Check(input.size() == shard.size(), "input is one shard a rank");
    std::copy(input.begin(), input.end(), shard.begin());
    return absl::OkStatus();
  }
  absl::Status AllGather(absl::Span<const std::byte> shard, absl::Span<std::byte> all) override {
    Check(all.size() == shard.size(), "all is one shard a rank");
    if (all.data() != shard.data()) std::copy(shard.begin(), shard.end(), all.begin());
    return absl::OkStatus();
  }
  absl::Status AllReduceSum(absl::Span<double> values) override { return absl::OkStatus(); }
  absl::Status Broadcast(absl::Span<std::byte> bytes) override { return absl::OkStatus(); }
  absl::Status Barrier() override { return absl::OkStatus(); }
};

}  // namespace ballast::worker

#endif  // BALLAST_GPU_WORKER_COLLECTIVE_SINGLE_COLLECTIVE_H_
