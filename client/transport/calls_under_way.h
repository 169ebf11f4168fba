// The running calls of a transport, so that another thread can cancel them.
//
// Thread-safe.
#ifndef BALLAST_CLIENT_TRANSPORT_CALLS_UNDER_WAY_H_
#define BALLAST_CLIENT_TRANSPORT_CALLS_UNDER_WAY_H_

#include <grpcpp/client_context.h>

#include <algorithm>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "cpu_optimizer_service/common/system/mutex.h"

namespace ballast::client {

class CallsUnderWay {
 public:
  // A call, from before it starts to after its end. `context` outlives it.
  class Entry {
   public:
    Entry(CallsUnderWay& calls, grpc::ClientContext& context) : calls_(calls), context_(context) {
      MutexLock lock(calls_.mutex_);
      calls_.contexts_.push_back(&context_);
      if (calls_.cancelled_) context_.TryCancel();
    }
    ~Entry() {
      MutexLock lock(calls_.mutex_);
      auto& contexts = calls_.contexts_;
      contexts.erase(std::find(contexts.begin(), contexts.end(), &context_));
    }
    Entry(const Entry&) = delete;
    Entry& operator=(const Entry&) = delete;

   private:
    CallsUnderWay& calls_;
    grpc::ClientContext& context_;
  };

  // Cancels all calls, and every later one.
  void Cancel() {
    MutexLock lock(mutex_);
    cancelled_ = true;
    for (grpc::ClientContext* context : contexts_) context->TryCancel();
  }

 private:
  Mutex mutex_;
  bool cancelled_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<grpc::ClientContext*> contexts_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace ballast::client

#endif  // BALLAST_CLIENT_TRANSPORT_CALLS_UNDER_WAY_H_
