#include "gpu_worker/pipeline/completions.h"

#include <utility>

#include "cpu_optimizer_service/common/status.h"

namespace ballast::worker {

Completions::Completions(Device& device) : device_(device), thread_([this] { Run(); }) {}

Completions::~Completions() {
  {
    MutexLock lock(mutex_);
    stopping_ = true;
    changed_.NotifyAll();
  }
  thread_.join();
}

// Run puts an event into `events_` only after its wait, so none is recorded again that is still
// awaited.
absl::StatusOr<std::unique_ptr<DeviceEvent>> Completions::TakeEvent() {
  {
    MutexLock lock(mutex_);
    if (!events_.empty()) {
      std::unique_ptr<DeviceEvent> event = std::move(events_.back());
      events_.pop_back();
      return event;
    }
  }
  return device_.CreateEvent();
}

absl::Status Completions::After(DeviceStream& stream, Then then) {
  BALLAST_ASSIGN_OR_RETURN(std::unique_ptr<DeviceEvent> event, TakeEvent());
  // Recorded before it is in the queue: the thread may wait for it at once, and an event that this
  // Record has not reached counts as done.
  BALLAST_RETURN_IF_ERROR(stream.Record(*event));
  Enqueue({.event = std::move(event), .then = std::move(then)});
  return absl::OkStatus();
}

void Completions::AfterThose(Then then) { Enqueue({.event = nullptr, .then = std::move(then)}); }

void Completions::Enqueue(Owed owed) {
  MutexLock lock(mutex_);
  queue_.push_back(std::move(owed));
  changed_.NotifyAll();
}

void Completions::WaitIdle() {
  MutexLock lock(mutex_);
  while (busy_ || !queue_.empty()) changed_.Wait(mutex_);
}

void Completions::Run() {
  while (true) {
    Owed owed;
    {
      MutexLock lock(mutex_);
      while (queue_.empty() && !stopping_) changed_.Wait(mutex_);
      // Calls that are queued are made also when the thread stops: they release memory that others
      // wait for.
      if (queue_.empty()) return;
      owed = std::move(queue_.front());
      queue_.pop_front();
      // Set under the lock that takes the call: WaitIdle must not find an empty queue before the
      // call is made.
      busy_ = true;
    }
    // Without the lock, because `then` may ask for further calls.
    owed.then(owed.event != nullptr ? owed.event->Synchronize() : absl::OkStatus());
    owed.then = nullptr;  // Destroyed before a waiting thread is notified.
    MutexLock lock(mutex_);
    if (owed.event != nullptr) events_.push_back(std::move(owed.event));
    busy_ = false;
    changed_.NotifyAll();
  }
}

}  // namespace ballast::worker
