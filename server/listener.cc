#include "server/listener.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <memory>
#include <optional>
#include <system_error>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "cpu_optimizer_service/common/status.h"
#include "cpu_optimizer_service/common/system/memory_guard.h"
#include "cpu_optimizer_service/common/system/visit_names.h"

namespace ballast::server {
namespace {

// As many as Linux lets a process have where fs.nr_open is as it comes, and what counts where there
// is no limit.
constexpr int64_t kMostDescriptors = int64_t{1} << 20;
// Of these the last are for files, shared memory and the like, and not for connections.
constexpr int64_t kKeptDescriptors = 32;
constexpr int kKeptPart = 8;  // Of few descriptors, no more than this part is kept.
// Of a connection that is closed, together more than the system keeps of one.
constexpr size_t kDiscardedBytes = size_t{1} << 20;
constexpr int kMostDiscards = 64;
// Where a connection can neither be accepted nor refused, it is tried again after so long.
constexpr std::chrono::milliseconds kPause(50);
// Before those that have been accepted are looked at.
constexpr int kMostAtOnce = 256;

// What an event is of; a newcomer's has its Id, behind which no other number comes.
constexpr uint64_t kStop = ~uint64_t{0};
constexpr uint64_t kOfSocket = uint64_t{1} << 63;  // And the socket.

absl::Status CannotListen(const Address& address, int error) {
  const auto because = [&address](absl::string_view why) {
    return absl::UnavailableError(absl::StrCat("cannot listen on ", address.text, ": ", why));
  };
  const std::string folder = address.folder();
  switch (error) {
    case EADDRINUSE:
      return because("it is taken; stop the other process or choose another");
    case EADDRNOTAVAIL:
      return because("it is not an address of this host; choose another");
    case EMFILE:
    case ENFILE:
      return because("no file descriptors are left; raise the limit (ulimit -n)");
    case ENOENT:
    case ENOTDIR:
      return because(absl::StrCat("there is no directory ", folder, "; make it or choose another"));
    case EACCES:
    case EPERM:
      return because(address.unix_path.empty() ? "this user may not; choose a port from 1024 on"
                                               : absl::StrCat("this user may not write to ", folder,
                                                              "; allow it or choose another"));
    default:
      return because(
          absl::StrCat("the system refuses it (", std::strerror(error), "); choose another"));
  }
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

// Its numbers, without the port.
std::string HostOf(const addrinfo& address) {
  char host[NI_MAXHOST] = {};
  getnameinfo(address.ai_addr, address.ai_addrlen, host, sizeof(host), nullptr, 0, NI_NUMERICHOST);
  return host;
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

// Between sockets of one user that have this set; anything else has its port alone.
void SharePort(const FileDescriptor& socket, int shares) {
  setsockopt(socket.number(), SOL_SOCKET, SO_REUSEPORT, &shares, sizeof(shares));
}

void RemoveSocketFile(const std::string& path) {
  struct stat found = {};
  if (lstat(path.c_str(), &found) == 0 && S_ISSOCK(found.st_mode)) unlink(path.c_str());
}

// Of a TCP connection; empty: it is none.
std::string PeerOf(int socket) {
  sockaddr_storage name = {};
  socklen_t bytes = sizeof(name);
  if (getpeername(socket, reinterpret_cast<sockaddr*>(&name), &bytes) != 0) return "";
  return PeerAt(name);
}

// Empty: it has ended.
std::string SourceAt(int connection, bool is_unix) {
  if (!is_unix) return SourceOf(PeerOf(connection));
  ucred peer = {};
  socklen_t bytes = sizeof(peer);
  if (getsockopt(connection, SOL_SOCKET, SO_PEERCRED, &peer, &bytes) != 0) return "";
  return absl::StrCat("user:", peer.uid);
}

bool IsUnix(int socket) {
  int domain = 0;
  socklen_t bytes = sizeof(domain);
  return getsockopt(socket, SOL_SOCKET, SO_DOMAIN, &domain, &bytes) == 0 && domain == AF_UNIX;
}

bool Watch(const FileDescriptor& events, int descriptor, uint32_t what, uint64_t number) {
  epoll_event event = {.events = what, .data = {.u64 = number}};
  return epoll_ctl(events.number(), EPOLL_CTL_ADD, descriptor, &event) == 0;
}

int MillisecondsUntil(std::optional<Newcomers::Clock::time_point> time) {
  if (!time.has_value()) return -1;
  // Rounded up: a wait that ended before the time would be begun again and again.
  const auto left =
      std::chrono::ceil<std::chrono::milliseconds>(*time - Newcomers::Clock::now()).count();
  return static_cast<int>(
      std::clamp<int64_t>(left, 0, Newcomers::kPatience / std::chrono::milliseconds(1)));
}

}  // namespace

std::string PeerAt(const sockaddr_storage& name) {
  char host[INET6_ADDRSTRLEN] = {};
  if (name.ss_family == AF_INET) {
    const auto& of = reinterpret_cast<const sockaddr_in&>(name);
    inet_ntop(AF_INET, &of.sin_addr, host, sizeof(host));
    return absl::StrCat("ipv4:", host, ":", ntohs(of.sin_port));
  }
  if (name.ss_family != AF_INET6) return "";
  const auto& of = reinterpret_cast<const sockaddr_in6&>(name);
  // ::ffff:a.b.c.d (RFC 4291, 2.5.5.2) is how a socket of both families shows a client of IPv4.
  // gRPC names that one by its IPv4 address.
  if (IN6_IS_ADDR_V4MAPPED(&of.sin6_addr)) {
    constexpr size_t kMappedAt = 12;
    inet_ntop(AF_INET, &of.sin6_addr.s6_addr[kMappedAt], host, sizeof(host));
    return absl::StrCat("ipv4:", host, ":", ntohs(of.sin6_port));
  }
  inet_ntop(AF_INET6, &of.sin6_addr, host, sizeof(host));
  // gRPC's names are URIs, in which the brackets and the sign before a link are percent-encoded.
  const std::string link = of.sin6_scope_id == 0 ? "" : absl::StrCat("%25", of.sin6_scope_id);
  return absl::StrCat("ipv6:%5B", host, link, "%5D:", ntohs(of.sin6_port));
}

std::string SourceOf(const std::string& peer) {
  const std::string host = peer.substr(0, peer.rfind(':'));
  if (absl::StartsWith(host, "ipv4:")) return host;
  absl::string_view number = host;
  in6_addr address = {};
  if (!absl::ConsumePrefix(&number, "ipv6:%5B") || !absl::ConsumeSuffix(&number, "%5D")) return "";
  number = number.substr(0, number.find('%'));
  if (inet_pton(AF_INET6, std::string(number).c_str(), &address) != 1) return "";
  // A host has as many addresses of its network as it likes.
  std::fill(std::begin(address.s6_addr) + sizeof(address) / 2, std::end(address.s6_addr), 0);
  char network[INET6_ADDRSTRLEN] = {};
  inet_ntop(AF_INET6, &address, network, sizeof(network));
  return absl::StrCat("ipv6:", network);
}

int CloseConnectionsOf(const std::string& peer) {
  if (peer.empty()) return 0;
  int closed = 0;
  // gRPC does not say which descriptor a connection has, so all of this process are looked at.
  (void)VisitNames(AT_FDCWD, "/proc/self/fd", [&](const char* name, int) {
    int number = -1;
    if (!absl::SimpleAtoi(name, &number) || PeerOf(number) != peer) return;
    // Its owner may have closed it by now, and the number may be another's: looked at again as a
    // descriptor that is ours.
    const FileDescriptor kept(fcntl(number, F_DUPFD_CLOEXEC, 0));
    if (!kept || PeerOf(kept.number()) != peer) return;
    // This ends the connection itself. To close the number would give up a second reference only.
    if (shutdown(kept.number(), SHUT_RDWR) == 0) ++closed;
    // What has come and was not read yet would be, after the end too. Its sender may go on, so not
    // without an end.
    for (int i = 0; i < kMostDiscards; ++i) {
      // With MSG_TRUNC the bytes of a TCP connection are dropped, and not copied (tcp(7)).
      if (recv(kept.number(), nullptr, kDiscardedBytes, MSG_TRUNC | MSG_DONTWAIT) <= 0) break;
    }
  });
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

absl::StatusOr<FileDescriptor> Listener::Bind(const Address& address, int family, const void* name,
                                              size_t name_bytes) const {
  FileDescriptor socket(::socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  const int on = 1;
  if (family != AF_UNIX && socket) {
    // A port whose last connections are being forgotten is free; one that is listened on is not.
    setsockopt(socket.number(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
    // An earlier process's sockets may have the same port, of another address. Both have to share
    // it then (socket(7), SO_REUSEPORT).
    SharePort(socket, given_up_.empty() ? 0 : 1);
  }
  if (!socket ||
      bind(socket.number(), static_cast<const sockaddr*>(name),
           static_cast<socklen_t>(name_bytes)) != 0 ||
      listen(socket.number(), SOMAXCONN) != 0) {
    return CannotListen(address, errno);
  }
  // Only for the binding: afterwards it is to have its port alone.
  SharePort(socket, 0);
  return socket;
}

bool Listener::IsKept(const Address& address, const NamedMemory* memory) {
  if (memory == nullptr) return false;
  const std::vector<std::string> left = memory->Left();
  return std::find(left.begin(), left.end(), KeptName(address, 0)) != left.end();
}

void Listener::GiveUpKept(const std::vector<Address>& addresses, NamedMemory& memory) {
  for (const std::string& name : memory.Left()) {
    // The names of an address's sockets differ in their number alone.
    const bool is_wanted =
        std::any_of(addresses.begin(), addresses.end(), [&name](const Address& address) {
          return absl::EndsWith(name, absl::StrCat(" ", address.text));
        });
    if (is_wanted || !absl::StartsWith(name, kKeptPrefix)) continue;
    // The keeper has the socket open, too, so closing it here would free no port. It is forgotten
    // when the new ones are there: a start that fails before leaves it to the next one.
    FileDescriptor& socket = given_up_[name] = memory.TakeFile(name);
    SharePort(socket, 1);
  }
}

void Listener::ForgetKept(NamedMemory& memory) {
  for (const auto& [name, socket] : given_up_) {
    memory.Forget(name);
    // Its file would lead clients to a socket on which nobody listens.
    const size_t path = name.find(" unix:");
    if (path != std::string::npos) RemoveSocketFile(name.substr(path + 6));
  }
  given_up_.clear();
}

absl::StatusOr<std::string> Listener::AddKept(const Address& address, NamedMemory& memory) {
  int port = address.port;
  for (size_t number = 0;; ++number) {
    FileDescriptor socket = memory.TakeFile(KeptName(address, number));
    if (!socket) break;
    // Where port 0 was asked for, only the socket knows which one the system chose.
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

absl::StatusOr<std::string> Listener::Add(const Address& address, NamedMemory* memory,
                                          const std::function<void(const std::string&)>& warn) {
  if (IsKept(address, memory)) return AddKept(address, *memory);
  const size_t first = sockets_.size();
  if (!address.unix_path.empty()) {
    sockaddr_un name = {};
    name.sun_family = AF_UNIX;
    std::memcpy(name.sun_path, address.unix_path.data(), address.unix_path.size());
    RemoveSocketFile(address.unix_path);  // Of a process that has ended (CheckUnixSocketIsFree).
    absl::StatusOr<FileDescriptor> socket = Bind(address, AF_UNIX, &name, sizeof(name));
    if (!socket.ok()) return socket.status();
    sockets_.push_back(*std::move(socket));
    unix_paths_.push_back(address.unix_path);
    BALLAST_RETURN_IF_ERROR(KeepFrom(first, address, memory));
    return address.text;
  }
  addrinfo hints = {};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  if (getaddrinfo(address.host.c_str(), "0", &hints, &found) != 0) {
    return CannotListen(address, EADDRNOTAVAIL);
  }
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> freed(found, freeaddrinfo);
  // A name may have several addresses, localhost one of each family: all of one port.
  int port = address.port;
  bool bound = false;
  absl::Status failed;
  std::vector<std::string> warnings;
  for (addrinfo* each = found; each != nullptr; each = each->ai_next) {
    SetPort(*each, port);
    absl::StatusOr<FileDescriptor> socket =
        Bind(address, each->ai_family, each->ai_addr, each->ai_addrlen);
    if (!socket.ok()) {
      // Some may not be there, such as ::1 where IPv6 is off. One is enough.
      failed = socket.status();
      warnings.push_back(absl::StrCat(failed.message(), " (at ", HostOf(*each), ", one of several ",
                                      "addresses of that name; another one is listened on)"));
      continue;
    }
    if (port == 0) port = PortOf(socket->number());
    sockets_.push_back(*std::move(socket));
    bound = true;
  }
  if (!bound) return failed;
  for (const std::string& line : warnings) {
    if (warn != nullptr) warn(line);
  }
  BALLAST_RETURN_IF_ERROR(KeepFrom(first, address, memory));
  return TextOf(address, port);
}

absl::Status Listener::CheckNew(const std::vector<Address>& addresses, NamedMemory& memory) {
  Listener listener;
  // As the new process will do first; but nothing is kept or forgotten, and all of it ends with
  // `listener`.
  listener.GiveUpKept(addresses, memory);
  for (const Address& address : addresses) {
    if (IsKept(address, &memory)) continue;
    if (!address.unix_path.empty()) BALLAST_RETURN_IF_ERROR(CheckUnixSocketIsFree(address));
    BALLAST_RETURN_IF_ERROR(listener.Add(address).status());
  }
  return absl::OkStatus();
}

absl::Status Listener::Start(std::function<void(int)> take,
                             std::function<void(const std::string&)> warn,
                             ListenerOptions options) {
  take_ = std::move(take);
  refusals_.emplace(std::move(warn));
  tls_ = options.tls;
  most_newcomers_ = options.most_newcomers;
  if (options.held_until == nullptr) {
    options.held_until = [](const std::string&) { return Newcomers::Clock::time_point(); };
  }
  most_descriptors_ = RaiseDescriptorLimit();
  spare_ = OpenSpare();
  stop_ = FileDescriptor(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  events_ = FileDescriptor(epoll_create1(EPOLL_CLOEXEC));
  bool watched = spare_ && Watch(events_, stop_.number(), EPOLLIN, kStop);
  // Sockets are reported for as long as connections wait (level-triggered), so one that has to be
  // left for now is not forgotten.
  for (const FileDescriptor& socket : sockets_) {
    watched = watched && Watch(events_, socket.number(), EPOLLIN,
                               kOfSocket | static_cast<uint64_t>(socket.number()));
  }
  if (!watched) {
    return absl::UnavailableError(
        "no file descriptors are left to listen with; raise the limit (ulimit -n)");
  }
  thread_ = std::thread(
      [this, newcomers = Newcomers(std::move(options.held_until))]() mutable { Run(newcomers); });
  return absl::OkStatus();
}

Listener::~Listener() {
  if (thread_.joinable()) {
    const uint64_t one = 1;
    static_cast<void>(!write(stop_.number(), &one, sizeof(one)));
    thread_.join();
  }
  for (const std::string& path : unix_paths_) RemoveSocketFile(path);
  // The option is of the socket, which a service that still runs may go on with (CheckNew).
  for (const auto& [name, socket] : given_up_) SharePort(socket, 0);
}

void Listener::Run(Newcomers& newcomers) {
  std::array<epoll_event, 64> events = {};
  while (true) {
    const int wait = MillisecondsUntil(newcomers.WhenNext(Newcomers::Clock::now()));
    const int count =
        epoll_wait(events_.number(), events.data(), static_cast<int>(events.size()), wait);
    for (int i = 0; i < count; ++i) {
      const uint64_t of = events[i].data.u64;
      if (of == kStop) return;
      // Where there is no memory, the event of a socket comes again, and a newcomer is closed when
      // its time is over.
      (void)RunsInMemory([&] {
        if ((of & kOfSocket) != 0) {
          AcceptAll(static_cast<int>(of ^ kOfSocket), newcomers);
        } else {
          newcomers.OnReadable(of);
        }
      });
    }
    (void)RunsInMemory([&] { HandOn(newcomers); });
  }
}

void Listener::HandOn(Newcomers& newcomers) {
  const auto now = Newcomers::Clock::now();
  newcomers.DropLate(now);
  while (FileDescriptor connection = newcomers.Next(now)) {
    // The descriptor stays open, as that of its new owner, so it does not leave the set by itself.
    epoll_ctl(events_.number(), EPOLL_CTL_DEL, connection.number(), nullptr);
    take_(connection.Release());
  }
}

void Listener::AcceptAll(int socket, Newcomers& newcomers) {
  const int64_t kept = std::min(kKeptDescriptors, most_descriptors_ / kKeptPart);
  const bool is_unix = IsUnix(socket);
  for (int i = 0; i < kMostAtOnce; ++i) {
    FileDescriptor connection(accept4(socket, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (!connection) {
      if (errno == EMFILE || errno == ENFILE) return RefuseOne(socket);
      // The connection still waits, so without a pause this thread would come back at once.
      if (errno == ENOBUFS || errno == ENOMEM) std::this_thread::sleep_for(kPause);
      return;  // Another has taken it, it is gone, or there is none.
    }
    // The system gives the lowest number that is free.
    if (connection.number() >= most_descriptors_ - kept) {
      connection = FileDescriptor();
      Refused();
      continue;
    }
    const int on = 1;
    // As gRPC does with connections that it accepts itself: a short message does not wait until the
    // one before is acknowledged.
    if (!is_unix) {
      setsockopt(connection.number(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
    }
    std::string source = SourceAt(connection.number(), is_unix);
    if (source.empty()) continue;  // It has ended.
    const int number = connection.number();
    const Newcomers::Id id = newcomers.Add(std::move(connection), std::move(source),
                                           tls_ && !is_unix, Newcomers::Clock::now());
    // Reported once for all that comes (EPOLLET): a client that has said too little would otherwise
    // wake this thread without an end.
    // Where the system has no memory for that, the connection ends when its time is over.
    Watch(events_, number, EPOLLIN | EPOLLRDHUP | EPOLLET, id);
    if (newcomers.size() > most_newcomers_) newcomers.DropOldest();
  }
}

void Listener::RefuseOne(int socket) {
  // Left alone, the connection would wait for an answer, and wake this thread without an end.
  spare_ = FileDescriptor();
  FileDescriptor refused(accept4(socket, nullptr, nullptr, SOCK_CLOEXEC));
  const bool took = static_cast<bool>(refused);
  refused = FileDescriptor();
  spare_ = OpenSpare();
  Refused();
  if (!took || !spare_) std::this_thread::sleep_for(kPause);  // Others took the descriptor.
}

void Listener::Refused() {
  refusals_->Happened([&](int64_t refused) {
    return absl::StrCat(
        "out of file descriptors, of which this process may have ", most_descriptors_, ": refused ",
        refused, " connections; raise the limit (ulimit -n, LimitNOFILE) or close connections");
  });
}

}  // namespace ballast::server
