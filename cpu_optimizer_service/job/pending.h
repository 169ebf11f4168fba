// A call of a job that may have to wait for its turn: for a decision and update to end, for a step
// to be cleared, for a load. Such a call takes a Done and returns a Pending, and never blocks its
// thread.
//
//   Pending pending = job->Attach(request, [](absl::StatusOr<Attachment> attachment) { ... });
//   ... the caller is gone:
//   pending.Cancel();
//
// The Done is called exactly once, without a lock: before the call returns if it need not wait,
// otherwise later, from any thread. It must not block.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_JOB_PENDING_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_JOB_PENDING_H_

#include <functional>
#include <latch>
#include <optional>
#include <utility>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace ballast {

template <typename T>
using Done = absl::AnyInvocable<void(absl::StatusOr<T>) &&>;

class Pending {
 public:
  Pending() = default;
  explicit Pending(std::function<void()> cancel) : cancel_(std::move(cancel)) {}

  // If the call still waits for its turn, it is given up: its Done is called with CANCELLED, on
  // this thread, and the call has no effect. Otherwise does nothing. Thread-safe; may be repeated.
  void Cancel() const {
    if (cancel_) cancel_();
  }

 private:
  std::function<void()> cancel_;
};

// Waits for a call's result. For tests and for threads that may block, never for a transport's.
//
//   Await<Attachment>([&](Done<Attachment> done) { job->Attach(request, std::move(done)); })
template <typename T, typename Call>
absl::StatusOr<T> Await(Call&& call) {
  std::latch called(1);
  std::optional<absl::StatusOr<T>> result;
  call(Done<T>([&](absl::StatusOr<T> given) {
    result.emplace(std::move(given));
    called.count_down();
  }));
  called.wait();
  return *std::move(result);
}

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_JOB_PENDING_H_
