#include "server/listening_sockets.h"

#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "cpu_optimizer_service/common/status.h"

namespace ballast::server {
namespace {

absl::Status CannotListen(const Address& address, int error) {
  const auto because = [&address](absl::string_view why) {
    return absl::UnavailableError(absl::StrCat("cannot listen on ", address.text, ": ", why));
  };
  const std::string folder = address.folder();
  switch (error) {
    case EADDRINUSE:
      return because("the address is in use; stop the other process or choose another");
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

}  // namespace

ListeningSockets::~ListeningSockets() {
  for (const std::string& path : unix_paths_) RemoveSocketFile(path);
  // The option is of the socket, which a service that still runs may go on with (CheckNew).
  for (const auto& [name, socket] : given_up_) SharePort(socket, 0);
}

absl::StatusOr<FileDescriptor> ListeningSockets::Bind(const Address& address, int family,
                                                      const void* name, size_t name_bytes) const {
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

bool ListeningSockets::IsKept(const Address& address, const NamedMemory* memory) {
  if (memory == nullptr) return false;
  const std::vector<std::string> left = memory->Left();
  return std::find(left.begin(), left.end(), KeptName(address, 0)) != left.end();
}

void ListeningSockets::GiveUpKept(const std::vector<Address>& addresses, NamedMemory& memory) {
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

void ListeningSockets::ForgetKept(NamedMemory& memory) {
  for (const auto& [name, socket] : given_up_) {
    memory.Forget(name);
    // Its file would lead clients to a socket on which nobody listens.
    const size_t path = name.find(" unix:");
    if (path != std::string::npos) RemoveSocketFile(name.substr(path + 6));
  }
  given_up_.clear();
}

absl::StatusOr<std::string> ListeningSockets::AddKept(const Address& address, NamedMemory& memory) {
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

absl::Status ListeningSockets::KeepFrom(size_t first, const Address& address, NamedMemory* memory) {
  if (memory == nullptr) return absl::OkStatus();
  for (size_t i = first; i < sockets_.size(); ++i) {
    BALLAST_RETURN_IF_ERROR(memory->KeepFile(KeptName(address, i - first), sockets_[i].number()));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::string> ListeningSockets::Add(
    const Address& address, NamedMemory* memory,
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

absl::Status ListeningSockets::CheckNew(const std::vector<Address>& addresses,
                                        NamedMemory& memory) {
  ListeningSockets sockets;
  // As the new process will do first; but nothing is kept or forgotten, and all of it ends with
  // `sockets`.
  sockets.GiveUpKept(addresses, memory);
  for (const Address& address : addresses) {
    if (IsKept(address, &memory)) continue;
    if (!address.unix_path.empty()) BALLAST_RETURN_IF_ERROR(CheckUnixSocketIsFree(address));
    BALLAST_RETURN_IF_ERROR(sockets.Add(address).status());
  }
  return absl::OkStatus();
}

}  // namespace ballast::server
