// Calls of ranks' streams that may wait (Discard, StopProvisional), so that each is answered once,
// whatever becomes of the job.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_JOB_STREAM_CALLS_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_JOB_STREAM_CALLS_H_

#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "cpu_optimizer_service/common/system/mutex.h"
#include "cpu_optimizer_service/job/pending.h"

namespace ballast {

// Those of one stream, one at a time. There before the call, so that to answer it takes no memory.
// Thread-safe.
class StreamCall {
 public:
  void Begin(Done<bool> done) {
    MutexLock lock(mutex_);
    done_ = std::move(done);
  }
  // Does nothing once it is answered.
  void Answer(absl::StatusOr<bool> answer) {
    Done<bool> done;
    {
      MutexLock lock(mutex_);
      done = std::exchange(done_, nullptr);
    }
    if (done) std::move(done)(std::move(answer));
  }

 private:
  Mutex mutex_;
  Done<bool> done_ ABSL_GUARDED_BY(mutex_);
};

// Those of all ranks' streams, for the job to answer when it breaks. Thread-safe.
class StreamCalls {
 public:
  explicit StreamCalls(int ranks) : calls_(ranks) {}

  // The rank's newest one.
  void Add(int rank, std::shared_ptr<StreamCall> call) {
    MutexLock lock(mutex_);
    std::swap(calls_[rank], call);
  }
  void Answer(int rank, const absl::Status& status) {
    std::shared_ptr<StreamCall> call;
    {
      MutexLock lock(mutex_);
      std::swap(calls_[rank], call);
    }
    if (call != nullptr) call->Answer(status);
  }

 private:
  Mutex mutex_;
  std::vector<std::shared_ptr<StreamCall>> calls_ ABSL_GUARDED_BY(mutex_);  // By rank. Nullable.
};

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_JOB_STREAM_CALLS_H_
