#include "server/ballastd/service_manager.h"

#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace ballast::server {
namespace {

constexpr char kAlive[] = "WATCHDOG=1";
constexpr int kTicks = 8;            // In the time for which the manager waits.
constexpr int kMostSilentTicks = 6;  // Earlier than the manager, which would end all.

std::string FromEnvironmentOr(const char* name, const char* otherwise) {
  const char* value = std::getenv(name);
  return value == nullptr ? otherwise : value;
}

// A path, or, beginning with @, an abstract address.
absl::StatusOr<FileDescriptor> Connect(const std::string& text) {
  sockaddr_un name = {};
  if ((text[0] != '/' && text[0] != '@') || text.size() >= sizeof(name.sun_path)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "NOTIFY_SOCKET=", text, ": expected an absolute path, or @ and a name, of at most ",
        sizeof(name.sun_path) - 1, " bytes; correct or unset it where this process is started"));
  }
  name.sun_family = AF_UNIX;
  std::memcpy(name.sun_path, text.data(), text.size());
  if (text[0] == '@') name.sun_path[0] = '\0';
  // Not the whole structure: in an abstract address zeros at the end would count, too (unix(7)).
  const auto size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + text.size());
  FileDescriptor socket_fd(socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  if (!socket_fd ||
      connect(socket_fd.number(), reinterpret_cast<const sockaddr*>(&name), size) != 0) {
    return absl::UnavailableError(absl::StrCat("NOTIFY_SOCKET=", text, ": ", std::strerror(errno),
                                               "; correct or unset it where this process is "
                                               "started"));
  }
  return socket_fd;
}

}  // namespace

absl::StatusOr<std::unique_ptr<ServiceManager>> ServiceManager::FromEnvironment() {
  FileDescriptor connected;
  const std::string address = FromEnvironmentOr("NOTIFY_SOCKET", "");
  if (!address.empty()) {
    auto made = Connect(address);
    if (!made.ok()) return made.status();
    connected = *std::move(made);
  }
  std::unique_ptr<ServiceManager> manager(new ServiceManager(std::move(connected)));
  const std::string microseconds = FromEnvironmentOr("WATCHDOG_USEC", "");
  // WATCHDOG_PID is not asked for: it names the parent, in whose place this process reports.
  if (address.empty() || microseconds.empty()) return manager;
  int64_t watchdog = 0;
  if (!absl::SimpleAtoi(microseconds, &watchdog) || watchdog < kTicks) {
    return absl::InvalidArgumentError(
        absl::StrCat("WATCHDOG_USEC=", microseconds, ": expected microseconds, ", kTicks,
                     " or more; correct or unset it where this process is started"));
  }
  const absl::Duration tick = absl::Microseconds(watchdog) / kTicks;
  // So about three calls in a row have to be missing before the thread ends the process.
  manager->keep_alive_interval_ = std::min(manager->keep_alive_interval_, 2 * tick);
  manager->Send(kAlive);
  manager->watch_.emplace("tell-manager", absl::ToChronoNanoseconds(tick),
                          [manager = manager.get()] { manager->Watch(); });
  return manager;
}

void ServiceManager::Watch() {
  {
    MutexLock lock(mutex_);
    if (silent_ticks_.has_value() && ++*silent_ticks_ >= kMostSilentTicks) {
      std::fprintf(stderr, "ballastd: the service is stuck, and ends to be started again\n");
      // exit would run destructors, which may wait for what is stuck.
      std::abort();
    }
  }
  Send(kAlive);
}

void ServiceManager::Ready(absl::string_view status) {
  // This sets silent_ticks_ for the first time: from now on silence counts.
  KeepAlive();
  Send(absl::StrCat("READY=1\nSTATUS=", status));
}

void ServiceManager::Saving(absl::string_view status) {
  needs_time_ = true;
  is_saving_ = true;
  Send(absl::StrCat("STATUS=", status));
  KeepAlive();
}

void ServiceManager::StopRefused(absl::string_view status) {
  is_saving_ = false;
  Send(absl::StrCat("STATUS=", status));
  KeepAlive();
}

void ServiceManager::Stopping(absl::string_view status) {
  is_saving_ = false;
  Send(absl::StrCat("STOPPING=1\nSTATUS=", status));
}

void ServiceManager::KeepAlive() {
  {
    MutexLock lock(mutex_);
    silent_ticks_ = 0;
  }
  if (!needs_time_) return;
  // Saving is not bounded, nor is the time until an operator mends what prevents it. Only silence
  // is.
  const absl::Duration more = std::max(absl::Seconds(30), 3 * keep_alive_interval_);
  Send(absl::StrCat("EXTEND_TIMEOUT_USEC=", absl::ToInt64Microseconds(more)));
}

// A manager that receives nothing acts on that; here there is nothing to do about it.
void ServiceManager::Send(const std::string& message) {
  if (!socket_) return;
  // MSG_DONTWAIT: a manager that does not read must not hold up the service.
  while (send(socket_.number(), message.data(), message.size(), MSG_NOSIGNAL | MSG_DONTWAIT) < 0 &&
         errno == EINTR) {
  }
}

}  // namespace ballast::server
