// The service's side of shared memory for a test: a listening abstract socket, and any answer to
// the process that sends the token.
#ifndef BALLAST_TESTS_CLIENT_SHARED_MEMORY_SERVER_FOR_TESTS_H_
#define BALLAST_TESTS_CLIENT_SHARED_MEMORY_SERVER_FOR_TESTS_H_

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "ballast/v1/jobs.pb.h"
#include "cpu_optimizer_service/common/check.h"
#include "cpu_optimizer_service/common/rank_memory_layout.h"

namespace ballast::client {

// A memory file like a service's, mapped here too.
class MemoryFile {
 public:
  explicit MemoryFile(RankMemoryLayout places)
      : MemoryFile(places.size_bytes(), F_SEAL_SHRINK | F_SEAL_GROW, std::move(places)) {}
  MemoryFile(int64_t bytes, int seals, RankMemoryLayout places)
      : places_(std::move(places)),
        bytes_(static_cast<size_t>(bytes)),
        file_(memfd_create("ballast-test", MFD_CLOEXEC | MFD_ALLOW_SEALING)) {
    Check(ftruncate(file_, bytes) == 0, "a memory file gets its size");
    Check(fcntl(file_, F_ADD_SEALS, seals) == 0, "a memory file is sealed");
    memory_ = static_cast<std::byte*>(
        mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, file_, 0));
    Check(memory_ != MAP_FAILED, "a memory file is mapped");
  }
  ~MemoryFile() {
    munmap(memory_, bytes_);
    close(file_);
  }
  MemoryFile(const MemoryFile&) = delete;
  MemoryFile& operator=(const MemoryFile&) = delete;

  int file() const { return file_; }
  std::string gradient(int chunk) const {
    const RankMemoryLayout::Place& place = places_.gradient(chunk);
    return {reinterpret_cast<const char*>(memory_ + place.offset_bytes),
            static_cast<size_t>(place.bytes)};
  }
  void WriteWeights(int chunk, const std::string& bytes) {
    Check(static_cast<int64_t>(bytes.size()) == places_.weights(chunk).bytes,
          "weights fill their place");
    std::memcpy(memory_ + places_.weights(chunk).offset_bytes, bytes.data(), bytes.size());
  }

 private:
  const RankMemoryLayout places_;
  const size_t bytes_;
  const int file_;
  std::byte* memory_;
};

// Sends `text` and hands over `files`.
inline void Hand(int connection, const std::string& text, const std::vector<int>& files) {
  alignas(cmsghdr) std::array<char, CMSG_SPACE(16 * sizeof(int))> control{};
  iovec piece = {.iov_base = const_cast<char*>(text.data()), .iov_len = text.size()};
  msghdr message{};
  message.msg_iov = &piece;
  message.msg_iovlen = 1;
  if (!files.empty()) {
    message.msg_control = control.data();
    message.msg_controllen = CMSG_SPACE(files.size() * sizeof(int));
    cmsghdr* rights = CMSG_FIRSTHDR(&message);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(files.size() * sizeof(int));
    std::memcpy(CMSG_DATA(rights), files.data(), files.size() * sizeof(int));
  }
  Check(sendmsg(connection, &message, MSG_NOSIGNAL) == static_cast<ssize_t>(text.size()),
        "the text is sent whole");
}

class SharedMemoryServerForTests {
 public:
  // `answer` is called on the server's thread when the token has arrived; then the connection stays
  // open until the worker hangs up.
  explicit SharedMemoryServerForTests(std::function<void(int connection)> answer)
      : answer_(std::move(answer)) {
    static std::atomic<int> servers = 0;
    offer_.set_socket("ballast-test-" + std::to_string(getpid()) + "-" + std::to_string(servers++));
    offer_.set_token(std::string(32, 't'));
    listener_ = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::memcpy(address.sun_path + 1, offer_.socket().data(), offer_.socket().size());
    const auto size =
        static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + offer_.socket().size());
    Check(bind(listener_, reinterpret_cast<const sockaddr*>(&address), size) == 0,
          "the socket's name is free");
    Check(listen(listener_, 4) == 0, "the socket listens");
    thread_ = std::thread([this] { Run(); });
  }
  ~SharedMemoryServerForTests() {
    shutdown(listener_, SHUT_RDWR);
    thread_.join();
    close(listener_);
  }

  const v1::SharedMemoryOffer& offer() const { return offer_; }
  int hangups() const { return hangups_; }

 private:
  void Run() {
    for (;;) {
      const int connection = accept(listener_, nullptr, nullptr);
      if (connection < 0) return;
      std::array<char, 64> token;
      const ssize_t came = recv(connection, token.data(), token.size(), 0);
      if (came > 0 && std::string(token.data(), static_cast<size_t>(came)) == offer_.token()) {
        answer_(connection);
      }
      char nothing;
      while (recv(connection, &nothing, 1, 0) > 0) {
      }
      close(connection);
      ++hangups_;
    }
  }

  const std::function<void(int connection)> answer_;
  v1::SharedMemoryOffer offer_;
  int listener_ = -1;
  std::atomic<int> hangups_ = 0;
  std::thread thread_;
};

}  // namespace ballast::client

#endif  // BALLAST_TESTS_CLIENT_SHARED_MEMORY_SERVER_FOR_TESTS_H_
