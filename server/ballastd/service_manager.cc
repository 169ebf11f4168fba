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
        sizeof(name.sun_path) - 1,
        " bytes; whoever starts this process sets it, or leaves it out"));
  }
  name.sun_family = AF_UNIX;
  std::memcpy(name.sun_path, text.data(), text.size());
  if (text[0] == '@') name.sun_path[0] = '\0';
  const auto size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + text.size());
  FileDescriptor socket_fd(socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  if (!socket_fd ||
      connect(socket_fd.number(), reinterpret_cast<const sockaddr*>(&name), size) != 0) {
    return absl::UnavailableError(absl::StrCat("NOTIFY_SOCKET=", text, ": ", std::strerror(errno),
                                               "; whoever starts this process listens there, or "
                                               "leaves it out"));
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
  if (address.empty() || microseconds.empty()) return manager;
  int64_t watchdog = 0;
  if (!absl::SimpleAtoi(microseconds, &watchdog) || watchdog < kTicks) {
    return absl::InvalidArgumentError(
        absl::StrCat("WATCHDOG_USEC=", microseconds, ": expected microseconds, ", kTicks,
                     " or more; whoever starts this process sets it, or leaves it out"));
  }
  const absl::Duration tick = absl::Microseconds(watchdog) / kTicks;
  manager->keep_alive_interval_ = std::min(manager->keep_alive_interval_, 2 * tick);
  manager->watch_ = std::thread(
      [manager = manager.get(), tick] { manager->Watch(absl::ToChronoNanoseconds(tick)); });
  return manager;
}

ServiceManager::~ServiceManager() {
  {
    MutexLock lock(mutex_);
    ending_ = true;
    changed_.NotifyAll();
  }
  if (watch_.joinable()) watch_.join();
}

void ServiceManager::Watch(std::chrono::nanoseconds tick) {
  while (true) {
    Send("WATCHDOG=1");
    MutexLock lock(mutex_);
    const auto deadline = std::chrono::steady_clock::now() + tick;
    while (!ending_ && changed_.WaitUntil(mutex_, deadline)) continue;
    if (ending_) return;
    if (!silent_ticks_.has_value() || ++*silent_ticks_ < kMostSilentTicks) continue;
    std::fprintf(stderr, "ballastd: the service is stuck, and ends to be started again\n");
    std::abort();
  }
}

void ServiceManager::Ready(absl::string_view status) {
  stopping_ = false;
  KeepAlive();
  Send(absl::StrCat("READY=1\nSTATUS=", status));
}

void ServiceManager::Stopping(absl::string_view status) {
  stopping_ = true;
  Send(absl::StrCat("STOPPING=1\nSTATUS=", status));
  KeepAlive();
}

void ServiceManager::KeepAlive() {
  {
    MutexLock lock(mutex_);
    silent_ticks_ = 0;
  }
  if (!stopping_) return;
  // Saving is not bounded, only that it is silent.
  const absl::Duration more = std::max(absl::Seconds(30), 3 * keep_alive_interval_);
  Send(absl::StrCat("EXTEND_TIMEOUT_USEC=", absl::ToInt64Microseconds(more)));
}

// A manager that hears nothing acts on that; here there is nothing to do about it.
void ServiceManager::Send(const std::string& message) {
  if (!socket_) return;
  while (send(socket_.number(), message.data(), message.size(), MSG_NOSIGNAL | MSG_DONTWAIT) < 0 &&
         errno == EINTR) {
  }
}

}  // namespace ballast::server
