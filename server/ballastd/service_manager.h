// Reports how the service is to systemd, or to another manager that started this process with
// NOTIFY_SOCKET in its environment, as sd_notify(3) does. Without NOTIFY_SOCKET every call does
// nothing.
//
// Where the manager has a watchdog (WATCHDOG_USEC), a thread reports that the process lives, from
// the beginning on, so that a recovery may take long. Once the service is ready, the thread ends
// the process when KeepAlive is no longer called: the parent, which holds the service's memory,
// then starts it again over that, before the manager ends both.
//
// Threads: one call at a time.
#ifndef BALLAST_SERVER_BALLASTD_SERVICE_MANAGER_H_
#define BALLAST_SERVER_BALLASTD_SERVICE_MANAGER_H_

#include <memory>
#include <optional>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "cpu_optimizer_service/common/system/file_descriptor.h"
#include "cpu_optimizer_service/common/system/mutex.h"
#include "cpu_optimizer_service/common/system/periodic_thread.h"

namespace ballast::server {

class ServiceManager {
 public:
  // As NOTIFY_SOCKET and WATCHDOG_USEC say. INVALID_ARGUMENT, naming the variable, if one has no
  // usable value; UNAVAILABLE if no process listens there.
  static absl::StatusOr<std::unique_ptr<ServiceManager>> FromEnvironment();

  // Each `status` is a line for people, in `systemctl status`.
  // The service answers.
  void Ready(absl::string_view status);
  // It was asked to stop, and saves what it has; again when that is further. From now on KeepAlive
  // also asks for more time: a manager that stops a service ends it by force when its time is over,
  // and does not take the stop back where the service refuses it.
  void Saving(absl::string_view status);
  // A job could not be saved, so it does not stop.
  void StopRefused(absl::string_view status);
  // It ends now. Not before that is certain: a manager does not take it back.
  void Stopping(absl::string_view status);

  // Between Saving and what comes after it.
  bool is_saving() const { return is_saving_; }

  // Call KeepAlive at least as often, from Ready to the end: the service is not stuck, and, after
  // Saving, it needs more time.
  absl::Duration keep_alive_interval() const { return keep_alive_interval_; }
  void KeepAlive();

 private:
  explicit ServiceManager(FileDescriptor socket) : socket_(std::move(socket)) {}
  // The thread's work, eight times in the time for which the manager waits.
  void Watch();
  void Send(const std::string& message);

  const FileDescriptor socket_;  // Connected; none without a manager.
  bool needs_time_ = false;      // Since Saving.
  bool is_saving_ = false;
  absl::Duration keep_alive_interval_ = absl::Seconds(10);

  Mutex mutex_;
  // Since KeepAlive; none before Ready. Time in which the whole process was stopped does not count.
  std::optional<int> silent_ticks_ ABSL_GUARDED_BY(mutex_);
  std::optional<PeriodicThread> watch_;  // None without a watchdog.
};

}  // namespace ballast::server

#endif  // BALLAST_SERVER_BALLASTD_SERVICE_MANAGER_H_
