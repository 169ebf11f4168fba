#include "tests/bench/wire/raw_socket.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "cpu_optimizer_service/common/status.h"

namespace ballast::bench {
namespace {

struct SocketAddress {
  sockaddr_storage storage{};
  socklen_t size = 0;
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
};

absl::StatusOr<SocketAddress> Parse(const std::string& text) {
  SocketAddress address;
  absl::string_view rest = text;
  if (absl::ConsumePrefix(&rest, "unix:")) {
    auto* local = reinterpret_cast<sockaddr_un*>(&address.storage);
    if (rest.empty() || rest.size() >= sizeof(local->sun_path)) {
      return absl::InvalidArgumentError(absl::StrCat("bad path in ", text));
    }
    local->sun_family = AF_UNIX;
    std::memcpy(local->sun_path, rest.data(), rest.size());
    address.size = sizeof(sockaddr_un);
    return address;
  }
  int port = 0;
  if (!absl::ConsumePrefix(&rest, "127.0.0.1:") || !absl::SimpleAtoi(rest, &port)) {
    return absl::InvalidArgumentError(absl::StrCat("bad address ", text));
  }
  auto* loopback = reinterpret_cast<sockaddr_in*>(&address.storage);
  loopback->sin_family = AF_INET;
  loopback->sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  loopback->sin_port = htons(static_cast<uint16_t>(port));
  address.size = sizeof(sockaddr_in);
  return address;
}

absl::StatusOr<int> NewSocket(const SocketAddress& address) {
  const int fd = socket(address.storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return absl::ErrnoToStatus(errno, "cannot make a socket");
  return fd;
}

absl::Status FailAndClose(int fd, const std::string& what) {
  const absl::Status status = absl::ErrnoToStatus(errno, what);
  close(fd);
  return status;
}

// Fails on a unix socket, where nothing waits anyway.
void SendAtOnce(int fd) {
  const int on = 1;
  static_cast<void>(setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on)));
}

}  // namespace

absl::StatusOr<int> ListenRaw(const std::string& address) {
  BALLAST_ASSIGN_OR_RETURN(const SocketAddress parsed, Parse(address));
  BALLAST_ASSIGN_OR_RETURN(const int fd, NewSocket(parsed));
  if (bind(fd, parsed.get(), parsed.size) != 0 || listen(fd, 16) != 0) {
    return FailAndClose(fd, absl::StrCat("cannot listen on ", address));
  }
  return fd;
}

absl::StatusOr<std::string> AddressOfRaw(int listener) {
  sockaddr_in address{};
  socklen_t size = sizeof(address);
  if (getsockname(listener, reinterpret_cast<sockaddr*>(&address), &size) != 0) {
    return absl::ErrnoToStatus(errno, "no address");
  }
  return absl::StrCat("127.0.0.1:", ntohs(address.sin_port));
}

absl::StatusOr<int> ConnectRaw(const std::string& address) {
  BALLAST_ASSIGN_OR_RETURN(const SocketAddress parsed, Parse(address));
  BALLAST_ASSIGN_OR_RETURN(const int fd, NewSocket(parsed));
  if (connect(fd, parsed.get(), parsed.size) != 0) {
    return FailAndClose(fd, absl::StrCat("cannot connect to ", address));
  }
  SendAtOnce(fd);
  return fd;
}

absl::StatusOr<int> AcceptRaw(int listener) {
  const int fd = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
  if (fd < 0) return absl::ErrnoToStatus(errno, "cannot accept a connection");
  SendAtOnce(fd);
  return fd;
}

absl::Status LimitWaits(int fd) {
  const timeval limit = {.tv_sec = kWireLimitSeconds, .tv_usec = 0};
  for (const int option : {SO_RCVTIMEO, SO_SNDTIMEO}) {
    if (setsockopt(fd, SOL_SOCKET, option, &limit, sizeof(limit)) != 0) {
      return absl::ErrnoToStatus(errno, "cannot limit a socket's waits");
    }
  }
  return absl::OkStatus();
}

void SetBuffers(int fd, int bytes) {
  const auto set = [&](int forced, int usual) {
    // Beyond the system's limit only for root.
    if (setsockopt(fd, SOL_SOCKET, forced, &bytes, sizeof(bytes)) == 0) return;
    static_cast<void>(setsockopt(fd, SOL_SOCKET, usual, &bytes, sizeof(bytes)));
  };
  set(SO_SNDBUFFORCE, SO_SNDBUF);
  set(SO_RCVBUFFORCE, SO_RCVBUF);
}

absl::Status SendAll(int fd, absl::Span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t sent = send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent <= 0) return absl::ErrnoToStatus(errno, "cannot send");
    bytes.remove_prefix(static_cast<size_t>(sent));
  }
  return absl::OkStatus();
}

absl::StatusOr<bool> ReceiveAll(int fd, absl::Span<std::byte> bytes) {
  const size_t wanted = bytes.size();
  while (!bytes.empty()) {
    const ssize_t received = recv(fd, bytes.data(), bytes.size(), 0);
    if (received < 0 && errno == EINTR) continue;
    if (received < 0) return absl::ErrnoToStatus(errno, "cannot receive");
    if (received == 0 && bytes.size() == wanted) return false;
    if (received == 0) return absl::UnavailableError("the peer has gone in mid-message");
    bytes.remove_prefix(static_cast<size_t>(received));
  }
  return true;
}

absl::Status SendMessages(int fd, const SendMemory& memory, int64_t count) {
  for (int64_t i = 0; i < count; ++i) BALLAST_RETURN_IF_ERROR(SendAll(fd, memory.message(i)));
  return absl::OkStatus();
}

absl::Status ReceiveMessages(int fd, int64_t count) {
  std::vector<std::byte> buffer(kMessageBytes);
  for (int64_t i = 0; i < count; ++i) {
    BALLAST_ASSIGN_OR_RETURN(const bool there, ReceiveAll(fd, absl::MakeSpan(buffer)));
    if (!there) return absl::UnavailableError("the peer has gone");
  }
  return absl::OkStatus();
}

}  // namespace ballast::bench
