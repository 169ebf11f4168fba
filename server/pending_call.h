// The engine's call that an RPC waits for: it is cancelled with the RPC.
//
//   PendingCall::Start<CheckpointInfo>(
//       pending_, [&](Done<CheckpointInfo> done) { return job->Save(directory, std::move(done)); },
//       [this](absl::StatusOr<CheckpointInfo> saved) { ... });
//   ... in OnCancel:
//   pending_->Cancel();
#ifndef BALLAST_SERVER_PENDING_CALL_H_
#define BALLAST_SERVER_PENDING_CALL_H_

#include <atomic>
#include <memory>
#include <utility>

#include "cpu_optimizer_service/common/system/memory_guard.h"
#include "cpu_optimizer_service/common/system/mutex.h"
#include "cpu_optimizer_service/job/pending.h"
#include "server/call_guard.h"

namespace ballast::server {

// Thread-safe.
class PendingCall {
 public:
  // Starts a call: `start` takes its Done and returns its Pending. `answer` is called exactly once,
  // also if there is no memory to start the call, and may then delete the owner of `call`. Throws
  // std::bad_alloc before anything is started.
  template <typename T, typename Starter>
  static void Start(std::shared_ptr<PendingCall> call, Starter&& start, Done<T> answer) {
    const auto once = std::make_shared<AnsweredOnce<T>>(std::move(answer));
    const absl::Status started = GuardedRun([&] {
      call->Await(
          start(Done<T>([once](absl::StatusOr<T> result) { once->Answer(std::move(result)); })));
    });
    if (!started.ok()) once->Answer(started);
  }

  // Cancels `pending` at once if the RPC has been cancelled by now. It may have called its Done
  // already.
  void Await(Pending pending) {
    {
      MutexLock lock(mutex_);
      if (!cancelled_) {
        pending_ = std::move(pending);
        return;
      }
    }
    pending.Cancel();  // Calls the Done, so not with the lock.
  }

  // What has no memory to be cancelled ends when its turn comes.
  void Cancel() {
    Pending pending;
    {
      MutexLock lock(mutex_);
      cancelled_ = true;
      std::swap(pending, pending_);
    }
    (void)RunsInMemory([&] { pending.Cancel(); });
  }

  bool cancelled() const {
    MutexLock lock(mutex_);
    return cancelled_;
  }

 private:
  template <typename T>
  class AnsweredOnce {
   public:
    explicit AnsweredOnce(Done<T> done) : done_(std::move(done)) {}
    void Answer(absl::StatusOr<T> result) {
      if (!answered_.exchange(true)) std::move(done_)(std::move(result));
    }

   private:
    std::atomic<bool> answered_ = false;
    Done<T> done_;
  };

  mutable Mutex mutex_;
  bool cancelled_ ABSL_GUARDED_BY(mutex_) = false;
  Pending pending_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace ballast::server

#endif  // BALLAST_SERVER_PENDING_CALL_H_
