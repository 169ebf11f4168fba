#include "server/address.h"

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <filesystem>
#include <string>

#include "cpu_optimizer_service/common/system/file_descriptor.h"
#include "tests/support/messages.h"

namespace ballast::server {
namespace {

TEST(Address, IsTakenApart) {
  EXPECT_EQ(ParseAddress("127.0.0.1:70")->host, "127.0.0.1");
  EXPECT_EQ(ParseAddress("127.0.0.1:70")->port, 70);
  EXPECT_EQ(ParseAddress("[::1]:0")->host, "::1");
  EXPECT_EQ(ParseAddress("unix:/run/x")->unix_path, "/run/x");
  EXPECT_EQ(ParseAddress("unix:///run/x")->unix_path, "///run/x");
}

TEST(Address, OfAnotherFormIsInvalid) {
  for (const std::string text :
       {"", "localhost", ":70", "localhost:", "localhost:x", "localhost:70000", "localhost:-1",
        "::1:70", "unix:", "unix:relative", "ipv4:127.0.0.1:x"}) {
    EXPECT_EQ(ParseAddress(text).status().code(), absl::StatusCode::kInvalidArgument) << text;
  }
  EXPECT_EQ(ParseAddress("unix:/" + std::string(200, 'x')).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST(Address, IsLocalIfOnlyThisHostReachesIt) {
  for (const char* local : {"localhost:1", "127.0.0.1:1", "127.3.2.1:1", "[::1]:1", "unix:/x"}) {
    EXPECT_TRUE(IsLocal(ParseAddress(local).value())) << local;
  }
  for (const char* remote :
       {"0.0.0.0:1", "[::]:1", "10.0.0.1:1", "128.0.0.1:1", "example.com:1", "127.example.com:1"}) {
    EXPECT_FALSE(IsLocal(ParseAddress(remote).value())) << remote;
  }
}

TEST(Address, IsAdvertisedIfOthersCanConnectToIt) {
  for (const char* good : {"gpu1:7070", "10.0.0.1:1", "[fd00::1]:7070", "127.0.0.1:7070"}) {
    EXPECT_TRUE(CheckAdvertised(good).ok()) << good;
  }
  for (const char* bad : {"gpu1", "gpu1:0", "0.0.0.0:1", "[::]:1", "fd00::1:7070", "unix:/x"}) {
    EXPECT_EQ(CheckAdvertised(bad).code(), absl::StatusCode::kInvalidArgument) << bad;
  }
}

TEST(Address, OfListenersIsTheOneThatOtherHostsReach) {
  EXPECT_EQ(AdvertisedOf({"unix:/x", "127.0.0.1:1", "gpu1:2", "gpu1:3"}), "gpu1:2");
  EXPECT_EQ(AdvertisedOf({"127.0.0.1:1", "0.0.0.0:2"}), "0.0.0.0:2");
  EXPECT_EQ(AdvertisedOf({"unix:/x", "[::1]:1"}), "[::1]:1");
  EXPECT_EQ(AdvertisedOf({"unix:/x"}), "");
}

class UnixSocketTest : public testing::Test {
 protected:
  ~UnixSocketTest() override { std::filesystem::remove(path_); }

  FileDescriptor Bind(int type = SOCK_STREAM) const {
    FileDescriptor bound(socket(AF_UNIX, type | SOCK_CLOEXEC, 0));
    sockaddr_un name = {};
    name.sun_family = AF_UNIX;
    path_.copy(name.sun_path, sizeof(name.sun_path) - 1);
    EXPECT_EQ(bind(bound.number(), reinterpret_cast<sockaddr*>(&name), sizeof(name)), 0);
    return bound;
  }
  absl::Status WhyNotFree() const {
    return CheckUnixSocketIsFree(ParseAddress("unix:" + path_).value());
  }

  // Not in TempDir(), which may be deep: the path of a socket has at most 107 characters.
  const std::string path_ = "/tmp/ballast_address." + std::to_string(getpid());
};

TEST_F(UnixSocketTest, IsFreeIfThereIsNoneOrItsProcessHasEnded) {
  EXPECT_TRUE(WhyNotFree().ok());
  { const FileDescriptor ended = Bind(); }
  EXPECT_TRUE(WhyNotFree().ok());
  EXPECT_TRUE(CheckUnixSocketIsFree(ParseAddress("unix:" + path_ + "/below").value()).ok());
}

TEST_F(UnixSocketTest, IsNotFreeIfNobodyCanTell) {
  const FileDescriptor other_kind = Bind(SOCK_DGRAM);
  EXPECT_TRUE(Refused(WhyNotFree(), absl::StatusCode::kUnavailable));
}

TEST_F(UnixSocketTest, OfAnotherUserIsNotFree) {
  const FileDescriptor theirs = Bind();
  ASSERT_EQ(listen(theirs.number(), 1), 0);
  ASSERT_EQ(chmod(path_.c_str(), 0), 0);
  const bool is_root = geteuid() == 0;
  constexpr uid_t kNobody = 65534;
  if (is_root && seteuid(kNobody) != 0) GTEST_SKIP() << "root cannot be another user here";
  const absl::Status why = WhyNotFree();
  if (is_root) {
    ASSERT_EQ(seteuid(0), 0);
  }
  EXPECT_TRUE(Refused(why, absl::StatusCode::kUnavailable));
}

TEST_F(UnixSocketTest, IsNotFreeWhereConnectionsQueueThatNobodyAccepts) {
  const FileDescriptor listening = Bind();
  ASSERT_EQ(listen(listening.number(), 0), 0);
  // The first connects and fills the queue; the next one may not wait.
  for (int i = 0; i < 3; ++i) {
    EXPECT_TRUE(Refused(WhyNotFree(), absl::StatusCode::kUnavailable));
  }
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

}  // namespace
}  // namespace ballast::server
