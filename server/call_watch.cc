#include "server/call_watch.h"

#include <utility>

namespace ballast::server {
namespace {

constexpr std::chrono::seconds kCallsEvery(1);
// For a call that is over. Its last messages, and the reason of its end, may still be wanted.
constexpr double kLastWriteSeconds = 3;

double Seconds(WatchedCall::Clock::duration duration) {
  return std::chrono::duration<double>(duration).count();
}

}  // namespace

void WatchedCall::PeerMustAct() {
  MutexLock lock(mutex_);
  must_act_since_ = Clock::now();
}

void WatchedCall::PeerActed() {
  MutexLock lock(mutex_);
  must_act_since_.reset();
}

void WatchedCall::IsOver() {
  MutexLock lock(mutex_);
  // The first time counts: the end of a stream may be reported more than once, and must not give a
  // slow peer more time.
  if (!over_since_.has_value()) over_since_ = Clock::now();
}

void WatchedCall::IsOverIf(std::function<bool()> over) {
  MutexLock lock(mutex_);
  over_if_ = std::move(over);
}

void WatchedCall::Ended() {
  std::function<void()> cancel;  // Destroyed, as the next, without the lock.
  std::function<bool()> over;
  MutexLock lock(mutex_);
  // Cancelling may end the call within itself.
  const std::thread::id here = std::this_thread::get_id();
  // The look uses, without the lock, what the caller destroys after this.
  while (looking_ != std::thread::id() && looking_ != here) looked_.Wait(mutex_);
  std::swap(cancel, cancel_);
  std::swap(over, over_if_);
}

// What the call has given is called without the lock: it asks the engine, or calls back.
void WatchedCall::Look(Clock::time_point now) {
  std::function<void()> cancel;
  std::function<bool()> over;
  {
    MutexLock lock(mutex_);
    if (cancel_ == nullptr) return;
    looking_ = std::this_thread::get_id();
    if (!over_since_.has_value()) std::swap(over, over_if_);
  }
  bool is_over = false;
  if (over != nullptr) is_over = over();
  {
    MutexLock lock(mutex_);
    // Back for the next look, unless IsOverIf has given another one meanwhile.
    if (over_if_ == nullptr) std::swap(over, over_if_);
    if (is_over && !over_since_.has_value()) over_since_ = now;
    // For a call that is over only the short time counts, from its end on, however long its
    // patience.
    const bool too_late =
        over_since_.has_value()
            ? Seconds(now - *over_since_) > kLastWriteSeconds
            : must_act_since_.has_value() && Seconds(now - *must_act_since_) > patience_seconds_;
    if (too_late) std::swap(cancel, cancel_);
  }
  if (cancel != nullptr) cancel();
  {
    MutexLock lock(mutex_);
    looking_ = std::thread::id();
  }
  looked_.NotifyAll();
}

CallWatch::CallWatch(std::function<void()> every_second)
    : every_second_(std::move(every_second)),
      thread_("watch-calls", kCallsEvery, [this] { Look(); }) {}

std::shared_ptr<WatchedCall> CallWatch::Watch(std::function<void()> cancel,
                                              double patience_seconds) {
  auto call = std::make_shared<WatchedCall>(std::move(cancel), patience_seconds);
  MutexLock lock(mutex_);
  // A weak reference: the call ends by itself, and the next look drops it from the list.
  calls_.push_back(call);
  return call;
}

void CallWatch::Look() {
  std::vector<std::shared_ptr<WatchedCall>> calls;
  {
    MutexLock lock(mutex_);
    std::erase_if(calls_, [](const auto& call) { return call.expired(); });
    for (const auto& call : calls_) {
      if (auto alive = call.lock()) calls.push_back(std::move(alive));
    }
  }
  // Without the lock: cancelling may call into gRPC.
  for (const auto& call : calls) call->Look(WatchedCall::Clock::now());
  // These may be the last references to calls that have ended meanwhile. They go before the heap is
  // trimmed, which is what a service does every second (call_pool.h).
  calls.clear();
  every_second_();
}

}  // namespace ballast::server
