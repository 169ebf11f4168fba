#include "client/default_service.h"

#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstdlib>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/system/file_descriptor.h"

namespace ballast::client {
namespace {

// This host answers itself at once; a service whose queue is full does not.
constexpr int kMostMilliseconds = 200;

bool NothingListens(uint16_t port) {
  const FileDescriptor tcp(::socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  if (connect(tcp.number(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0) {
    return false;
  }
  if (errno != EINPROGRESS) return errno == ECONNREFUSED;
  pollfd connected = {.fd = tcp.number(), .events = POLLOUT, .revents = 0};
  if (poll(&connected, 1, kMostMilliseconds) <= 0) return false;
  int error = 0;
  socklen_t size = sizeof(error);
  return getsockopt(tcp.number(), SOL_SOCKET, SO_ERROR, &error, &size) == 0 &&
         error == ECONNREFUSED;
}

bool IsSocket(const std::string& path) {
  struct stat facts = {};
  return stat(path.c_str(), &facts) == 0 && S_ISSOCK(facts.st_mode);
}

}  // namespace

std::string DefaultService(uint16_t port, const std::string& socket) {
  const char* const said = std::getenv("BALLAST_SERVICE");
  if (said != nullptr && *said != '\0') return said;
  if (IsSocket(socket) && NothingListens(port)) return absl::StrCat("unix:", socket);
  return absl::StrCat("127.0.0.1:", port);
}

std::string NodeServiceAddress() {
  const char* const said = std::getenv("BALLAST_SERVICE");
  if (said != nullptr && absl::StartsWith(said, "unix:")) return said;
  return absl::StrCat("unix:", kPackagedSocket);
}

}  // namespace ballast::client
