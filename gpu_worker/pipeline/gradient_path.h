// From a bucket that backward has completed to the optimizer: the thread that gives reductions and
// copies to their streams, in the one order of all ranks, and behind it the sender. The gathers of
// weights are given by the same thread: so all collectives of a rank have one order.
//
// After an error of the optimizer's it goes on with the reductions alone, so that no rank waits for
// this one; after a failure it stops.
//
// Threads: Give, BeginPass, EndPass, the waits and UseGradientMemory come from one, Stop from any.
// `communicate`, `copy_out` and the collective are this thread's, until End.
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

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "client/session.h"
#include "cpu_optimizer_service/common/mutex.h"
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
  // A micro-step on its way.
  struct Pass {
    uint64_t step = 0;
    uint32_t micro_step = 0;
    uint32_t micro_steps = 1;
    bool sums_here = false;  // Reduced with the step's last micro-step.
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

  // Has the thread do `work` after what it was given before; not once it has left after a failure.
  void Give(std::function<void()> work);
  // Until all that was given is done, or the thread has left.
  void WaitGiven();

  void BeginPass(const Pass& pass);
  // All of the pass's work was given.
  void EndPass(UsedParameters used);

  // Until all passes given are reduced, or the thread has left after a failure.
  void WaitReduced();
  // After WaitReduced: until all their chunks are handed over, or released after an error and
  // nothing writes to the optimizer's memory any more.
  void WaitSent();
  // Of the reductions, behind an optimizer that does not take what it has.
  double places_waited_seconds() const { return places_->waited_seconds(); }

  void Stop();
  // Joins the threads, and waits until the streams are done; hands over nothing more. Before
  // destruction, and before the buckets go.
  void End();

 private:
  // The device's memory for a bucket on its way to the host, in the wire dtype.
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
  // This rank's shard, on `communicate`, or null where there is none yet, or none to send.
  absl::StatusOr<const float*> SumOrReduce(int bucket, const Pass& pass);
  absl::Status SendShard(int bucket, const Pass& pass, const float* shard);
  absl::Status RoundToPlaces(int bucket, const Pass& pass, const float* shard);
  absl::Status CopyOut(int bucket, const Pass& pass, const WireBuffer& wire);
  std::optional<GradientSlots::Place> TakePlace(int chunk, const Pass& pass);
  absl::Status GiveToSender(int chunk, const Pass& pass, GradientSlots::Place place,
                            DeviceStream& stream);
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
  std::deque<std::function<void()>> given_ ABSL_GUARDED_BY(mutex_);  // Few: the passes wait for it.
  std::deque<UsedParameters> used_ ABSL_GUARDED_BY(mutex_);          // Of passes that have ended.
  Pass newest_ ABSL_GUARDED_BY(mutex_);
  bool stopped_ ABSL_GUARDED_BY(mutex_) = false;
  bool left_ ABSL_GUARDED_BY(mutex_) = false;  // The thread is gone.

  std::unique_ptr<GradientSender> sender_;
  std::thread thread_;
};

}  // namespace ballast::worker

#endif  // BALLAST_GPU_WORKER_PIPELINE_GRADIENT_PATH_H_
