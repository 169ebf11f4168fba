// Watches what ranks do together on their devices, so that a rank whose peer does not respond ends
// with an error that names the operation instead of hanging.
//
//   Watchdog watchdog({.rank = 1, .timeout = ..., .library_error = ..., .abort = ...});
//   ... a reduce-scatter is given to a stream, and `done` recorded there ...
//   watchdog.Watch("reduce-scatter", {.step = 7, .bucket = 3}, std::move(done));
//   watchdog.Wait();                              // all done, or the first error
//
// An operation's time runs from when it was given or from when the one before it was done,
// whichever is later: operations run in the order of one stream. The first that is not done in
// time, whose event fails, or in whose time the library reports an error of its own, ends the
// watch: `abort` is called, once, by the thread that noticed, and must make the device leave what
// it hangs in.
//
// Errors: DEADLINE_EXCEEDED for one that is late, else the library's or the event's, always as
// "rank 1: reduce-scatter of bucket 3, step 7: ...". After an error every call returns it.
//
// Threads: thread-safe. Its own thread looks every `interval`.
#ifndef BALLAST_GPU_WORKER_DEVICE_WATCHDOG_H_
#define BALLAST_GPU_WORKER_DEVICE_WATCHDOG_H_

#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <thread>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "cpu_optimizer_service/common/system/mutex.h"
#include "cpu_optimizer_service/common/system/steady_time.h"
#include "gpu_worker/device/device.h"
#include "gpu_worker/device/device_collective.h"

namespace ballast::worker {

struct WatchdogOptions {
  int rank = 0;
  absl::Duration timeout = absl::Minutes(5);  // For one operation.
  // Between two calls of Look by the watchdog's thread; infinite: no thread, and the owner calls
  // Look.
  absl::Duration interval = absl::Milliseconds(50);
  std::function<absl::Time()> now = SteadyNow;
  // Reports an error that the library detected by itself. Nullable.
  std::function<absl::Status()> library_error;
  std::function<void()> abort;
};

class Watchdog {
 public:
  explicit Watchdog(WatchdogOptions options);
  ~Watchdog();  // Stops looking, without waiting for operations.

  // `done` was recorded after the operation. `operation` is, for example, "all-gather".
  absl::Status Watch(absl::string_view operation, const Purpose& purpose,
                     std::unique_ptr<DeviceEvent> done);
  // Waits until all operations so far are done, or for the first error.
  absl::Status Wait();
  // An event of an earlier operation, to be recorded again; null: none is free.
  std::unique_ptr<DeviceEvent> TakeEvent();
  // Reports an error that a call of the library returned at once, and aborts as for any other.
  absl::Status Fail(absl::string_view operation, const Purpose& purpose, const absl::Status& error);

  // Checks which operations are done and which have failed.
  absl::Status Look();

 private:
  struct Operation {
    std::string name;
    absl::Time since;
    std::unique_ptr<DeviceEvent> done;
  };
  // What a look found out about the first operation.
  struct Finding {
    bool done = false;
    absl::Status error;
  };

  std::string NameOf(absl::string_view operation, const Purpose& purpose) const;
  Finding Examine(const Operation& operation) const;
  absl::Status End(const absl::Status& error);
  void Run();

  const WatchdogOptions options_;
  Mutex mutex_;
  CondVar changed_;
  std::deque<Operation> operations_ ABSL_GUARDED_BY(mutex_);
  std::deque<std::unique_ptr<DeviceEvent>> free_events_ ABSL_GUARDED_BY(mutex_);
  bool looking_ ABSL_GUARDED_BY(mutex_) = false;  // The first operation is with a looker.
  absl::Status status_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace ballast::worker

#endif  // BALLAST_GPU_WORKER_DEVICE_WATCHDOG_H_
