#include "gpu_worker/device/watchdog.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/status.h"

namespace ballast::worker {
namespace {

// The interval of a waiting thread: an operation in progress is done within tens of microseconds.
constexpr absl::Duration kWaitInterval = absl::Microseconds(200);

std::chrono::steady_clock::time_point In(absl::Duration duration) {
  return std::chrono::steady_clock::now() + absl::ToChronoNanoseconds(duration);
}

}  // namespace

Watchdog::Watchdog(WatchdogOptions options) : options_(std::move(options)) {
  if (options_.interval != absl::InfiniteDuration()) thread_ = std::thread([this] { Run(); });
}

Watchdog::~Watchdog() {
  {
    MutexLock lock(mutex_);
    stopping_ = true;
    changed_.NotifyAll();
  }
  if (thread_.joinable()) thread_.join();
}

absl::Status Watchdog::Watch(absl::string_view operation, const Purpose& purpose,
                             std::unique_ptr<DeviceEvent> done) {
  const absl::Time now = options_.now();
  MutexLock lock(mutex_);
  if (!status_.ok()) return status_;
  operations_.push_back(
      {.name = NameOf(operation, purpose), .since = now, .done = std::move(done)});
  return absl::OkStatus();
}

absl::Status Watchdog::Wait() {
  while (true) {
    BALLAST_RETURN_IF_ERROR(Look());
    MutexLock lock(mutex_);
    if (!status_.ok()) return status_;
    if (operations_.empty()) return absl::OkStatus();
    // Not by Synchronize of the event: that has no timeout, and does not see what the library
    // reports.
    changed_.WaitUntil(mutex_, In(kWaitInterval));
  }
}

std::unique_ptr<DeviceEvent> Watchdog::TakeEvent() {
  MutexLock lock(mutex_);
  if (free_events_.empty()) return nullptr;
  std::unique_ptr<DeviceEvent> event = std::move(free_events_.front());
  free_events_.pop_front();
  return event;
}

absl::Status Watchdog::Fail(absl::string_view operation, const Purpose& purpose,
                            const absl::Status& error) {
  return End(Annotate(error, NameOf(operation, purpose)));
}

// The first operation stays where it is while it is examined, without the lock: one looker at a
// time, and no other thread removes operations.
absl::Status Watchdog::Look() {
  while (true) {
    const Operation* first;
    {
      MutexLock lock(mutex_);
      if (!status_.ok()) return status_;
      if (looking_ || operations_.empty()) return absl::OkStatus();
      looking_ = true;
      first = &operations_.front();
    }
    // Without the lock: driver and library may take their time, and Watch must not wait for them.
    // What others add at the end of a deque does not move its front.
    Finding finding = Examine(*first);
    const absl::Time now = options_.now();
    {
      MutexLock lock(mutex_);
      looking_ = false;
      // Another thread may have ended the watch meanwhile, in Fail.
      if (finding.error.ok() && !finding.done) return status_;
      if (finding.error.ok()) {
        free_events_.push_back(std::move(operations_.front().done));
        operations_.pop_front();
        if (!operations_.empty()) {
          operations_.front().since = std::max(operations_.front().since, now);
        }
        changed_.NotifyAll();
        continue;
      }
    }
    return End(finding.error);
  }
}

std::string Watchdog::NameOf(absl::string_view operation, const Purpose& purpose) const {
  return absl::StrCat("rank ", options_.rank, ": ", operation, " of ", purpose.ToString());
}

Watchdog::Finding Watchdog::Examine(const Operation& operation) const {
  // The library is asked first: it says why an operation will never be done, and the deadline only
  // that it is late.
  if (options_.library_error) {
    if (absl::Status error = options_.library_error(); !error.ok()) {
      return {.error = Annotate(error, operation.name)};
    }
  }
  const absl::StatusOr<bool> done = operation.done->Done();
  if (!done.ok()) return {.error = Annotate(done.status(), operation.name)};
  if (*done) return {.done = true, .error = absl::OkStatus()};
  if (options_.now() - operation.since < options_.timeout) return {};
  return {.error = absl::DeadlineExceededError(absl::StrCat(
              operation.name, ": not done after ", absl::FormatDuration(options_.timeout),
              "; see which of the other ranks is stuck or has ended"))};
}

// The first error is the one that stays.
absl::Status Watchdog::End(const absl::Status& error) {
  {
    MutexLock lock(mutex_);
    if (!status_.ok()) return status_;
    status_ = error;
    changed_.NotifyAll();
  }
  // Without the lock: other threads get the error while the library is still busy with this.
  if (options_.abort) options_.abort();
  return error;
}

void Watchdog::Run() {
  while (true) {
    Look().IgnoreError();  // Kept, and returned by the owner's next call.
    MutexLock lock(mutex_);
    if (stopping_ || !status_.ok()) return;
    changed_.WaitUntil(mutex_, In(options_.interval));
    if (stopping_) return;
  }
}

}  // namespace ballast::worker
