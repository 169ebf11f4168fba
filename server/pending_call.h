// The engine's call that an RPC waits for; cancelled with the RPC.
//
//   const std::shared_ptr<PendingCall> pending = pending_;  // The Done may delete this object.
//   pending->Await(job->Save(directory, [this](absl::StatusOr<CheckpointInfo> saved) { ... }));
//   ... in OnCancel:
//   pending_->Cancel();
#ifndef BALLAST_SERVER_PENDING_CALL_H_
#define BALLAST_SERVER_PENDING_CALL_H_

#include <memory>
#include <utility>

#include "cpu_optimizer_service/common/system/mutex.h"
#include "cpu_optimizer_service/job/pending.h"

namespace ballast::server {

// Thread-safe.
class PendingCall {
 public:
  // If the RPC has been cancelled, cancels `pending` at once. Its Done may have been called
  // already.
  void Await(Pending pending) {
    {
      MutexLock lock(mutex_);
      if (!cancelled_) {
        pending_ = std::move(pending);
        return;
      }
    }
    pending.Cancel();  // Calls the Done, so without the lock.
  }

  void Cancel() {
    Pending pending;
    {
      MutexLock lock(mutex_);
      cancelled_ = true;
      std::swap(pending, pending_);
    }
    pending.Cancel();
  }

  bool cancelled() const {
    MutexLock lock(mutex_);
    return cancelled_;
  }

 private:
  mutable Mutex mutex_;
  bool cancelled_ ABSL_GUARDED_BY(mutex_) = false;
  Pending pending_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace ballast::server

#endif  // BALLAST_SERVER_PENDING_CALL_H_
