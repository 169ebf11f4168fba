// The gradient buckets of a device: the life of each (buckets/bucket.h), and the two events that
// order the streams around it.
//
//   ready      recorded on `compute` when backward has given it the bucket's last gradient;
//              `communicate` waits for it before it reads the bucket
//   released   recorded on `communicate` when it has been given the last work that reads the
//              bucket; `compute` waits for it before the next micro-step writes there
//
// Of micro-steps that one reduction sums, each adds its gradient to what the bucket has; only the
// last makes it ready.
//
// A stream can wait only for what was recorded, so each side first waits, on the host, until the
// other has given its work: that bounds the distance between passes and reductions.
//
// Threads: two, the one that gives the passes and the one that gives the reductions; Stop by any.
#ifndef BALLAST_GPU_WORKER_PIPELINE_DEVICE_BUCKETS_H_
#define BALLAST_GPU_WORKER_PIPELINE_DEVICE_BUCKETS_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "cpu_optimizer_service/common/buckets.h"
#include "cpu_optimizer_service/common/layout.h"
#include "cpu_optimizer_service/common/system/mutex.h"
#include "gpu_worker/buckets/bucket.h"
#include "gpu_worker/buckets/bucket_order.h"
#include "gpu_worker/device/device.h"
#include "gpu_worker/device/stream_seconds.h"

namespace ballast::worker {

class DeviceBuckets {
 public:
  // Borrows until destruction.
  static absl::StatusOr<std::unique_ptr<DeviceBuckets>> Create(
      Device& device, const Layout& layout, absl::Span<const Bucket> buckets,
      absl::Span<const int> backward_order);

  const BucketOrder& order() const { return order_; }

  // --- For the thread that gives passes to `compute`. CANCELLED once stopped.

  // A pass begins: micro-step `micro_step` of the `micro_steps` that the next reduction sums.
  absl::Status StartPass(DeviceStream& compute, uint32_t micro_step, uint32_t micro_steps);
  // The next work of `compute` writes the parameter's gradient. Waits until the reductions have
  // released its buckets. Repeating it in a pass has no effect.
  absl::Status BeforeGradient(DeviceStream& compute, int parameter);
  // Once for each parameter of a pass, after BeforeGradient.
  absl::Status GradientReady(DeviceStream& compute, int parameter);
  // The time that `compute` waited for reductions since the last call, in seconds, by the device's
  // clock. `compute` has done all its work.
  absl::StatusOr<double> TakeWaitedSeconds() { return waited_.Take(); }
  void ForgetWaitedSeconds() { waited_.Clear(); }

  // --- For the thread that gives reductions to `communicate`.

  // Waits until the bucket is ready on the host, and makes the stream wait for its event.
  absl::Status WaitReady(DeviceStream& communicate, int bucket);
  // Its reduction follows, with all micro-steps in it.
  void StartReducing(int bucket);
  // The last work that reads the reduced values was given to the stream.
  absl::Status Release(DeviceStream& communicate, int bucket);
  // As last recorded.
  DeviceEvent& released(int bucket) { return *events_[bucket].released; }

  // Every wait, now and later, ends with CANCELLED.
  void Stop();

 private:
  struct Events {
    std::unique_ptr<DeviceEvent> ready;
    std::unique_ptr<DeviceEvent> released;
  };

  DeviceBuckets(Device& device, BucketOrder order, std::vector<Events> events);
  absl::Status StartFilling(DeviceStream& compute, int bucket);
  bool MayFill(int bucket) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::StatusOr<bool> HasToWait(int bucket) const;
  absl::Status AwaitReleased(int bucket);
  // A micro-step's gradient is complete.
  absl::Status Completed(DeviceStream& compute, int bucket);

  const BucketOrder order_;
  const std::vector<Events> events_;

  // Used by the passes' thread.
  uint32_t micro_step_ = 0;
  uint32_t micro_steps_ = 1;
  std::vector<bool> started_;  // By bucket, in this pass.
  StreamSeconds waited_;

  mutable Mutex mutex_;
  CondVar changed_;
  std::vector<GradientBucket> states_ ABSL_GUARDED_BY(mutex_);
  std::vector<bool> recorded_ ABSL_GUARDED_BY(mutex_);  // By bucket: ready, and its event recorded.
  bool stopped_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace ballast::worker

#endif  // BALLAST_GPU_WORKER_PIPELINE_DEVICE_BUCKETS_H_
