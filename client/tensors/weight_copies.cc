#include "client/tensors/weight_copies.h"

#include <algorithm>
#include <utility>

namespace ballast::client {

WeightCopies::WeightCopies(CopyThreads& threads, int64_t chunks, int64_t bytes,
                           std::function<void(int chunk)> copy)
    : threads_(threads), most_helpers_(threads.WorthFor(bytes)), copy_(std::move(copy)) {
  MutexLock lock(mutex_);
  // No chunk waits twice, so that Add, on the session's thread, allocates nothing for these. The
  // one more is the thread that is in Finish.
  waiting_.reserve(chunks);
  copying_.reserve(most_helpers_ + 1);
}

void WeightCopies::Add(int chunk) {
  MutexLock lock(mutex_);
  if (stopped_) return;
  waiting_.push_back(chunk);
  if (helpers_ >= most_helpers_) return;
  ++helpers_;
  threads_.Run([this] { Help(); });
}

void WeightCopies::Help() {
  MutexLock lock(mutex_);
  CopyAll();
  // Under the lock under which CopyAll has found nothing more: an Add that comes later sees that
  // this helper is gone, and starts another one.
  if (--helpers_ == 0) idle_.NotifyAll();
}

void WeightCopies::Finish() {
  MutexLock lock(mutex_);
  CopyAll();
  while (!copying_.empty()) idle_.Wait(mutex_);
}

void WeightCopies::Finish(absl::Span<const int> chunks) {
  MutexLock lock(mutex_);
  for (const int chunk : chunks) {
    // What no thread has begun is copied here, out of its turn; for the rest the second loop waits.
    const auto found = std::find(waiting_.begin(), waiting_.end(), chunk);
    if (found == waiting_.end()) continue;
    waiting_.erase(found);
    Copy(chunk);
  }
  for (const int chunk : chunks) {
    while (std::count(copying_.begin(), copying_.end(), chunk) > 0) idle_.Wait(mutex_);
  }
}

void WeightCopies::Stop() {
  MutexLock lock(mutex_);
  stopped_ = true;
  waiting_.clear();
  // Also for helpers that have not begun: their tasks have a pointer to this object.
  while (!copying_.empty() || helpers_ > 0) idle_.Wait(mutex_);
}

void WeightCopies::CopyAll() {
  while (!waiting_.empty()) {
    const int chunk = waiting_.back();  // What came last may still be in a cache.
    waiting_.pop_back();
    Copy(chunk);
  }
}

void WeightCopies::Copy(int chunk) {
  copying_.push_back(chunk);
  mutex_.Unlock();
  copy_(chunk);
  mutex_.Lock();
  copying_.erase(std::find(copying_.begin(), copying_.end(), chunk));
  idle_.NotifyAll();
}

}  // namespace ballast::client
