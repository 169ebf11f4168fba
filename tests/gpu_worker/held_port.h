// A port of the loopback that no process listens on and that no other test takes.
#ifndef BALLAST_TESTS_GPU_WORKER_HELD_PORT_H_
#define BALLAST_TESTS_GPU_WORKER_HELD_PORT_H_

#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

namespace ballast::worker {

inline sockaddr_in Loopback(int port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  return address;
}

// A socket that is bound. A process that sets SO_REUSEADDR, as rank 0 does, may listen there.
class HeldPort {
 public:
  HeldPort() {
    const int yes = 1;
    setsockopt(descriptor_, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof(yes));
    sockaddr_in address = Loopback(0);
    EXPECT_EQ(bind(descriptor_, reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
    socklen_t size = sizeof(address);
    getsockname(descriptor_, reinterpret_cast<sockaddr*>(&address), &size);
    port_ = ntohs(address.sin_port);
  }
  ~HeldPort() { close(descriptor_); }
  HeldPort(const HeldPort&) = delete;
  HeldPort& operator=(const HeldPort&) = delete;

  // From now on another process cannot listen there.
  void Listen() const { EXPECT_EQ(listen(descriptor_, 1), 0); }
  int port() const { return port_; }

 private:
  const int descriptor_ = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  int port_ = 0;
};

}  // namespace ballast::worker

#endif  // BALLAST_TESTS_GPU_WORKER_HELD_PORT_H_
