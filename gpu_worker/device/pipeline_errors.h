// What went wrong in a pipeline of several threads, first error first. A step's error is the
// optimizer's, and goes with the step: the pipeline goes on without handing over. A failure is the
// device's or a collective's, and stays: everything stops.
//
// Thread-safe.
#ifndef BALLAST_GPU_WORKER_DEVICE_PIPELINE_ERRORS_H_
#define BALLAST_GPU_WORKER_DEVICE_PIPELINE_ERRORS_H_

#include <functional>
#include <utility>

#include "absl/status/status.h"
#include "cpu_optimizer_service/common/mutex.h"

namespace ballast::worker {

class PipelineErrors {
 public:
  // `on_failure` is called with the first failure, by the thread that had it; it wakes all others.
  explicit PipelineErrors(std::function<void()> on_failure) : on_failure_(std::move(on_failure)) {}

  void FailStep(const absl::Status& status) {
    MutexLock lock(mutex_);
    if (current_.ok()) current_ = status;
  }
  void Fail(const absl::Status& status) {
    {
      MutexLock lock(mutex_);
      if (!failure_.ok()) return;
      failure_ = status;
      if (current_.ok()) current_ = status;
    }
    on_failure_();
  }

  absl::Status failure() const {
    MutexLock lock(mutex_);
    return failure_;
  }
  // The first error since the last FinishStep, or the failure.
  absl::Status current() const {
    MutexLock lock(mutex_);
    return current_;
  }
  // The same; the step's own error is forgotten.
  absl::Status FinishStep() {
    MutexLock lock(mutex_);
    return std::exchange(current_, failure_);
  }

 private:
  const std::function<void()> on_failure_;
  mutable Mutex mutex_;
  absl::Status current_ ABSL_GUARDED_BY(mutex_);
  absl::Status failure_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace ballast::worker

#endif  // BALLAST_GPU_WORKER_DEVICE_PIPELINE_ERRORS_H_
