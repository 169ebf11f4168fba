#include "server/listener.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <gmock/gmock.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <filesystem>
#include <latch>
#include <mutex>
#include <string>
#include <vector>

namespace ballast::server {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

FileDescriptor Connect(const std::string& address) {
  FileDescriptor socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in name = {};
  name.sin_family = AF_INET;
  name.sin_port = htons(static_cast<uint16_t>(std::stoi(address.substr(address.rfind(':') + 1))));
  name.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  EXPECT_EQ(connect(socket.number(), reinterpret_cast<sockaddr*>(&name), sizeof(name)), 0);
  return socket;
}

// Whether the other end closes it, within a time in which nothing else would.
bool IsRefused(const FileDescriptor& socket) {
  pollfd polled = {.fd = socket.number(), .events = POLLIN, .revents = 0};
  if (poll(&polled, 1, 20'000) != 1) return false;
  char byte = 0;
  return recv(socket.number(), &byte, 1, 0) <= 0;
}

// Gets the connections, and keeps them.
class ListenerTest : public testing::Test {
 protected:
  void Start() {
    address_ = listener_.Add(ParseAddress("127.0.0.1:0").value()).value();
    ASSERT_TRUE(listener_
                    .Start(
                        [this](int connection) {
                          const std::lock_guard lock(mutex_);
                          connections_.emplace_back(connection);
                        },
                        [this](const std::string& line) {
                          const std::lock_guard lock(mutex_);
                          warnings_.push_back(line);
                        })
                    .ok());
  }
  size_t Connections() {
    const std::lock_guard lock(mutex_);
    return connections_.size();
  }
  void AwaitConnections(size_t count) {
    while (Connections() < count) std::this_thread::yield();
  }

  std::mutex mutex_;
  std::vector<FileDescriptor> connections_;
  std::vector<std::string> warnings_;
  std::string address_;
  Listener listener_;
};

TEST_F(ListenerTest, HandsConnectionsOn) {
  Start();
  EXPECT_THAT(address_, Not("127.0.0.1:0"));
  const FileDescriptor client = Connect(address_);
  AwaitConnections(1);
  const std::lock_guard lock(mutex_);
  EXPECT_EQ(send(connections_[0].number(), "x", 1, 0), 1);
}

TEST_F(ListenerTest, RefusesATakenPortAndAnUnknownHost) {
  Start();
  Listener second;
  for (const std::string& bad : {address_, std::string("no.such.host.invalid:1")}) {
    const absl::Status status = second.Add(ParseAddress(bad).value()).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
    EXPECT_THAT(std::string(status.message()), AllOf(HasSubstr(bad), HasSubstr("choose another")));
  }
}

TEST_F(ListenerTest, NamesTheDirectoryThatIsNotThere) {
  EXPECT_THAT(
      std::string(
          listener_.Add(ParseAddress("unix:/nonexistent/in/socket").value()).status().message()),
      HasSubstr("there is no directory /nonexistent/in; make it"));
}

TEST_F(ListenerTest, RemovesTheFileOfItsUnixSocket) {
  const std::string path = testing::TempDir() + "ballast_l_" + std::to_string(getpid());
  {
    Listener listener;
    EXPECT_EQ(listener.Add(ParseAddress("unix:" + path).value()).value(), "unix:" + path);
    EXPECT_TRUE(std::filesystem::is_socket(path));
  }
  EXPECT_FALSE(std::filesystem::exists(path));
}

TEST_F(ListenerTest, AConnectionIsClosedByItsPeersName) {
  Start();
  const FileDescriptor closed = Connect(address_);
  const FileDescriptor kept = Connect(address_);
  AwaitConnections(2);
  sockaddr_in name = {};
  socklen_t bytes = sizeof(name);
  ASSERT_EQ(getsockname(closed.number(), reinterpret_cast<sockaddr*>(&name), &bytes), 0);
  const std::string peer = "ipv4:127.0.0.1:" + std::to_string(ntohs(name.sin_port));
  EXPECT_EQ(CloseConnectionsOf(peer), 1);
  EXPECT_TRUE(IsRefused(closed));
  EXPECT_EQ(CloseConnectionsOf("ipv4:127.0.0.1:1"), 0);
  EXPECT_EQ(CloseConnectionsOf("unix:"), 0);
  EXPECT_EQ(CloseConnectionsOf(""), 0);
  // The other one still carries bytes.
  const std::lock_guard lock(mutex_);
  int carried = 0;
  char byte = 0;
  for (const FileDescriptor& each : connections_) {
    if (send(each.number(), "x", 1, MSG_NOSIGNAL) == 1) ++carried;
  }
  EXPECT_EQ(carried, 1);
  EXPECT_EQ(recv(kept.number(), &byte, 1, 0), 1);
}

// The limit of this process is low for as long as it lives.
class FewDescriptors {
 public:
  explicit FewDescriptors(rlim_t most) {
    getrlimit(RLIMIT_NOFILE, &before_);
    const rlimit few = {.rlim_cur = most, .rlim_max = before_.rlim_max};
    EXPECT_EQ(setrlimit(RLIMIT_NOFILE, &few), 0);
  }
  ~FewDescriptors() { setrlimit(RLIMIT_NOFILE, &before_); }

 private:
  rlimit before_ = {};
};

TEST_F(ListenerTest, AcceptsAgainAfterDescriptorsRanOut) {
  Start();
  std::vector<FileDescriptor> held;
  {
    const FileDescriptor client = Connect(address_);  // Opened before there are none.
    AwaitConnections(1);
    std::vector<FileDescriptor> waiting;
    for (int i = 0; i < 3; ++i) {
      waiting.emplace_back(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    }
    const FewDescriptors few(64);
    while (true) {
      FileDescriptor one(open("/dev/null", O_RDONLY | O_CLOEXEC));
      if (!one) break;
      held.push_back(std::move(one));
    }
    sockaddr_in name = {};
    name.sin_family = AF_INET;
    name.sin_port =
        htons(static_cast<uint16_t>(std::stoi(address_.substr(address_.rfind(':') + 1))));
    name.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    for (const FileDescriptor& each : waiting) {
      ASSERT_EQ(connect(each.number(), reinterpret_cast<sockaddr*>(&name), sizeof(name)), 0);
      EXPECT_TRUE(IsRefused(each));
    }
    held.clear();
  }
  const FileDescriptor after = Connect(address_);
  AwaitConnections(2);
  const std::lock_guard lock(mutex_);
  ASSERT_FALSE(warnings_.empty());
  EXPECT_THAT(warnings_[0], AllOf(HasSubstr("out of file descriptors"), HasSubstr("ulimit -n"),
                                  Not(HasSubstr("\n"))));
}

}  // namespace
}  // namespace ballast::server
