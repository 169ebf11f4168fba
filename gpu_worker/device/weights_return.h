// The way of new weights to where the passes read them: from the optimizer's hands, to this rank's
// shards on the device, to all ranks.
//
//   host memory    where the optimizer puts them: this rank's partition, pinned
//   copy_in        copies a chunk to its place in the live weights as soon as it is told to be
//   there communicate    all-gathers bucket after bucket, in the order in which forward needs them
//   compute        waits, before a parameter is first read, for its buckets only
//
// Where the optimizer is on the device, it writes this rank's shards itself, and nothing is copied.
//
// Threads: `at` and OnWeights from any, the others from one.
#ifndef BALLAST_GPU_WORKER_DEVICE_WEIGHTS_RETURN_H_
#define BALLAST_GPU_WORKER_DEVICE_WEIGHTS_RETURN_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "cpu_optimizer_service/common/mutex.h"
#include "gpu_worker/bucket_order.h"
#include "gpu_worker/device/device.h"
#include "gpu_worker/device/device_collective.h"
#include "gpu_worker/device/device_trace.h"
#include "gpu_worker/training_job.h"

namespace ballast::worker {

class WeightsReturn {
 public:
  // `live`: by group, the weights that passes read, bf16, as long as the buckets reach. `order` is
  // the backward pass's: forward needs buckets the other way round. Borrows until destruction.
  static absl::StatusOr<std::unique_ptr<WeightsReturn>> Create(
      Device& device, const TrainingJob& job, const BucketOrder& order,
      std::vector<absl::Span<std::byte>> live, int rank, bool on_device, DeviceTrace& trace);
  ~WeightsReturn();

  // Where the optimizer puts a chunk's weights. What OnWeights said of it counts no more.
  absl::Span<std::byte> at(int chunk);
  void OnWeights(int chunk);

  // No pass is on its way.
  absl::Status Gather(DeviceStream& communicate, DeviceCollective& collective, uint64_t step);
  // Makes `stream` wait for what Gather gave, where it has not yet since.
  absl::Status BeforeWeights(DeviceStream& stream, int parameter);
  absl::Status BeforeGroup(DeviceStream& stream, int group);

 private:
  struct PerBucket {
    RankShard shard;
    std::unique_ptr<DeviceEvent> copied;    // On copy_in: this rank's chunks.
    std::unique_ptr<DeviceEvent> gathered;  // On communicate.
    bool waited_for = true;                 // Since the last Gather, by the passes' stream.
  };

  WeightsReturn(const TrainingJob& job, const BucketOrder& order,
                std::vector<absl::Span<std::byte>> live, bool on_device, DeviceTrace& trace);
  absl::Status CopyIn(int chunk) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status CopyRest(PerBucket& bucket);
  absl::Status Before(DeviceStream& stream, int bucket);
  absl::Span<std::byte> live(int chunk) const;

  const TrainingJob& job_;
  const BucketOrder& order_;
  const std::vector<absl::Span<std::byte>> live_;
  const bool on_device_;
  DeviceTrace& trace_;
  std::unique_ptr<HostMemory> host_;           // Null: on the device, or nothing to hold.
  std::vector<absl::Span<std::byte>> places_;  // By chunk, in `host_`.
  std::vector<PerBucket> buckets_;

  // Guards the stream too: a copy is given to it by whichever thread hears of the weights.
  Mutex mutex_;
  std::unique_ptr<DeviceStream> copy_in_ ABSL_GUARDED_BY(mutex_);
  std::vector<bool> copied_ ABSL_GUARDED_BY(mutex_);  // By chunk: given to copy_in since `at`.
  uint64_t next_step_ ABSL_GUARDED_BY(mutex_) = 0;    // Of the weights that come, for the trace.
  absl::Status copy_status_ ABSL_GUARDED_BY(mutex_);  // Of OnWeights, which cannot say it.
};

}  // namespace ballast::worker

#endif  // BALLAST_GPU_WORKER_DEVICE_WEIGHTS_RETURN_H_
