// Cancels calls whose peer does not read any more, or is silent.
//
// A call with a write in progress cannot be ended, and keeps its job in memory. A peer that does
// not read could keep it forever. So each write has a time limit. The limit is short once the call
// is over for the service (its job is closed, its stream is detached). For an answer it is long
// enough for a slow reader. A stream whose peer does not say its purpose ends, too.
#ifndef BALLAST_SERVER_CALL_WATCH_H_
#define BALLAST_SERVER_CALL_WATCH_H_

#include <chrono>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "cpu_optimizer_service/common/system/mutex.h"
#include "cpu_optimizer_service/common/system/periodic_thread.h"

namespace ballast::server {

// One call that is watched. Thread-safe.
class WatchedCall {
 public:
  using Clock = std::chrono::steady_clock;
  static constexpr double kForEver = std::numeric_limits<double>::infinity();
  // For an answer: a reader that takes nothing for so long is gone.
  static constexpr double kAnswerSeconds = 60;
  // For a stream that has not named its rank.
  static constexpr double kOpenSeconds = 20;

  // `cancel` cancels the call (grpc::ServerContextBase::TryCancel) and is not called after Ended.
  // The peer has `patience_seconds` for its action.
  WatchedCall(std::function<void()> cancel, double patience_seconds)
      : patience_seconds_(patience_seconds), cancel_(std::move(cancel)) {}

  // It must take a message, or send one.
  void PeerMustAct();
  void PeerActed();
  // The call ends with its write. Also once `over`, which must be cheap, returns true.
  void IsOver();
  void IsOverIf(std::function<bool()> over);
  // The call and its arguments are gone. Waits for a concurrent look.
  void Ended();

  // For the watch: cancels the call if its time is over.
  void Look(Clock::time_point now);

 private:
  const double patience_seconds_;
  Mutex mutex_;
  CondVar looked_;
  std::function<void()> cancel_ ABSL_GUARDED_BY(mutex_);  // Null: ended or cancelled.
  std::thread::id looking_ ABSL_GUARDED_BY(mutex_);       // The thread that is looking.
  std::function<bool()> over_if_ ABSL_GUARDED_BY(mutex_);
  std::optional<Clock::time_point> over_since_ ABSL_GUARDED_BY(mutex_);
  std::optional<Clock::time_point> must_act_since_ ABSL_GUARDED_BY(mutex_);
};

// Looks at all calls every second, on its own thread. Thread-safe; outlives its calls.
class CallWatch {
 public:
  // The same thread also calls `every_second`.
  explicit CallWatch(std::function<void()> every_second = [] {});

  std::shared_ptr<WatchedCall> Watch(std::function<void()> cancel, double patience_seconds);

 private:
  void Look();

  const std::function<void()> every_second_;
  Mutex mutex_;
  std::vector<std::weak_ptr<WatchedCall>> calls_ ABSL_GUARDED_BY(mutex_);
  PeriodicThread thread_;
};

}  // namespace ballast::server

#endif  // BALLAST_SERVER_CALL_WATCH_H_
