// Tells systemd, or whatever else started this process with NOTIFY_SOCKET in its environment, how the service is: what
// sd_notify(3) does. Without NOTIFY_SOCKET every call does nothing.
//
// Where the manager watches (WATCHDOG_USEC), a thread tells it that the process lives, from the beginning on, so that a
// recovery may take long. Once the service is ready it ends the process when KeepAlive is no longer called: whoever
// holds the service's memory then starts it again over that, before the manager ends all.
//
// Threads: one call at a time.
#ifndef BALLAST_SERVER_BALLASTD_SERVICE_MANAGER_H_
#define BALLAST_SERVER_BALLASTD_SERVICE_MANAGER_H_

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "cpu_optimizer_service/common/system/file_descriptor.h"
#include "cpu_optimizer_service/common/system/mutex.h"

namespace ballast::server {

class ServiceManager {
 public:
  // As NOTIFY_SOCKET and WATCHDOG_USEC say. INVALID_ARGUMENT, naming the variable, if one says nothing that can be
  // followed; UNAVAILABLE if nobody listens there.
  static absl::StatusOr<std::unique_ptr<ServiceManager>> FromEnvironment();
  ~ServiceManager();

  // The service answers. `status` is a line for people, in `systemctl status`. Also after a stop that was given up.
  void Ready(absl::string_view status);
  // It was told to stop, and saves what it has.
  void Stopping(absl::string_view status);

  // Call KeepAlive at least as often, from Ready to the end: the service is not stuck, and, while it stops, it needs
  // more time.
  absl::Duration keep_alive_interval() const { return keep_alive_interval_; }
  void KeepAlive();

 private:
  explicit ServiceManager(FileDescriptor socket) : socket_(std::move(socket)) {}
  // Of the thread: every `tick`, of which the manager waits for eight.
  void Watch(std::chrono::nanoseconds tick);
  void Send(const std::string& message);

  const FileDescriptor socket_;  // Connected; none without a manager.
  bool stopping_ = false;
  absl::Duration keep_alive_interval_ = absl::Seconds(10);

  Mutex mutex_;
  CondVar changed_;
  // Since KeepAlive; none before Ready. Time in which the whole process was stopped does not count.
  std::optional<int> silent_ticks_ ABSL_GUARDED_BY(mutex_);
  bool ending_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread watch_;
};

}  // namespace ballast::server

#endif  // BALLAST_SERVER_BALLASTD_SERVICE_MANAGER_H_
