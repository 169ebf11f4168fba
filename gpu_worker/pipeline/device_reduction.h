// The work of `communicate` for a gradient bucket: the search for non-finite elements, the
// reduce-scatter, and rounding for the wire. Its callers order the work.
//
// Threads: one caller at a time.
#ifndef BALLAST_GPU_WORKER_PIPELINE_DEVICE_REDUCTION_H_
#define BALLAST_GPU_WORKER_PIPELINE_DEVICE_REDUCTION_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "gpu_worker/buckets/bucket_order.h"
#include "gpu_worker/buckets/non_finite.h"
#include "gpu_worker/device/device.h"
#include "gpu_worker/device/device_collective.h"
#include "gpu_worker/training/training_job.h"

namespace ballast::worker {

class DeviceReduction {
 public:
  struct Parts {
    Device& device;
    DeviceStream& communicate;
    DeviceCollective& collective;
    const TrainingJob& job;
    const BucketOrder& order;
  };

  // `gradients`: by group, flat spaces on the device. `check`: Reduce searches for non-finite
  // elements. Everything is borrowed until destruction.
  static absl::StatusOr<std::unique_ptr<DeviceReduction>> Create(const Parts& parts,
                                                                 std::vector<float*> gradients,
                                                                 bool check);

  // Reduce-scatters the bucket. Returns this rank's shard, of the whole shard's size, in its own
  // place there.
  absl::StatusOr<const float*> Reduce(int bucket, uint64_t step);
  absl::Status Round(int bucket, int64_t elements, const float* from, std::byte* to);

  // The first one found since the last call, by parameter and element.
  std::optional<NonFinite> TakeNonFinite();

 private:
  // Results of the searches; on the host, for copies.
  struct Found {
    uint64_t none = 0;
    uint64_t position = 0;
    float value = 0;
  };

  DeviceReduction(const Parts& parts, std::vector<float*> gradients)
      : parts_(parts), gradients_(std::move(gradients)) {}
  const GroupSpec& group(int bucket) const {
    return parts_.job.spec.groups[parts_.job.buckets[bucket].group];
  }
  absl::Status FindNonFinite(int bucket, const float* space);

  const Parts parts_;
  const std::vector<float*> gradients_;
  // The rest is used with `check` only. Elements of all parameters before each, in order of index.
  std::vector<uint64_t> elements_before_;
  std::unique_ptr<DeviceMemory> first_;  // A uint64_t.
  std::unique_ptr<HostMemory> host_;     // A Found.
  std::unique_ptr<DeviceEvent> searched_;
  std::optional<NonFinite> non_finite_;
};

}  // namespace ballast::worker

#endif  // BALLAST_GPU_WORKER_PIPELINE_DEVICE_REDUCTION_H_
