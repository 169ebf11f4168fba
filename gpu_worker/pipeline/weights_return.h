// The way of new weights to where the passes read them: from where the optimizer left them, to this
// rank's shards on the device, to all ranks.
//
//   host memory    where the optimizer leaves this rank's: shared with the service or the
//                  session's; pinned here
//   copy_in        copies a bucket's chunks as soon as all are announced: to their place in the
//                  live weights, or, where weights may be provisional, which no pass may read, to a
//                  buffer of the partition's size
//   communicate    all-gathers bucket after bucket from there, in the order in which forward needs
//                  them, each as soon as this rank's chunks of it have arrived
//   compute        waits, before a parameter is first read, for its buckets only
//
// Where the optimizer is on the device, it writes this rank's shards itself, and nothing is copied.
//
// Threads: any calls OnProvisional, OnDropped, OnWeights, Abandon and Stop; one calls Gather; one
// calls the others.
#ifndef BALLAST_GPU_WORKER_PIPELINE_WEIGHTS_RETURN_H_
#define BALLAST_GPU_WORKER_PIPELINE_WEIGHTS_RETURN_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "cpu_optimizer_service/common/system/mutex.h"
#include "gpu_worker/buckets/bucket_order.h"
#include "gpu_worker/device/device.h"
#include "gpu_worker/device/device_collective.h"
#include "gpu_worker/device/stream_seconds.h"
#include "gpu_worker/pipeline/device_trace.h"
#include "gpu_worker/training/training_job.h"

namespace ballast::worker {

struct WeightsReturnOptions {
  int rank = 0;
  bool on_device = false;    // The optimizer is on the device.
  bool provisional = false;  // Weights may be provisional. Takes the buffer.
};

class WeightsReturn {
 public:
  // `live`: by group, the weights that passes read, bf16, as long as the buckets reach. `order` is
  // the backward pass's: forward needs buckets the other way round. Borrows until destruction.
  // RESOURCE_EXHAUSTED with the size of the buffer.
  static absl::StatusOr<std::unique_ptr<WeightsReturn>> Create(
      Device& device, const TrainingJob& job, const BucketOrder& order,
      std::vector<absl::Span<std::byte>> live, const WeightsReturnOptions& options,
      DeviceTrace& trace);
  ~WeightsReturn();

  // Where an optimizer on the device puts a chunk's weights; empty for one on the host.
  absl::Span<std::byte> at(int chunk) const;
  // TrainingBackend::UseWeightsMemory, for an optimizer on the host. Waits for copies from the old.
  absl::Status Use(const std::function<absl::Span<std::byte>(int chunk)>& memory);

  // As in TrainingBackend; ignored until Use gives their place.
  void OnProvisional(int chunk);
  void OnDropped(int chunk);
  void OnWeights(int chunk);

  // A Gather of the weights of `step` follows: of chunks announced by OnWeights, or, if
  // `all_there`, of the present contents of the memory.
  void Expect(uint64_t step, bool all_there);
  // The expected Gather waits for no more chunks.
  void Abandon();
  // Every wait, now and later, ends with CANCELLED.
  void Stop();
  // Once for each Expect. Waits, on the host, until chunk after chunk is announced.
  absl::Status Gather(DeviceStream& communicate, DeviceCollective& collective);

  // Makes `stream` wait for the expected weights, once for each Expect; first waits, on the host,
  // until Gather has given their work. Adds the stream's wait to `waited`.
  absl::Status BeforeWeights(DeviceStream& stream, int parameter, StreamSeconds& waited);
  absl::Status BeforeGroup(DeviceStream& stream, int group, StreamSeconds& waited);

 private:
  struct PerBucket {
    RankShard shard;
    absl::Span<std::byte> mine;             // Where this rank's shard is gathered from.
    std::unique_ptr<DeviceEvent> copied;    // On copy_in: this rank's chunks.
    std::unique_ptr<DeviceEvent> gathered;  // On communicate.
    bool waited_for = true;                 // Since the last Expect, by the passes' stream.
  };

  struct Target {
    std::byte* data = nullptr;  // On the device; null: another rank's.
    int bucket = -1;            // -1: another rank's.
  };
  struct Arriving {
    absl::Span<std::byte> place;  // On the host.
    bool copied = false;          // Given to copy_in, as it is now.
    bool provisional = false;     // Its provisional weights have arrived and were not dropped.
    bool arrived = false;         // OnWeights since the last gather.
  };
  // The stream on which weights go to the device.
  struct Copies {
    std::unique_ptr<DeviceStream> stream;
    std::unique_ptr<DeviceEvent> last;  // After the last copy.
    bool marked = true;                 // `last` is recorded after it.
    uint64_t step = 0;                  // The arriving weights', for the trace.
    absl::Status status;                // Errors of calls that return none.
  };

  WeightsReturn(const TrainingJob& job, const BucketOrder& order,
                std::vector<absl::Span<std::byte>> live, const WeightsReturnOptions& options,
                DeviceTrace& trace);
  absl::Status Init(Device& device);
  size_t SizeBytesOf(int chunk) const;
  absl::Status WaitForCopies() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The uncopied chunks of the bucket, adjacent ones together.
  absl::Status CopyIn(int bucket) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool HasArrived(const PerBucket& bucket) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Whether all of it can be copied, if some of it only provisionally.
  bool CanBeCopied(const PerBucket& bucket) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status CopyRest(int bucket);
  absl::Status GatherBucket(DeviceStream& communicate, DeviceCollective& collective, int index);
  absl::Status AwaitGiven(int bucket);
  absl::StatusOr<bool> IsThere(int bucket);
  absl::Status Before(DeviceStream& stream, int bucket, StreamSeconds& waited);

  const TrainingJob& job_;
  const BucketOrder& order_;
  const std::vector<absl::Span<std::byte>> live_;
  const WeightsReturnOptions options_;
  DeviceTrace& trace_;
  Device* device_ = nullptr;
  std::unique_ptr<DeviceMemory> buffer_;  // Null if weights go directly to their live place.
  std::vector<PerBucket> buckets_;
  std::vector<Target> targets_;  // By chunk.
  uint64_t step_ = 0;            // Expected last; not changed while that is gathered.

  // Guards the stream too: the thread that is notified of weights gives it the copy.
  Mutex mutex_;
  CondVar changed_;
  std::vector<std::unique_ptr<HostMemory>> pins_ ABSL_GUARDED_BY(mutex_);
  std::vector<Arriving> arriving_ ABSL_GUARDED_BY(mutex_);  // By chunk.
  Copies copies_ ABSL_GUARDED_BY(mutex_);
  // By bucket: expected, its gather not yet given.
  std::vector<bool> awaited_ ABSL_GUARDED_BY(mutex_);
  bool all_there_ ABSL_GUARDED_BY(mutex_) = false;
  bool abandoned_ ABSL_GUARDED_BY(mutex_) = false;
  bool stopped_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace ballast::worker

#endif  // BALLAST_GPU_WORKER_PIPELINE_WEIGHTS_RETURN_H_
