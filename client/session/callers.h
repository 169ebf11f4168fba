// Counts the threads inside an object's calls, so that its destructor can wait for them.
//
// Thread-safe.
#ifndef BALLAST_CLIENT_SESSION_CALLERS_H_
#define BALLAST_CLIENT_SESSION_CALLERS_H_

#include "absl/base/thread_annotations.h"
#include "cpu_optimizer_service/common/system/mutex.h"

namespace ballast::client {

class Callers {
 public:
  class Entry {
   public:
    explicit Entry(Callers& callers) : callers_(callers) {
      MutexLock lock(callers_.mutex_);
      ++callers_.inside_;
    }
    ~Entry() {
      MutexLock lock(callers_.mutex_);
      if (--callers_.inside_ == 0) callers_.left_.NotifyAll();
    }
    Entry(const Entry&) = delete;
    Entry& operator=(const Entry&) = delete;

   private:
    Callers& callers_;
  };

  void AwaitNone() {
    MutexLock lock(mutex_);
    while (inside_ > 0) left_.Wait(mutex_);
  }

 private:
  Mutex mutex_;
  CondVar left_;
  int inside_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace ballast::client

#endif  // BALLAST_CLIENT_SESSION_CALLERS_H_
