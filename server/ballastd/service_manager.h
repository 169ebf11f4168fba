// Reports the service's state to systemd, or to another manager that started this process with
// NOTIFY_SOCKET in its environment, as sd_notify(3) does. Without NOTIFY_SOCKET every call has no
// effect.
//
// If the manager has a watchdog (WATCHDOG_USEC), a thread reports from the beginning that the
// process lives, so that a recovery may take long. Once the service is ready, KeepAlive has to be
// called. If it is not, the thread ends the process. Then the parent, which holds the service's
// memory, restarts it, before the manager ends both.
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
  // From NOTIFY_SOCKET and WATCHDOG_USEC. INVALID_ARGUMENT, with the variable's name, if a value is
  // unusable; UNAVAILABLE if no process listens there.
  static absl::StatusOr<std::unique_ptr<ServiceManager>> FromEnvironment();

  // Each `status` is a line for people, in `systemctl status`. The service answers.
  void Ready(absl::string_view status);
  // The service has to stop, and saves its jobs; call it again at progress. From now on KeepAlive
  // also asks for more time: a manager kills a service after its stop timeout, and cannot take a
  // stop back if the service refuses it.
  void Saving(absl::string_view status);
  // A job could not be saved, so the service does not stop.
  void StopRefused(absl::string_view status);
  // The service ends now. Call it only when that is certain: a manager does not take it back.
  void Stopping(absl::string_view status);

  // Between Saving and the next report.
  bool is_saving() const { return is_saving_; }

  // Call KeepAlive at least this often, from Ready to the end. It says that the service is not
  // stuck and, after Saving, that it needs more time.
  absl::Duration keep_alive_interval() const { return keep_alive_interval_; }
  void KeepAlive();

 private:
  explicit ServiceManager(FileDescriptor socket) : socket_(std::move(socket)) {}
  // The thread's work, eight times in the manager's timeout.
  void Watch();
  void Send(const std::string& message);

  const FileDescriptor socket_;  // Connected; empty without a manager.
  bool needs_time_ = false;      // Since Saving.
  bool is_saving_ = false;
  absl::Duration keep_alive_interval_ = absl::Seconds(10);

  Mutex mutex_;
  // Ticks since KeepAlive; empty before Ready. Time in which the whole process was stopped does not
  // count.
  std::optional<int> silent_ticks_ ABSL_GUARDED_BY(mutex_);
  std::optional<PeriodicThread> watch_;  // Empty without a watchdog.
};

}  // namespace ballast::server

#endif  // BALLAST_SERVER_BALLASTD_SERVICE_MANAGER_H_
