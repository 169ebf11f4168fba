// The other end of the shared memory's side socket, by plain system calls, so that a test can send
// anything there. Safe in a forked child.
#ifndef BALLAST_TESTS_SERVER_SHARED_MEMORY_SHARED_MEMORY_PEER_H_
#define BALLAST_TESTS_SERVER_SHARED_MEMORY_SHARED_MEMORY_PEER_H_

#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstring>
#include <optional>
#include <string>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace ballast::server {

class SharedMemoryPeer {
 public:
  static constexpr int kPatienceMs = 30'000;

  // Connects; ok() returns whether that succeeded.
  explicit SharedMemoryPeer(absl::string_view name)
      : socket_(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0)) {
    sockaddr_un address = {};
    address.sun_family = AF_UNIX;
    std::memcpy(address.sun_path + 1, name.data(), name.size());
    const auto size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
    ok_ = connect(socket_, reinterpret_cast<const sockaddr*>(&address), size) == 0;
  }
  SharedMemoryPeer(const SharedMemoryPeer&) = delete;
  SharedMemoryPeer& operator=(const SharedMemoryPeer&) = delete;
  ~SharedMemoryPeer() {
    Unmap();
    Close();
  }

  bool ok() const { return ok_; }
  void Close() {
    if (socket_ >= 0) close(socket_);
    socket_ = -1;
  }

  // Sends one message, with `descriptors`.
  bool Say(absl::string_view bytes, absl::Span<const int> descriptors = {}) {
    iovec place = {.iov_base = const_cast<char*>(bytes.data()), .iov_len = bytes.size()};
    alignas(cmsghdr) char control[CMSG_SPACE(16 * sizeof(int))] = {};
    msghdr message = {};
    message.msg_iov = &place;
    message.msg_iovlen = 1;
    if (!descriptors.empty()) {
      message.msg_control = control;
      message.msg_controllen = CMSG_SPACE(descriptors.size() * sizeof(int));
      cmsghdr* header = CMSG_FIRSTHDR(&message);
      header->cmsg_level = SOL_SOCKET;
      header->cmsg_type = SCM_RIGHTS;
      header->cmsg_len = CMSG_LEN(descriptors.size() * sizeof(int));
      std::memcpy(CMSG_DATA(header), descriptors.data(), descriptors.size() * sizeof(int));
    }
    return sendmsg(socket_, &message, MSG_NOSIGNAL) == static_cast<ssize_t>(bytes.size());
  }

  // The next message; empty: the connection has ended. Nothing if none of that happens in time. A
  // descriptor that arrives with it is kept.
  std::optional<std::string> Reply() {
    pollfd wait = {.fd = socket_, .events = POLLIN, .revents = 0};
    if (poll(&wait, 1, kPatienceMs) != 1) return std::nullopt;
    char bytes[4096];
    iovec place = {.iov_base = bytes, .iov_len = sizeof(bytes)};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
    msghdr message = {};
    message.msg_iov = &place;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof(control);
    const ssize_t size = recvmsg(socket_, &message, MSG_CMSG_CLOEXEC);
    if (size < 0) return errno == ECONNRESET ? Reply() : "";  // Unread bytes arrive first.
    const cmsghdr* header = CMSG_FIRSTHDR(&message);
    if (header != nullptr && header->cmsg_type == SCM_RIGHTS) {
      std::memcpy(&memory_file_, CMSG_DATA(header), sizeof(int));
    }
    return std::string(bytes, static_cast<size_t>(size));
  }

  int memory_file() const { return memory_file_; }  // -1: none has arrived.
  int64_t memory_bytes() const {
    struct stat file = {};
    return fstat(memory_file_, &file) == 0 ? file.st_size : -1;
  }
  // The memory, mapped by the first call.
  absl::Span<std::byte> memory() {
    if (mapping_.data() == nullptr && memory_file_ >= 0) {
      const auto bytes = static_cast<size_t>(memory_bytes());
      void* mapping = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, memory_file_, 0);
      if (mapping != MAP_FAILED) mapping_ = {static_cast<std::byte*>(mapping), bytes};
    }
    return mapping_;
  }

 private:
  void Unmap() {
    if (mapping_.data() != nullptr) munmap(mapping_.data(), mapping_.size());
    if (memory_file_ >= 0) close(memory_file_);
  }

  int socket_;
  bool ok_ = false;
  int memory_file_ = -1;
  absl::Span<std::byte> mapping_;
};

}  // namespace ballast::server

#endif  // BALLAST_TESTS_SERVER_SHARED_MEMORY_SHARED_MEMORY_PEER_H_
