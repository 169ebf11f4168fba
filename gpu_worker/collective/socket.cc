#include "gpu_worker/collective/socket.h"

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <functional>
#include <memory>
#include <thread>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/status.h"

namespace ballast::worker {
namespace {

constexpr std::chrono::milliseconds kConnectRetryInterval{50};

using Addresses = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;

absl::StatusOr<Addresses> Resolve(const std::string& host, int port) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  const int error = getaddrinfo(host.c_str(), absl::StrCat(port).c_str(), &hints, &found);
  if (error != 0) {
    return absl::InvalidArgumentError(absl::StrCat("cannot resolve the host ", host, " (",
                                                   gai_strerror(error), "); check MASTER_ADDR"));
  }
  return Addresses(found, &freeaddrinfo);
}

// Waits until the socket can be read or written. Polls in slices, so that Shutdown by another
// thread, which poll reports as readable, and the deadline both end it.
absl::Status WaitFor(int descriptor, short events, Deadline deadline) {
  while (true) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
        deadline - std::chrono::steady_clock::now());
    if (left.count() < 0) return absl::DeadlineExceededError("timed out");
    pollfd waited{.fd = descriptor, .events = events, .revents = 0};
    const int64_t slice = std::min<int64_t>(left.count() + 1, 1000);
    const int ready = poll(&waited, 1, static_cast<int>(slice));
    if (ready > 0) return absl::OkStatus();
    if (ready < 0 && errno != EINTR) return absl::UnavailableError(std::strerror(errno));
  }
}

}  // namespace

bool IsLoopback(const std::string& host) { return absl::StartsWith(host, "127.") || host == "::1"; }

Socket::~Socket() {
  if (descriptor_ >= 0) close(descriptor_);
}

absl::StatusOr<Socket> Socket::Listen(const std::string& host, int port) {
  BALLAST_ASSIGN_OR_RETURN(const Addresses addresses, Resolve(host, port));
  std::string reason = "no address";
  for (const addrinfo* at = addresses.get(); at != nullptr; at = at->ai_next) {
    Socket listener(socket(at->ai_family, at->ai_socktype | SOCK_CLOEXEC, at->ai_protocol));
    const int yes = 1;
    setsockopt(listener.descriptor_, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof(yes));
    if (bind(listener.descriptor_, at->ai_addr, at->ai_addrlen) == 0 &&
        listen(listener.descriptor_, SOMAXCONN) == 0) {
      return listener;
    }
    reason = std::strerror(errno);
  }
  return absl::UnavailableError(absl::StrCat("cannot listen on ", host, ":", port, " (", reason,
                                             "); choose another MASTER_PORT"));
}

absl::StatusOr<Socket> Socket::Connect(const std::string& host, int port, Deadline deadline) {
  BALLAST_ASSIGN_OR_RETURN(const Addresses addresses, Resolve(host, port));
  while (true) {
    for (const addrinfo* at = addresses.get(); at != nullptr; at = at->ai_next) {
      Socket candidate(socket(at->ai_family, at->ai_socktype | SOCK_CLOEXEC, at->ai_protocol));
      if (connect(candidate.descriptor_, at->ai_addr, at->ai_addrlen) == 0) {
        const int yes = 1;
        setsockopt(candidate.descriptor_, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof(yes));
        return candidate;
      }
    }
    // Nobody listens yet, and nothing but another try can tell when somebody does.
    if (std::chrono::steady_clock::now() + kConnectRetryInterval > deadline) {
      return absl::DeadlineExceededError(absl::StrCat("nothing answers at ", host, ":", port));
    }
    std::this_thread::sleep_for(kConnectRetryInterval);
  }
}

absl::StatusOr<Socket> Socket::Accept() const {
  while (true) {
    const int accepted = accept4(descriptor_, nullptr, nullptr, SOCK_CLOEXEC);
    if (accepted >= 0) return Socket(accepted);
    if (errno != EINTR && errno != ECONNABORTED) return absl::CancelledError(std::strerror(errno));
  }
}

absl::Status Socket::Write(absl::Span<const std::byte> bytes, Deadline deadline) const {
  while (!bytes.empty()) {
    BALLAST_RETURN_IF_ERROR(WaitFor(descriptor_, POLLOUT, deadline));
    const ssize_t sent = send(descriptor_, bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0 && (errno == EINTR || errno == EAGAIN)) continue;
    if (sent < 0) return absl::UnavailableError(std::strerror(errno));
    bytes.remove_prefix(sent);
  }
  return absl::OkStatus();
}

absl::Status Socket::Read(absl::Span<std::byte> bytes, Deadline deadline) const {
  while (!bytes.empty()) {
    BALLAST_RETURN_IF_ERROR(WaitFor(descriptor_, POLLIN, deadline));
    const ssize_t received = recv(descriptor_, bytes.data(), bytes.size(), MSG_DONTWAIT);
    if (received < 0 && (errno == EINTR || errno == EAGAIN)) continue;
    if (received < 0) return absl::UnavailableError(std::strerror(errno));
    if (received == 0) return absl::UnavailableError("the other end closed the connection");
    bytes.remove_prefix(received);
  }
  return absl::OkStatus();
}

void Socket::Shutdown() const { shutdown(descriptor_, SHUT_RDWR); }

int Socket::port() const {
  sockaddr_storage address{};
  socklen_t size = sizeof(address);
  getsockname(descriptor_, reinterpret_cast<sockaddr*>(&address), &size);
  return ntohs(address.ss_family == AF_INET6
                   ? reinterpret_cast<const sockaddr_in6*>(&address)->sin6_port
                   : reinterpret_cast<const sockaddr_in*>(&address)->sin_port);
}

std::string Socket::host() const {
  sockaddr_storage address{};
  socklen_t size = sizeof(address);
  getsockname(descriptor_, reinterpret_cast<sockaddr*>(&address), &size);
  std::array<char, NI_MAXHOST> host{};
  getnameinfo(reinterpret_cast<const sockaddr*>(&address), size, host.data(), host.size(), nullptr,
              0, NI_NUMERICHOST);
  return host.data();
}

}  // namespace ballast::worker
