#include "server/listener.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"

namespace ballast::server {
namespace {

// As many as Linux lets a process have where fs.nr_open is as it comes, and what counts where there
// is no limit.
constexpr int64_t kMostDescriptors = int64_t{1} << 20;
// Of these the last are for files, shared memory and the like, and not for connections.
constexpr int64_t kKeptDescriptors = 32;
constexpr int kKeptPart = 8;  // Of few descriptors, no more than this part is kept.
// Where a connection cannot be accepted, it is tried again after so long.
constexpr std::chrono::milliseconds kPause(50);
// Before another socket has its turn.
constexpr int kMostAtOnce = 256;

}  // namespace

int64_t RaiseDescriptorLimit() {
  rlimit limit = {};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return kMostDescriptors;
  const rlim_t wanted = std::min<rlim_t>(limit.rlim_max, kMostDescriptors);
  if (limit.rlim_cur < wanted) {
    rlimit raised = {.rlim_cur = wanted, .rlim_max = limit.rlim_max};
    if (setrlimit(RLIMIT_NOFILE, &raised) == 0) limit = raised;
  }
  return static_cast<int64_t>(std::min<rlim_t>(limit.rlim_cur, kMostDescriptors));
}

absl::Status Listener::Start(ListeningSockets sockets, std::function<void(int)> take,
                             std::function<void(const std::string&)> warn) {
  sockets_ = std::move(sockets);
  take_ = std::move(take);
  warning_.emplace(std::move(warn));
  most_descriptors_ = RaiseDescriptorLimit();
  stop_ = FileDescriptor(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!stop_) {
    return absl::UnavailableError(
        "no file descriptors are left to listen with; raise the limit (ulimit -n)");
  }
  thread_ = std::thread([this] { Run(); });
  return absl::OkStatus();
}

Listener::~Listener() {
  if (thread_.joinable()) {
    const uint64_t one = 1;
    static_cast<void>(!write(stop_.number(), &one, sizeof(one)));
    thread_.join();
  }
}

void Listener::Run() {
  std::vector<pollfd> watched = {{.fd = stop_.number(), .events = POLLIN, .revents = 0}};
  for (const FileDescriptor& socket : sockets_.all()) {
    watched.push_back({.fd = socket.number(), .events = POLLIN, .revents = 0});
  }
  while (watched.front().revents == 0) {
    poll(watched.data(), watched.size(), -1);
    for (size_t i = 1; i < watched.size(); ++i) {
      if (watched[i].revents != 0) AcceptAll(watched[i].fd);
    }
  }
}

void Listener::AcceptAll(int socket) {
  const int64_t kept = std::min(kKeptDescriptors, most_descriptors_ / kKeptPart);
  for (int i = 0; i < kMostAtOnce; ++i) {
    FileDescriptor connection(accept4(socket, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (!connection) {
      const bool no_room =
          errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM;
      if (!no_room) return;  // Another has taken it, it is gone, or there is none.
      NoRoom();
      // The connection still waits, so without a pause this thread would come back at once.
      return std::this_thread::sleep_for(kPause);
    }
    // The system gives the lowest number that is free.
    if (connection.number() >= most_descriptors_ - kept) {
      connection = FileDescriptor();
      NoRoom();
      continue;
    }
    const int on = 1;
    // As gRPC does with connections that it accepts itself: a short message does not wait until the
    // one before is acknowledged. A unix socket has no such option, and needs none.
    setsockopt(connection.number(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
    take_(connection.Release());
  }
}

void Listener::NoRoom() {
  warning_->Happened([&](int64_t times) {
    return absl::StrCat("out of file descriptors, of which this process may have ",
                        most_descriptors_, ": ", times,
                        " times a connection was refused, or waits; raise the limit (ulimit -n, "
                        "LimitNOFILE) or close connections");
  });
}

}  // namespace ballast::server
