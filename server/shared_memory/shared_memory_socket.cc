#include "server/shared_memory/shared_memory_socket.h"

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "proto/shared_memory_protocol.h"

namespace ballast::server {
namespace {

constexpr int kBacklog = 128;

// Returns the address's size, or 0 if the name does not fit.
socklen_t MakeAbstractAddress(const std::string& name, sockaddr_un& address) {
  address = {};
  address.sun_family = AF_UNIX;
  if (name.size() + 1 > sizeof(address.sun_path)) return 0;
  // A zero byte in front makes the name abstract: it has no file, and is gone with its socket. It
  // ends where the size says, not with a zero (unix(7)).
  std::memcpy(address.sun_path + 1, name.data(), name.size());
  return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
}

}  // namespace

absl::StatusOr<FileDescriptor> ListenOnAbstractSocket(const std::string& name) {
  FileDescriptor listener(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  sockaddr_un address;
  const socklen_t size = MakeAbstractAddress(name, address);
  if (!listener || size == 0 ||
      bind(listener.number(), reinterpret_cast<const sockaddr*>(&address), size) != 0 ||
      listen(listener.number(), kBacklog) != 0) {
    return absl::UnavailableError(
        absl::StrCat("cannot listen on the abstract unix socket ", name, ": ",
                     size == 0 ? "the name is too long" : std::strerror(errno)));
  }
  return listener;
}

AcceptResult AcceptPeer(const FileDescriptor& listener, FileDescriptor& peer) {
  FileDescriptor accepted(
      accept4(listener.number(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
  const int error = errno;
  if (accepted) {
    peer = std::move(accepted);
    return AcceptResult::kAccepted;
  }
  const bool no_room = error == EMFILE || error == ENFILE || error == ENOBUFS || error == ENOMEM;
  return no_room ? AcceptResult::kNoRoom : AcceptResult::kNoPeer;
}

int ProcessOf(const FileDescriptor& peer) {
  ucred credentials = {};
  socklen_t size = sizeof(credentials);
  // For the log only: who may have memory is decided by the token.
  if (getsockopt(peer.number(), SOL_SOCKET, SO_PEERCRED, &credentials, &size) != 0) return 0;
  return credentials.pid;
}

Received ReceiveToken(const FileDescriptor& peer, std::string& token) {
  char bytes[proto::kSharedMemoryTokenBytes];
  iovec place = {.iov_base = bytes, .iov_len = sizeof(bytes)};
  msghdr message = {};  // Without room for control data the system drops descriptors that arrive.
  message.msg_iov = &place;
  message.msg_iovlen = 1;
  ssize_t size = 0;
  do {
    size = recvmsg(peer.number(), &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  } while (size < 0 && errno == EINTR);
  if (size < 0)
    return errno == EAGAIN || errno == EWOULDBLOCK ? Received::kNothing : Received::kEnd;
  // More bytes than a token has, or descriptors with it.
  const bool whole = (message.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) == 0;
  if (!whole) return Received::kJunk;
  // An empty message reads the same. No client of the protocol sends one.
  if (size == 0) return Received::kEnd;
  if (size != sizeof(bytes)) return Received::kJunk;
  token.assign(bytes, sizeof(bytes));
  return Received::kToken;
}

bool SendGrant(const FileDescriptor& peer, int memory_file) {
  char granted = proto::kSharedMemoryGranted;
  iovec place = {.iov_base = &granted, .iov_len = sizeof(granted)};
  // Aligned, and of a size that has room for padding, as cmsg(3) asks.
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message = {};
  message.msg_iov = &place;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  cmsghdr* header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof(int));
  std::memcpy(CMSG_DATA(header), &memory_file, sizeof(int));
  ssize_t sent = 0;
  do {
    // Nothing has been sent before, so there is room in the socket.
    sent = sendmsg(peer.number(), &message, MSG_DONTWAIT | MSG_NOSIGNAL);
  } while (sent < 0 && errno == EINTR);
  return sent == sizeof(granted);
}

void SendRefusal(const FileDescriptor& peer, absl::string_view why) {
  std::string refusal(1, proto::kSharedMemoryRefused);
  absl::StrAppend(&refusal,
                  why.substr(0, std::min(why.find('\n'), proto::kMaxSharedMemoryRefusalBytes)));
  // Nothing has been sent before, so it fits into the socket. A peer that has disconnected does not
  // need it.
  send(peer.number(), refusal.data(), refusal.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
}

}  // namespace ballast::server
