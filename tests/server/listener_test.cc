#include "server/listener.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <gmock/gmock.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <latch>
#include <mutex>
#include <string>
#include <vector>

#include "absl/strings/str_replace.h"
#include "tests/support/messages.h"

namespace ballast::server {
namespace {

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

// Gets the connections, and keeps them.
class ListenerTest : public testing::Test {
 protected:
  void Start() {
    ListeningSockets sockets;
    address_ = sockets.Add(ParseAddress("127.0.0.1:0").value()).value();
    ASSERT_TRUE(listener_
                    .Start(
                        std::move(sockets),
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
  size_t Warnings() {
    const std::lock_guard lock(mutex_);
    return warnings_.size();
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
  ListeningSockets second;
  for (const std::string& bad : {address_, std::string("no.such.host.invalid:1")}) {
    const absl::Status status = second.Add(ParseAddress(bad).value()).status();
    EXPECT_TRUE(Refused(status, absl::StatusCode::kUnavailable));
  }
}

TEST(ListeningSockets, SaysWhichAddressOfANameItDoesNotListenOn) {
  ListeningSockets first;
  const std::string taken = first.Add(ParseAddress("127.0.0.1:0").value()).value();
  const std::string name = "localhost" + taken.substr(taken.rfind(':'));
  std::vector<std::string> warnings;
  ListeningSockets second;
  const absl::StatusOr<std::string> added =
      second.Add(ParseAddress(name).value(), nullptr,
                 [&](const std::string& line) { warnings.push_back(line); });
  if (!added.ok()) {
    EXPECT_THAT(warnings, testing::IsEmpty());  // The error says it.
    GTEST_SKIP() << "this host has no second address of the name localhost: " << added.status();
  }
  EXPECT_EQ(*added, name);
  ASSERT_EQ(warnings.size(), 1);
  EXPECT_TRUE(Says(absl::StrReplaceAll(warnings[0], {{name, "localhost:PORT"}})));
}

TEST(ListeningSockets, NamesTheDirectoryThatIsNotThere) {
  EXPECT_TRUE(
      Refused(ListeningSockets().Add(ParseAddress("unix:/nonexistent/in/socket").value()).status(),
              absl::StatusCode::kUnavailable));
}

TEST(ListeningSockets, RemovesTheFileOfItsUnixSocket) {
  const std::string path = testing::TempDir() + "ballast_l_" + std::to_string(getpid());
  {
    ListeningSockets sockets;
    EXPECT_EQ(sockets.Add(ParseAddress("unix:" + path).value()).value(), "unix:" + path);
    EXPECT_TRUE(std::filesystem::is_socket(path));
  }
  EXPECT_FALSE(std::filesystem::exists(path));
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

TEST(RaiseDescriptorLimit, RaisesItAsFarAsTheSystemLets) {
  const FewDescriptors few(64);
  rlimit limit = {};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &limit), 0);
  ASSERT_EQ(limit.rlim_cur, 64);
  const rlim_t most = std::min<rlim_t>(limit.rlim_max, rlim_t{1} << 20);
  EXPECT_EQ(RaiseDescriptorLimit(), static_cast<int64_t>(most));
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &limit), 0);
  EXPECT_EQ(limit.rlim_cur, most);
}

// What is said of an address that cannot be listened on.
absl::Status WhyNot(const std::string& address) {
  return ListeningSockets().Add(ParseAddress(address).value()).status();
}

TEST(ListeningSockets, SaysWhyAnAddressCannotBeListenedOn) {
  ListeningSockets first;
  const std::string taken = first.Add(ParseAddress("127.0.0.1:0").value()).value();
  EXPECT_TRUE(Refused(WhyNot(taken), absl::StatusCode::kUnavailable));
  // Of a network for documentation.
  EXPECT_TRUE(Refused(WhyNot("203.0.113.1:7070"), absl::StatusCode::kUnavailable));
  EXPECT_TRUE(Refused(WhyNot("unix:/no/such/folder/socket"), absl::StatusCode::kUnavailable));
  const std::string file = testing::TempDir() + "ballast_listener_" + std::to_string(getpid());
  std::ofstream(file).put('x');
  EXPECT_TRUE(Refused(WhyNot("unix:" + file + "/socket"), absl::StatusCode::kUnavailable));
  std::filesystem::remove(file);
  // Even root may not make a file there.
  EXPECT_EQ(WhyNot("unix:/proc/self/socket").code(), absl::StatusCode::kUnavailable);
  const FewDescriptors none(3);
  EXPECT_TRUE(Refused(WhyNot("127.0.0.1:0"), absl::StatusCode::kUnavailable));
}

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
    }
    // The listener has tried to take one.
    while (Warnings() == 0) std::this_thread::yield();
    EXPECT_EQ(Connections(), 1);
    held.clear();
  }
  const FileDescriptor after = Connect(address_);
  AwaitConnections(5);  // Those that waited, too.
  const std::lock_guard lock(mutex_);
  ASSERT_FALSE(warnings_.empty());
  EXPECT_THAT(warnings_[0], testing::HasSubstr("ulimit -n"));
}

}  // namespace
}  // namespace ballast::server
