// The errors of a pipeline of several threads, the first of each kind. A step's error is the
// optimizer's and ends with the step: the pipeline continues without handing over. A failure is the
// device's or a collective's and is permanent: everything stops.
//
// A failure outranks an error of the step, in either order: the caller must learn at once that
// there is no next step. The failure's message contains an earlier error of the step, which may be
// the cause.
//
// Thread-safe.
#ifndef BALLAST_GPU_WORKER_PIPELINE_PIPELINE_ERRORS_H_
#define BALLAST_GPU_WORKER_PIPELINE_PIPELINE_ERRORS_H_

#include <atomic>
#include <functional>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/status.h"
#include "cpu_optimizer_service/common/system/mutex.h"

namespace ballast::worker {

// What a wait ends with when the backend is destroyed.
inline absl::Status Stopped() { return absl::CancelledError("the backend has stopped"); }

class PipelineErrors {
 public:
  // `on_failure` is called with the first failure, by the failing thread without a lock; it wakes
  // all others.
  explicit PipelineErrors(std::function<void()> on_failure) : on_failure_(std::move(on_failure)) {}

  void FailStep(const absl::Status& status) {
    MutexLock lock(mutex_);
    if (step_error_.ok()) step_error_ = status;
    any_ = true;
  }
  // `status` is an error.
  void Fail(const absl::Status& status) {
    {
      MutexLock lock(mutex_);
      if (!failure_.ok()) return;
      failure_ = step_error_.ok() ? status
                                  : Annotate(status, absl::StrCat(step_error_.message(), "; then"));
      any_ = true;
    }
    on_failure_();
  }

  absl::Status failure() const {
    MutexLock lock(mutex_);
    return failure_;
  }
  // The failure, or the first error of the step.
  absl::Status current() const {
    MutexLock lock(mutex_);
    return failure_.ok() ? step_error_ : failure_;
  }
  // Whether there is an error. Cheap enough for each of thousands of chunks.
  bool any() const { return any_; }
  // As current, and clears the step's own error.
  absl::Status FinishStep() {
    MutexLock lock(mutex_);
    const absl::Status step_error = std::exchange(step_error_, absl::OkStatus());
    any_ = !failure_.ok();
    return failure_.ok() ? step_error : failure_;
  }

 private:
  const std::function<void()> on_failure_;
  mutable Mutex mutex_;
  std::atomic<bool> any_ = false;  // Written with the mutex.
  absl::Status step_error_ ABSL_GUARDED_BY(mutex_);
  absl::Status failure_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace ballast::worker

#endif  // BALLAST_GPU_WORKER_PIPELINE_PIPELINE_ERRORS_H_
