#include "gpu_worker/pipeline/device_buckets.h"

#include <utility>

#include "cpu_optimizer_service/common/status.h"
#include "gpu_worker/pipeline/pipeline_errors.h"

namespace ballast::worker {
absl::StatusOr<std::unique_ptr<DeviceBuckets>> DeviceBuckets::Create(
    Device& device, const Layout& layout, absl::Span<const Bucket> buckets,
    absl::Span<const int> backward_order) {
  std::vector<Events> events(buckets.size());
  for (Events& of_bucket : events) {
    BALLAST_ASSIGN_OR_RETURN(of_bucket.ready, device.CreateEvent());
    BALLAST_ASSIGN_OR_RETURN(of_bucket.released, device.CreateEvent());
  }
  return std::unique_ptr<DeviceBuckets>(new DeviceBuckets(
      device, MakeBucketOrder(layout, buckets, backward_order), std::move(events)));
}

DeviceBuckets::DeviceBuckets(Device& device, BucketOrder order, std::vector<Events> events)
    : order_(std::move(order)),
      events_(std::move(events)),
      started_(events_.size(), false),
      waited_(device),
      recorded_(events_.size(), false) {
  for (const std::vector<int>& parameters : order_.parameters_of_bucket) {
    states_.emplace_back(static_cast<int>(parameters.size()));
  }
}

// ---------------------------------------------------------------- the passes

absl::Status DeviceBuckets::StartPass(DeviceStream& compute, uint32_t micro_step,
                                      uint32_t micro_steps) {
  micro_step_ = micro_step;
  micro_steps_ = micro_steps;
  started_.assign(started_.size(), false);
  for (size_t b = 0; b < events_.size(); ++b) {
    if (!order_.parameters_of_bucket[b].empty()) continue;  // No gradient will make it ready.
    BALLAST_RETURN_IF_ERROR(StartFilling(compute, b));
    BALLAST_RETURN_IF_ERROR(Completed(compute, b));
  }
  return absl::OkStatus();
}

absl::Status DeviceBuckets::BeforeGradient(DeviceStream& compute, int parameter) {
  for (const int bucket : order_.buckets_of_parameter[parameter]) {
    if (!started_[bucket]) BALLAST_RETURN_IF_ERROR(StartFilling(compute, bucket));
  }
  return absl::OkStatus();
}

absl::Status DeviceBuckets::StartFilling(DeviceStream& compute, int bucket) {
  started_[bucket] = true;
  // Only a real wait is timed and given to the stream: a bucket that is free already costs no event
  // here.
  BALLAST_ASSIGN_OR_RETURN(const bool waits, HasToWait(bucket));
  if (!waits) return AwaitReleased(bucket);
  // The wait on the host is between the two events too: `compute` soon has nothing to do, and by
  // the device's clock that is a wait for the reductions.
  return waited_.Around(compute, [&] {
    BALLAST_RETURN_IF_ERROR(AwaitReleased(bucket));
    return compute.Wait(*events_[bucket].released);
  });
}

bool DeviceBuckets::MayFill(int bucket) const {
  const GradientBucket& state = states_[bucket];
  return state.state() == BucketState::kReleased ||
         (state.state() == BucketState::kAccumulated && !state.whole());
}

absl::StatusOr<bool> DeviceBuckets::HasToWait(int bucket) const {
  {
    MutexLock lock(mutex_);
    // The sum's first micro-step has waited.
    if (states_[bucket].state() == BucketState::kAccumulated && !states_[bucket].whole()) {
      return false;
    }
    if (!MayFill(bucket)) return true;
  }
  // Without the lock: only this thread takes a bucket out of these states. An event that was never
  // recorded, as before the first reduction, counts as done.
  BALLAST_ASSIGN_OR_RETURN(const bool released, events_[bucket].released->Done());
  return !released;
}

// On the host, and the bucket is the passes' then.
absl::Status DeviceBuckets::AwaitReleased(int bucket) {
  MutexLock lock(mutex_);
  while (!stopped_ && !MayFill(bucket)) changed_.Wait(mutex_);
  if (stopped_) return Stopped();
  states_[bucket].StartFilling(micro_step_, micro_steps_);
  return absl::OkStatus();
}

absl::Status DeviceBuckets::GradientReady(DeviceStream& compute, int parameter) {
  for (const int bucket : order_.buckets_of_parameter[parameter]) {
    bool complete;
    {
      MutexLock lock(mutex_);
      states_[bucket].CompleteOne();
      complete = states_[bucket].state() == BucketState::kReady;
    }
    if (complete) BALLAST_RETURN_IF_ERROR(Completed(compute, bucket));
  }
  return absl::OkStatus();
}

// The moves are of what the stream was given, in its order; the device does them later.
absl::Status DeviceBuckets::Completed(DeviceStream& compute, int bucket) {
  {
    MutexLock lock(mutex_);
    GradientBucket& state = states_[bucket];
    if (state.accumulates()) {  // Backward has added it.
      state.StartAccumulating();
      state.FinishAccumulating();
      if (!state.whole()) return absl::OkStatus();
    }
  }
  // Recorded before `recorded_` is set: else the other thread could make its stream wait for the
  // Record of the reduction before, and the bucket would be read too early.
  BALLAST_RETURN_IF_ERROR(compute.Record(*events_[bucket].ready));
  MutexLock lock(mutex_);
  recorded_[bucket] = true;
  changed_.NotifyAll();
  return absl::OkStatus();
}

// ---------------------------------------------------------------- the reductions

absl::Status DeviceBuckets::WaitReady(DeviceStream& communicate, int bucket) {
  {
    MutexLock lock(mutex_);
    while (!stopped_ && !recorded_[bucket]) changed_.Wait(mutex_);
    if (stopped_) return Stopped();
    // One flag is enough, because no micro-step fills the bucket again before Release.
    recorded_[bucket] = false;
  }
  return communicate.Wait(*events_[bucket].ready);
}

void DeviceBuckets::StartReducing(int bucket) {
  MutexLock lock(mutex_);
  states_[bucket].Seal();
  states_[bucket].StartReducing();
}

absl::Status DeviceBuckets::Release(DeviceStream& communicate, int bucket) {
  // Recorded before the move, for the same reason as `ready`: `compute` could else write over what
  // is still to be read.
  BALLAST_RETURN_IF_ERROR(communicate.Record(*events_[bucket].released));
  MutexLock lock(mutex_);
  states_[bucket].FinishReducing();
  states_[bucket].Release();
  changed_.NotifyAll();
  return absl::OkStatus();
}

void DeviceBuckets::Stop() {
  MutexLock lock(mutex_);
  stopped_ = true;
  changed_.NotifyAll();
}

}  // namespace ballast::worker
