#include "client/c_api/weight_copies.h"

#include <new>
#include <utility>

namespace ballast::client {

WeightCopies::WeightCopies(CopyThreads& threads, int64_t chunks, int64_t bytes,
                           std::function<void(int chunk)> copy)
    : threads_(threads), most_helpers_(threads.WorthFor(bytes)), copy_(std::move(copy)) {
  MutexLock lock(mutex_);
  waiting_.reserve(chunks);
}

void WeightCopies::Add(int chunk) {
  MutexLock lock(mutex_);
  if (stopped_) return;
  waiting_.push_back(chunk);
  if (helpers_ >= most_helpers_) return;
  ++helpers_;
  try {
    threads_.Run([this] { Help(); });
  } catch (const std::bad_alloc&) {  // Finish does it.
    --helpers_;
  }
}

void WeightCopies::Help() {
  MutexLock lock(mutex_);
  CopyAll();
  if (--helpers_ == 0) idle_.NotifyAll();
}

void WeightCopies::Finish() {
  MutexLock lock(mutex_);
  CopyAll();
  while (copying_ > 0) idle_.Wait(mutex_);
}

void WeightCopies::Stop() {
  MutexLock lock(mutex_);
  stopped_ = true;
  waiting_.clear();
  while (copying_ > 0 || helpers_ > 0) idle_.Wait(mutex_);
}

void WeightCopies::CopyAll() {
  while (!waiting_.empty()) {
    const int chunk = waiting_.back();  // What came last may still be in a cache.
    waiting_.pop_back();
    ++copying_;
    mutex_.Unlock();
    copy_(chunk);
    mutex_.Lock();
    if (--copying_ == 0) idle_.NotifyAll();
  }
}

}  // namespace ballast::client
