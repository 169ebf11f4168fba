#include "server/listener.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <memory>
#include <system_error>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/status.h"
#include "cpu_optimizer_service/common/system/memory_guard.h"

namespace ballast::server {
namespace {

constexpr int64_t kMostDescriptors = int64_t{1} << 20;
// Of these the last are for files, shared memory and the like, and not for connections.
constexpr int64_t kKeptDescriptors = 32;
constexpr int kKeptPart = 8;  // Of few descriptors, no more than this part is kept.
constexpr std::chrono::seconds kWarnEvery(10);
// Of a connection that is closed, together more than the system keeps of one.
constexpr size_t kDiscardedBytes = size_t{1} << 20;
constexpr int kMostDiscards = 64;
// Where a connection can neither be accepted nor refused, it is tried again after so long.
constexpr std::chrono::milliseconds kPause(50);

absl::Status CannotListen(const Address& address) {
  std::error_code error;
  const std::filesystem::path folder = std::filesystem::path(address.unix_path).parent_path();
  if (!folder.empty() && !std::filesystem::is_directory(folder, error)) {
    return absl::UnavailableError(absl::StrCat("cannot listen on ", address.text,
                                               ": there is no directory ", folder.string(),
                                               "; make it or choose another"));
  }
  return absl::UnavailableError(absl::StrCat("cannot listen on ", address.text,
                                             ": it is taken, or not an address of this host; "
                                             "stop the other process or choose another"));
}

FileDescriptor OpenSpare() { return FileDescriptor(open("/dev/null", O_RDONLY | O_CLOEXEC)); }

int PortOf(int socket) {
  sockaddr_storage name = {};
  socklen_t bytes = sizeof(name);
  if (getsockname(socket, reinterpret_cast<sockaddr*>(&name), &bytes) != 0) return 0;
  return ntohs(name.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6*>(&name)->sin6_port
                                          : reinterpret_cast<sockaddr_in*>(&name)->sin_port);
}

void SetPort(addrinfo& address, int port) {
  if (address.ai_family == AF_INET) {
    reinterpret_cast<sockaddr_in*>(address.ai_addr)->sin_port = htons(static_cast<uint16_t>(port));
  } else if (address.ai_family == AF_INET6) {
    reinterpret_cast<sockaddr_in6*>(address.ai_addr)->sin6_port =
        htons(static_cast<uint16_t>(port));
  }
}

// With the port that the system chose.
std::string TextOf(const Address& address, int port) {
  if (!address.unix_path.empty() || address.port != 0) return address.text;
  return absl::StrCat(address.text.substr(0, address.text.rfind(':')), ":", port);
}

constexpr absl::string_view kKeptPrefix = "listen ";

// An address may have several sockets.
std::string KeptName(const Address& address, size_t number) {
  return absl::StrCat(kKeptPrefix, number, " ", address.text);
}

void RemoveSocketFile(const std::string& path) {
  struct stat found = {};
  if (lstat(path.c_str(), &found) == 0 && S_ISSOCK(found.st_mode)) unlink(path.c_str());
}

// As gRPC names the other end of a TCP connection; empty: it is none.
std::string PeerOf(int socket) {
  sockaddr_storage name = {};
  socklen_t bytes = sizeof(name);
  if (getpeername(socket, reinterpret_cast<sockaddr*>(&name), &bytes) != 0) return "";
  char host[INET6_ADDRSTRLEN] = {};
  if (name.ss_family == AF_INET) {
    const auto& of = reinterpret_cast<const sockaddr_in&>(name);
    inet_ntop(AF_INET, &of.sin_addr, host, sizeof(host));
    return absl::StrCat("ipv4:", host, ":", ntohs(of.sin_port));
  }
  if (name.ss_family != AF_INET6) return "";
  const auto& of = reinterpret_cast<const sockaddr_in6&>(name);
  if (IN6_IS_ADDR_V4MAPPED(&of.sin6_addr)) {
    constexpr size_t kMappedAt = 12;
    inet_ntop(AF_INET, &of.sin6_addr.s6_addr[kMappedAt], host, sizeof(host));
    return absl::StrCat("ipv4:", host, ":", ntohs(of.sin6_port));
  }
  inet_ntop(AF_INET6, &of.sin6_addr, host, sizeof(host));
  return absl::StrCat("ipv6:%5B", host, "%5D:", ntohs(of.sin6_port));
}

}  // namespace

int CloseConnectionsOf(const std::string& peer) {
  if (peer.empty()) return 0;
  std::error_code error;
  int closed = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd", error)) {
    int number = -1;
    if (!absl::SimpleAtoi(entry.path().filename().string(), &number)) continue;
    if (PeerOf(number) != peer) continue;
    // Its owner may have closed it by now, and the number may be another's: looked at again as a
    // descriptor that is ours.
    const FileDescriptor kept(fcntl(number, F_DUPFD_CLOEXEC, 0));
    if (!kept || PeerOf(kept.number()) != peer) continue;
    if (shutdown(kept.number(), SHUT_RDWR) == 0) ++closed;
    // What has come and was not read yet would be, after the end too. Its sender may go on, so not
    // without an end.
    for (int i = 0; i < kMostDiscards; ++i) {
      if (recv(kept.number(), nullptr, kDiscardedBytes, MSG_TRUNC | MSG_DONTWAIT) <= 0) break;
    }
  }
  return closed;
}

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

absl::StatusOr<FileDescriptor> Listener::Bind(int family, const void* name,
                                              size_t name_bytes) const {
  FileDescriptor socket(::socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  const int on = 1;
  if (family != AF_UNIX && socket) {
    // A port whose last connections are being forgotten is free; one that is listened on is not.
    setsockopt(socket.number(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  }
  if (!socket ||
      bind(socket.number(), static_cast<const sockaddr*>(name),
           static_cast<socklen_t>(name_bytes)) != 0 ||
      listen(socket.number(), SOMAXCONN) != 0) {
    return absl::UnavailableError(std::strerror(errno));
  }
  return socket;
}

bool Listener::IsKept(const Address& address, const NamedMemory* memory) {
  if (memory == nullptr) return false;
  const std::vector<std::string> left = memory->Left();
  return std::find(left.begin(), left.end(), KeptName(address, 0)) != left.end();
}

void Listener::ForgetKept(NamedMemory& memory) {
  for (const std::string& name : memory.Left()) {
    if (!absl::StartsWith(name, kKeptPrefix)) continue;
    memory.Forget(name);
    const size_t path = name.find(" unix:");
    if (path != std::string::npos) RemoveSocketFile(name.substr(path + 6));
  }
}

absl::StatusOr<std::string> Listener::AddKept(const Address& address, NamedMemory& memory) {
  int port = address.port;
  for (size_t number = 0;; ++number) {
    FileDescriptor socket = memory.TakeFile(KeptName(address, number));
    if (!socket) break;
    if (address.unix_path.empty()) port = PortOf(socket.number());
    sockets_.push_back(std::move(socket));
  }
  if (!address.unix_path.empty()) unix_paths_.push_back(address.unix_path);
  return TextOf(address, port);
}

absl::Status Listener::KeepFrom(size_t first, const Address& address, NamedMemory* memory) {
  if (memory == nullptr) return absl::OkStatus();
  for (size_t i = first; i < sockets_.size(); ++i) {
    BALLAST_RETURN_IF_ERROR(memory->KeepFile(KeptName(address, i - first), sockets_[i].number()));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::string> Listener::Add(const Address& address, NamedMemory* memory) {
  if (IsKept(address, memory)) return AddKept(address, *memory);
  const size_t first = sockets_.size();
  if (!address.unix_path.empty()) {
    sockaddr_un name = {};
    name.sun_family = AF_UNIX;
    std::memcpy(name.sun_path, address.unix_path.data(), address.unix_path.size());
    RemoveSocketFile(address.unix_path);  // Of a process that has ended (CheckUnixSocketIsFree).
    absl::StatusOr<FileDescriptor> socket = Bind(AF_UNIX, &name, sizeof(name));
    if (!socket.ok()) return CannotListen(address);
    sockets_.push_back(*std::move(socket));
    unix_paths_.push_back(address.unix_path);
    BALLAST_RETURN_IF_ERROR(KeepFrom(first, address, memory));
    return address.text;
  }
  addrinfo hints = {};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  if (getaddrinfo(address.host.c_str(), "0", &hints, &found) != 0) return CannotListen(address);
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> freed(found, freeaddrinfo);
  // A name may have several addresses, localhost one of each family: all of one port.
  int port = address.port;
  bool bound = false;
  for (addrinfo* each = found; each != nullptr; each = each->ai_next) {
    SetPort(*each, port);
    absl::StatusOr<FileDescriptor> socket = Bind(each->ai_family, each->ai_addr, each->ai_addrlen);
    if (!socket.ok()) continue;
    if (port == 0) port = PortOf(socket->number());
    sockets_.push_back(*std::move(socket));
    bound = true;
  }
  if (!bound) return CannotListen(address);
  BALLAST_RETURN_IF_ERROR(KeepFrom(first, address, memory));
  return TextOf(address, port);
}

absl::Status Listener::Start(std::function<void(int)> take,
                             std::function<void(const std::string&)> warn) {
  take_ = std::move(take);
  warn_ = std::move(warn);
  most_descriptors_ = RaiseDescriptorLimit();
  spare_ = OpenSpare();
  stop_ = FileDescriptor(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!stop_ || !spare_) {
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
  for (const std::string& path : unix_paths_) RemoveSocketFile(path);
}

void Listener::Run() {
  std::vector<pollfd> polled = {{.fd = stop_.number(), .events = POLLIN, .revents = 0}};
  for (const FileDescriptor& socket : sockets_) {
    polled.push_back({.fd = socket.number(), .events = POLLIN, .revents = 0});
  }
  while (true) {
    if (poll(polled.data(), polled.size(), -1) < 0 && errno != EINTR) {
      std::this_thread::sleep_for(kPause);  // The system is out of memory.
      continue;
    }
    if (polled[0].revents != 0) return;
    for (size_t i = 1; i < polled.size(); ++i) {
      if (polled[i].revents != 0) (void)RunsInMemory([&] { AcceptAll(polled[i].fd); });
    }
  }
}

void Listener::AcceptAll(int socket) {
  const int64_t kept = std::min(kKeptDescriptors, most_descriptors_ / kKeptPart);
  while (true) {
    FileDescriptor connection(accept4(socket, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (!connection) {
      if (errno == EMFILE || errno == ENFILE) return RefuseOne(socket);
      if (errno == ENOBUFS || errno == ENOMEM) std::this_thread::sleep_for(kPause);
      return;  // Another has taken it, it is gone, or there is none.
    }
    // The system gives the lowest number that is free.
    if (connection.number() >= most_descriptors_ - kept) {
      connection = FileDescriptor();
      Warn();
      continue;
    }
    const int on = 1;
    setsockopt(connection.number(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));  // Not of unix.
    take_(connection.Release());
  }
}

void Listener::RefuseOne(int socket) {
  spare_ = FileDescriptor();
  FileDescriptor refused(accept4(socket, nullptr, nullptr, SOCK_CLOEXEC));
  const bool took = static_cast<bool>(refused);
  refused = FileDescriptor();
  spare_ = OpenSpare();
  Warn();
  if (!took || !spare_) std::this_thread::sleep_for(kPause);  // Others took the descriptor.
}

void Listener::Warn() {
  ++refused_;
  const auto now = std::chrono::steady_clock::now();
  if (now - warned_ < kWarnEvery) return;
  warned_ = now;
  warn_(
      absl::StrCat("out of file descriptors, of which this process may have ", most_descriptors_,
                   ": refused ", std::exchange(refused_, 0),
                   " connections; raise the limit (ulimit -n, LimitNOFILE) or close connections"));
}

}  // namespace ballast::server
