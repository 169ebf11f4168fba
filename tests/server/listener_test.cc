#include "server/listener.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <gmock/gmock.h>
#include <poll.h>
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

namespace ballast::server {
namespace {

using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr char kPreface[] = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

// Says what a client of HTTP/2 says first.
FileDescriptor Connect(const std::string& address, const std::string& words = kPreface) {
  FileDescriptor socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in name = {};
  name.sin_family = AF_INET;
  name.sin_port = htons(static_cast<uint16_t>(std::stoi(address.substr(address.rfind(':') + 1))));
  name.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  EXPECT_EQ(connect(socket.number(), reinterpret_cast<sockaddr*>(&name), sizeof(name)), 0);
  EXPECT_EQ(send(socket.number(), words.data(), words.size(), 0),
            static_cast<ssize_t>(words.size()));
  return socket;
}

// Whether the other end closes it, within a time in which nothing else would.
bool IsRefused(const FileDescriptor& socket) {
  pollfd polled = {.fd = socket.number(), .events = POLLIN, .revents = 0};
  if (poll(&polled, 1, 120'000) != 1) return false;
  char byte = 0;
  return recv(socket.number(), &byte, 1, 0) <= 0;
}

// Gets the connections, and keeps them.
class ListenerTest : public testing::Test {
 protected:
  void Start(ListenerOptions options = {}) {
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
                        },
                        std::move(options))
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

TEST_F(ListenerTest, OfAFloodThatSaysTooLittleOrHasGoneNothingIsHandedOnAndWhoSpeaksIs) {
  Start();
  std::vector<FileDescriptor> flood;
  for (int i = 0; i < 100; ++i) {
    flood.push_back(Connect(address_, ""));
    flood.push_back(Connect(address_, "PRI"));
    Connect(address_, "PRI");  // And goes.
  }
  const FileDescriptor honest = Connect(address_);
  AwaitConnections(1);
  const FileDescriptor late = Connect(address_, "PR");
  EXPECT_EQ(send(late.number(), kPreface + 2, sizeof(kPreface) - 3, 0),
            static_cast<ssize_t>(sizeof(kPreface) - 3));
  AwaitConnections(2);
  const std::lock_guard lock(mutex_);
  EXPECT_EQ(connections_.size(), 2U);
  // It has read nothing of what they said.
  std::string said(sizeof(kPreface), 'x');
  EXPECT_EQ(recv(connections_[0].number(), said.data(), said.size(), 0),
            static_cast<ssize_t>(sizeof(kPreface) - 1));
}

TEST_F(ListenerTest, KeepsSoManyThatSayNothing) {
  Start({.most_newcomers = 3});
  std::vector<FileDescriptor> silent;
  for (int i = 0; i < 5; ++i) silent.push_back(Connect(address_, ""));
  EXPECT_TRUE(IsRefused(silent[0]));
  EXPECT_TRUE(IsRefused(silent[1]));
  const FileDescriptor honest = Connect(address_);
  AwaitConnections(1);
  char byte = 0;
  EXPECT_EQ(recv(silent[4].number(), &byte, 1, MSG_DONTWAIT), -1);
}

TEST(SourceOf, IsTheHostAndOfIpv6TheNetwork) {
  EXPECT_EQ(SourceOf("ipv4:10.0.0.1:50051"), "ipv4:10.0.0.1");
  EXPECT_EQ(SourceOf("ipv6:%5B2001:db8:1:2:3:4:5:6%5D:50051"), "ipv6:2001:db8:1:2::");
  EXPECT_EQ(SourceOf("ipv6:%5B2001:db8:1:2::1%5D:1"), "ipv6:2001:db8:1:2::");
  EXPECT_EQ(SourceOf("ipv6:%5Bfe80::1%254%5D:50051"), "ipv6:fe80::");
  for (const char* none : {"", "unix:", "inproc", "ipv6:%5B%5D:1", "ipv6:%5B%254%5D:1"})
    EXPECT_EQ(SourceOf(none), "");
}

TEST(PeerAt, IsAsGrpcNamesIt) {
  sockaddr_storage name = {};
  EXPECT_EQ(PeerAt(name), "");
  auto& six = reinterpret_cast<sockaddr_in6&>(name);
  six.sin6_family = AF_INET6;
  six.sin6_port = htons(50051);
  ASSERT_EQ(inet_pton(AF_INET6, "fe80::1", &six.sin6_addr), 1);
  EXPECT_EQ(PeerAt(name), "ipv6:%5Bfe80::1%5D:50051");
  six.sin6_scope_id = 4;
  EXPECT_EQ(PeerAt(name), "ipv6:%5Bfe80::1%254%5D:50051");
  ASSERT_EQ(inet_pton(AF_INET6, "::ffff:10.0.0.1", &six.sin6_addr), 1);
  EXPECT_EQ(PeerAt(name), "ipv4:10.0.0.1:50051");
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

TEST(Listener, SaysWhichAddressOfANameItDoesNotListenOn) {
  Listener first;
  const std::string taken = first.Add(ParseAddress("127.0.0.1:0").value()).value();
  const std::string name = "localhost" + taken.substr(taken.rfind(':'));
  std::vector<std::string> warnings;
  Listener second;
  const absl::StatusOr<std::string> added =
      second.Add(ParseAddress(name).value(), nullptr,
                 [&](const std::string& line) { warnings.push_back(line); });
  if (!added.ok()) {
    EXPECT_THAT(warnings, testing::IsEmpty());  // The error says it.
    GTEST_SKIP() << "this host has no second address of the name localhost: " << added.status();
  }
  EXPECT_EQ(*added, name);
  EXPECT_THAT(warnings,
              testing::ElementsAre("cannot listen on " + name +
                                   ": it is taken; stop the other process or choose another (at "
                                   "127.0.0.1, one of several addresses of that name; another one "
                                   "is listened on)"));
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
std::string WhyNot(const std::string& address) {
  Listener listener;
  const absl::Status status = listener.Add(ParseAddress(address).value()).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
  return std::string(status.message());
}

TEST(Listener, SaysWhyAnAddressCannotBeListenedOn) {
  Listener first;
  const std::string taken = first.Add(ParseAddress("127.0.0.1:0").value()).value();
  EXPECT_EQ(WhyNot(taken), "cannot listen on " + taken +
                               ": it is taken; stop the other process or choose another");
  // Of a network for documentation.
  EXPECT_THAT(WhyNot("203.0.113.1:7070"), HasSubstr("it is not an address of this host"));
  EXPECT_THAT(WhyNot("unix:/no/such/folder/socket"),
              HasSubstr("there is no directory /no/such/folder; make it or choose another"));
  const std::string file = testing::TempDir() + "ballast_listener_" + std::to_string(getpid());
  std::ofstream(file).put('x');
  EXPECT_THAT(WhyNot("unix:" + file + "/socket"), HasSubstr("there is no directory " + file));
  std::filesystem::remove(file);
  // Even root may not make a file there.
  EXPECT_THAT(WhyNot("unix:/proc/self/socket"),
              AnyOf(HasSubstr("this user may not write to /proc/self"),
                    HasSubstr("there is no directory /proc/self")));
  const FewDescriptors none(3);
  EXPECT_THAT(WhyNot("127.0.0.1:0"), HasSubstr("no file descriptors are left"));
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
