#include "server/call_watch.h"

#include <utility>

#include "cpu_optimizer_service/common/system/memory_guard.h"

namespace ballast::server {
namespace {

constexpr std::chrono::seconds kLookEvery(1);
// For a call that is over. Its last messages, and the reason of its end, may still be wanted.
constexpr double kLastWriteSeconds = 3;

double Seconds(WatchedCall::Clock::duration duration) {
  return std::chrono::duration<double>(duration).count();
}

}  // namespace

void WatchedCall::WriteBegins() {
  MutexLock lock(mutex_);
  writing_since_ = Clock::now();
}

void WatchedCall::WriteEnded() {
  MutexLock lock(mutex_);
  writing_since_.reset();
}

void WatchedCall::IsOver() {
  MutexLock lock(mutex_);
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
  while (cancelling_ != std::thread::id() && cancelling_ != here) cancelled_.Wait(mutex_);
  std::swap(cancel, cancel_);
  std::swap(over, over_if_);
}

void WatchedCall::Look(Clock::time_point now) {
  std::function<void()> cancel;
  {
    MutexLock lock(mutex_);
    if (cancel_ == nullptr) return;
    if (over_if_ != nullptr && !over_since_.has_value() && over_if_()) over_since_ = now;
    const bool too_late =
        over_since_.has_value()
            ? Seconds(now - *over_since_) > kLastWriteSeconds
            : writing_since_.has_value() && Seconds(now - *writing_since_) > patience_seconds_;
    if (!too_late) return;
    std::swap(cancel, cancel_);
    cancelling_ = std::this_thread::get_id();
  }
  (void)RunsInMemory(cancel);  // Calls back, so without the lock.
  {
    MutexLock lock(mutex_);
    cancelling_ = std::thread::id();
  }
  cancelled_.NotifyAll();
}

CallWatch::CallWatch(std::function<void()> every_second)
    : every_second_(std::move(every_second)), thread_([this] { Run(); }) {}

CallWatch::~CallWatch() {
  {
    MutexLock lock(mutex_);
    stopped_ = true;
  }
  changed_.NotifyAll();
  thread_.join();
}

std::shared_ptr<WatchedCall> CallWatch::Watch(std::function<void()> cancel,
                                              double patience_seconds) {
  auto call = std::make_shared<WatchedCall>(std::move(cancel), patience_seconds);
  MutexLock lock(mutex_);
  calls_.push_back(call);
  return call;
}

void CallWatch::Run() {
  while (true) {
    std::vector<std::shared_ptr<WatchedCall>> calls;
    {
      MutexLock lock(mutex_);
      const auto next = WatchedCall::Clock::now() + kLookEvery;
      while (!stopped_ && changed_.WaitUntil(mutex_, next)) continue;
      if (stopped_) return;
      std::erase_if(calls_, [](const auto& call) { return call.expired(); });
    }
    // Those for whose list there is no memory are looked at later.
    (void)RunsInMemory([&] {
      MutexLock lock(mutex_);
      for (const auto& call : calls_) {
        if (auto alive = call.lock()) calls.push_back(std::move(alive));
      }
    });
    // Without the lock: cancelling may call into gRPC.
    for (const auto& call : calls) {
      (void)RunsInMemory([&] { call->Look(WatchedCall::Clock::now()); });
    }
    calls.clear();
    (void)RunsInMemory(every_second_);
  }
}

}  // namespace ballast::server
