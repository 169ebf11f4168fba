#include "client/tensors/copy_threads.h"

#include <algorithm>
#include <memory>

#include "absl/base/thread_annotations.h"
#include "cpu_optimizer_service/common/limits/processors.h"
#include "cpu_optimizer_service/common/system/mutex.h"

namespace ballast::client {
namespace {

// A few threads take all that memory gives.
constexpr int kMostThreads = 8;
// About a tenth of a millisecond, beside which waking a thread is little.
constexpr int64_t kBytesWorthAThread = int64_t{2} << 20;

// Outlives the call: a thread may come to it late, and finds it closed.
class Loop {
 public:
  Loop(int64_t count, absl::FunctionRef<absl::Status(int64_t)> body) : count_(count), body_(body) {}

  // Takes part until nothing is left to begin.
  void Help() {
    MutexLock lock(mutex_);
    if (closed_) return;
    ++inside_;
    while (next_ < count_ && status_.ok()) {
      const int64_t index = next_++;
      mutex_.Unlock();
      absl::Status status = body_(index);
      mutex_.Lock();
      status_.Update(std::move(status));
    }
    if (--inside_ == 0) left_.NotifyAll();
  }
  absl::Status Close() {
    MutexLock lock(mutex_);
    // body_ refers to the frame of the caller, who returns after this.
    closed_ = true;
    while (inside_ > 0) left_.Wait(mutex_);
    return status_;
  }

 private:
  const int64_t count_;
  const absl::FunctionRef<absl::Status(int64_t)> body_;
  Mutex mutex_;
  CondVar left_;
  int64_t next_ ABSL_GUARDED_BY(mutex_) = 0;
  int inside_ ABSL_GUARDED_BY(mutex_) = 0;
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status status_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace

int CopyThreads::DefaultMost() {
  return std::clamp(UsableProcessorCount() - 1, 1, kMostThreads - 1);
}

int CopyThreads::WorthFor(int64_t bytes) const {
  return static_cast<int>(std::min<int64_t>(most_, bytes / kBytesWorthAThread));
}

absl::Status CopyThreads::ForEach(int64_t count, int64_t bytes,
                                  absl::FunctionRef<absl::Status(int64_t)> body) {
  const auto loop = std::make_shared<Loop>(count, body);
  const int64_t helpers = std::min<int64_t>(WorthFor(bytes), count - 1);
  for (int64_t i = 0; i < helpers; ++i) Run([loop] { loop->Help(); });
  loop->Help();
  return loop->Close();
}

}  // namespace ballast::client
