// The way of a bucket from backward to the optimizer: a thread that gives reductions and copies to
// their streams, in the same order on all ranks, followed by the sender. The same thread gives the
// gathers of weights, so that all collectives of a rank have one order.
//
// After an error of the optimizer it continues with the reductions alone, so that no rank waits for
// this one. After a failure it stops.
//
// Threads: one calls Give, BeginPass, EndPass, the waits and UseGradientMemory; any calls Stop.
// `communicate`, `copy_out` and the collective belong to this thread until End.
#ifndef BALLAST_GPU_WORKER_PIPELINE_GRADIENT_PATH_H_
#define BALLAST_GPU_WORKER_PIPELINE_GRADIENT_PATH_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "client/session.h"
#include "cpu_optimizer_service/common/system/mutex.h"
#include "gpu_worker/buckets/bucket_order.h"
#include "gpu_worker/device/device.h"
#include "gpu_worker/device/device_collective.h"
#include "gpu_worker/pipeline/device_buckets.h"
#include "gpu_worker/pipeline/device_reduction.h"
#include "gpu_worker/pipeline/device_trace.h"
#include "gpu_worker/pipeline/gradient_sender.h"
#include "gpu_worker/pipeline/gradient_slots.h"
#include "gpu_worker/pipeline/pipeline_errors.h"
#include "gpu_worker/training/backend.h"
#include "gpu_worker/training/training_job.h"

namespace ballast::worker {

class GradientPath {
 public:
  struct Parts {
    Device& device;
    DeviceStream& communicate;
    DeviceStream& copy_out;
    DeviceCollective& collective;
    const TrainingJob& job;
    DeviceBuckets& buckets;
    DeviceReduction& reduction;
    DeviceTrace& trace;
    PipelineErrors& errors;
  };
  // A micro-step in progress.
  struct Pass {
    uint64_t step = 0;
    uint32_t micro_step = 0;
    uint32_t micro_steps = 1;
    // Backward sums the step's micro-steps; the sum is reduced with the last.
    bool sums_here = false;
    bool last() const { return micro_step + 1 == micro_steps; }
  };

  // The parts are borrowed until destruction. RESOURCE_EXHAUSTED with the sizes.
  static absl::StatusOr<std::unique_ptr<GradientPath>> Create(const Parts& parts,
                                                              const GradientSlotsOptions& options);
  ~GradientPath();

  // Before the first pass.
  void Start(GradientSink& sink) { sender_->Start(sink); }
  absl::Status UseGradientMemory(const std::function<absl::Span<std::byte>(int chunk)>& memory) {
    return places_->Use(memory);
  }

  // The thread does `work` after all earlier work, unless it has ended after a failure.
  void Give(std::function<void()> work);
  // Waits until all work is done, or the thread has ended.
  void WaitGiven();

  void BeginPass(const Pass& pass);
  // All of the pass's work was given.
  void EndPass(UsedParameters used);

  // Waits until all passes given are reduced, or the thread has ended after a failure.
  void WaitReduced();
  // After WaitReduced: waits until all their chunks are handed over, or, after an error, until they
  // are released and nothing writes to the optimizer's memory.
  void WaitSent();
  // Seconds that the reductions waited because the optimizer occupied all places.
  double places_waited_seconds() const { return places_->waited_seconds(); }

  void Stop();
  // Joins the threads, and waits until the streams are done; hands over nothing more. Called before
  // destruction, and before the buckets' destruction.
  void End();

 private:
  // Device memory from which a bucket is copied to the host, in the wire dtype.
  struct WireBuffer {
    std::unique_ptr<DeviceMemory> memory;
    std::unique_ptr<DeviceEvent> copied_out;
  };

  GradientPath(const Parts& parts, const GradientSlotsOptions& options)
      : parts_(parts), options_(options) {}
  absl::Status Init();
  void Run();
  void WaitForStreams();
  absl::Status Communicate(const Pass& pass);
  absl::Status ReduceAndSend(int bucket, const Pass& pass);
  // This rank's part of the sum, on `communicate`; null if it is not to be sent.
  absl::StatusOr<const float*> Reduce(int bucket, const Pass& pass);
  absl::Status SendGradient(int bucket, const Pass& pass, const float* gradient);
  absl::Status RoundToPlaces(int bucket, const Pass& pass, const float* gradient);
  absl::Status CopyOut(int bucket, const Pass& pass, const WireBuffer& wire);
  // Takes a bucket's places, and calls give(first element in the shard, chunk or -1 for several,
  // place) for each row of adjacent places in memory. Then pushes the chunks.
  absl::Status GiveRows(int bucket, const Pass& pass, DeviceStream& stream,
                        absl::FunctionRef<absl::Status(int64_t, int, absl::Span<std::byte>)> give);
  std::optional<GradientSlots::Place> TakePlace(int chunk, const Pass& pass);
  // Empty once stopped.
  std::optional<UsedParameters> WaitForPassEnd();
  void Fail(const absl::Status& status, const Pass& pass);

  const Parts parts_;
  const GradientSlotsOptions options_;
  std::vector<RankShard> shards_;   // By bucket.
  std::array<WireBuffer, 2> wire_;  // One is filled while the other is copied.
  size_t next_wire_ = 0;
  std::unique_ptr<GradientSlots> places_;

  Mutex mutex_;
  CondVar changed_;
  // Bounded: the passes wait for it.
  std::deque<std::function<void()>> given_ ABSL_GUARDED_BY(mutex_);
  std::deque<UsedParameters> used_ ABSL_GUARDED_BY(mutex_);  // For passes that ended.
  Pass newest_ ABSL_GUARDED_BY(mutex_);
  bool stopped_ ABSL_GUARDED_BY(mutex_) = false;
  bool left_ ABSL_GUARDED_BY(mutex_) = false;  // The thread has ended.

  std::unique_ptr<GradientSender> sender_;
  std::thread thread_;
};

}  // namespace ballast::worker

#endif  // BALLAST_GPU_WORKER_PIPELINE_GRADIENT_PATH_H_
