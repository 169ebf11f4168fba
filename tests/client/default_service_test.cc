#include "client/default_service.h"

#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstdlib>
#include <string>

namespace ballast::client {
namespace {

TEST(DefaultService, IsThePackagedOneOnlyWhereNothingListensOnThePort) {
  unsetenv("BALLAST_SERVICE");
  sockaddr_un name = {};
  name.sun_family = AF_UNIX;
  const std::string path = "/tmp/default_service." + std::to_string(getpid());
  path.copy(name.sun_path, sizeof(name.sun_path) - 1);
  const int packaged = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  ASSERT_EQ(bind(packaged, reinterpret_cast<const sockaddr*>(&name), sizeof(name)), 0);
  // A port that this test holds, on which nothing listens yet.
  const int tcp = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  ASSERT_EQ(bind(tcp, reinterpret_cast<const sockaddr*>(&address), size), 0);
  ASSERT_EQ(getsockname(tcp, reinterpret_cast<sockaddr*>(&address), &size), 0);
  const uint16_t port = ntohs(address.sin_port);
  const std::string on_port = "127.0.0.1:" + std::to_string(port);

  EXPECT_EQ(DefaultService(port, path), "unix:" + path);
  EXPECT_EQ(DefaultService(port, "/nowhere"), on_port);
  ASSERT_EQ(listen(tcp, 1), 0);
  EXPECT_EQ(DefaultService(port, path), on_port);
  setenv("BALLAST_SERVICE", "host:1", 1);
  EXPECT_EQ(DefaultService(port, path), "host:1");
  setenv("BALLAST_SERVICE", "", 1);
  EXPECT_EQ(DefaultService(port, path), on_port);
  unsetenv("BALLAST_SERVICE");
  close(tcp);
  close(packaged);
  unlink(path.c_str());
}

}  // namespace
}  // namespace ballast::client
