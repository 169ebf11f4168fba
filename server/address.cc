#include "server/address.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/system/file_descriptor.h"

namespace ballast::server {
namespace {

constexpr char kUnixScheme[] = "unix:";

absl::StatusOr<Address> ParseUnixAddress(const std::string& text) {
  const std::string path = text.substr(std::strlen(kUnixScheme));
  // sun_path has 108 bytes, of which the last is for the zero behind the path (unix(7)).
  if (path.empty() || path[0] != '/' || path.size() >= sizeof(sockaddr_un::sun_path)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "cannot listen on '", text, "': expected unix: and an absolute path of at most ",
        sizeof(sockaddr_un::sun_path) - 1, " bytes"));
  }
  return Address{.text = text, .host = "", .port = 0, .unix_path = path};
}

}  // namespace

std::string Address::folder() const {
  const size_t slash = unix_path.rfind('/');
  return slash == std::string::npos ? "." : unix_path.substr(0, std::max<size_t>(slash, 1));
}

absl::StatusOr<Address> ParseAddress(const std::string& text) {
  if (absl::StartsWith(text, kUnixScheme)) return ParseUnixAddress(text);
  // The last one: an IPv6 address has others before it.
  const size_t colon = text.rfind(':');
  int port = -1;
  if (colon == std::string::npos || colon == 0 ||
      !absl::SimpleAtoi(text.substr(colon + 1), &port) || port < 0 || port > 65535) {
    return absl::InvalidArgumentError(
        absl::StrCat("cannot listen on '", text,
                     "': expected HOST:PORT, such as 127.0.0.1:7070, or unix:/path"));
  }
  std::string host = text.substr(0, colon);
  const bool bracketed = host.size() > 2 && host.front() == '[' && host.back() == ']';
  if (bracketed) host = host.substr(1, host.size() - 2);
  // Without brackets nothing says whether the last group is the port or a part of the address.
  if (!bracketed && absl::StrContains(host, ':')) {
    return absl::InvalidArgumentError(
        absl::StrCat("cannot listen on '", text, "': write an IPv6 address as [ADDRESS]:PORT"));
  }
  return Address{.text = text, .host = host, .port = port, .unix_path = ""};
}

bool IsLocal(const Address& address) {
  if (!address.unix_path.empty() || address.host == "localhost") return true;
  // Any other name counts as one that other hosts can reach: where it leads is only known once it
  // is listened on (ListeningSockets::Add).
  in_addr v4;
  if (inet_pton(AF_INET, address.host.c_str(), &v4) == 1) return ntohl(v4.s_addr) >> 24 == 127;
  in6_addr v6;
  return inet_pton(AF_INET6, address.host.c_str(), &v6) == 1 && IN6_IS_ADDR_LOOPBACK(&v6);
}

absl::Status CheckAdvertised(const std::string& text) {
  const absl::StatusOr<Address> address = ParseAddress(text);
  if (address.ok() && address->port > 0 && address->host != "0.0.0.0" && address->host != "::") {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrCat("flag --advertise: other services cannot connect to '", text,
                   "'; give HOST:PORT, such as gpu1:7070 or [fd00::1]:7070"));
}

std::string AdvertisedOf(const std::vector<std::string>& listening) {
  std::string advertised;
  for (const std::string& text : listening) {
    const absl::StatusOr<Address> address = ParseAddress(text);
    if (!address.ok() || !address->unix_path.empty()) continue;
    if (!IsLocal(*address)) return text;
    if (advertised.empty()) advertised = text;
  }
  return advertised;
}

absl::Status CheckUnixSocketIsFree(const Address& address) {
  sockaddr_un name = {};
  name.sun_family = AF_UNIX;
  // ParseAddress has checked that it fits, with a zero behind it.
  std::memcpy(name.sun_path, address.unix_path.data(), address.unix_path.size());
  // Otherwise connect would wait for as long as connections queue there that nobody accepts.
  const FileDescriptor socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!socket) {
    return absl::UnavailableError(
        absl::StrCat("cannot listen on ", address.text, ": ", std::strerror(errno)));
  }
  const bool answered =
      connect(socket.number(), reinterpret_cast<const sockaddr*>(&name), sizeof(name)) == 0;
  const int error = answered ? 0 : errno;
  switch (error) {
    // A socket that no process listens on is left over from one that has ended; ListeningSockets::Add
    // replaces it.
    case ECONNREFUSED:
    // There is nothing, or there cannot be: ListeningSockets::Add says what is wrong with the path.
    case ENOENT:
    case ENOTDIR:
      return absl::OkStatus();
    case 0:
    case EAGAIN:  // So many connections wait for that process that it takes no more for now.
      return absl::UnavailableError(
          absl::StrCat("cannot listen on ", address.text,
                       ": another process listens there; stop it or choose another"));
    case EACCES:
      // In a folder that this user may not even enter nothing can be replaced: ListeningSockets::Add says
      // what is wrong.
      if (faccessat(AT_FDCWD, address.folder().c_str(), X_OK, AT_EACCESS) != 0) {
        return absl::OkStatus();
      }
      [[fallthrough]];
    default:  // Such as EACCES: the socket of another user, whose process may live.
      return absl::UnavailableError(
          absl::StrCat("cannot listen on ", address.text,
                       ": cannot tell whether another process listens there (",
                       std::strerror(error), "); stop it and remove that file, or choose another"));
  }
}

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

}  // namespace ballast::server
