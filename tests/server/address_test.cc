#include "server/address.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <filesystem>
#include <string>

#include "cpu_optimizer_service/common/system/file_descriptor.h"

namespace ballast::server {
namespace {

using ::testing::HasSubstr;

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
  std::string WhyNotFree() const {
    const absl::Status status = CheckUnixSocketIsFree(ParseAddress("unix:" + path_).value());
    EXPECT_TRUE(status.ok() || absl::IsUnavailable(status)) << status;
    return std::string(status.message());
  }

  // Not in TempDir(), which may be deep: the path of a socket has at most 107 characters.
  const std::string path_ = "/tmp/ballast_address." + std::to_string(getpid());
};

TEST_F(UnixSocketTest, IsFreeIfThereIsNoneOrItsProcessHasEnded) {
  EXPECT_EQ(WhyNotFree(), "");
  { const FileDescriptor ended = Bind(); }
  EXPECT_EQ(WhyNotFree(), "");
  EXPECT_TRUE(CheckUnixSocketIsFree(ParseAddress("unix:" + path_ + "/below").value()).ok());
}

TEST_F(UnixSocketTest, IsNotFreeIfNobodyCanTell) {
  const FileDescriptor other_kind = Bind(SOCK_DGRAM);
  EXPECT_THAT(WhyNotFree(), HasSubstr("whether another process does cannot be told (Protocol"));
}

TEST_F(UnixSocketTest, OfAnotherUserIsNotFree) {
  const FileDescriptor theirs = Bind();
  ASSERT_EQ(listen(theirs.number(), 1), 0);
  ASSERT_EQ(chmod(path_.c_str(), 0), 0);
  const bool is_root = geteuid() == 0;
  constexpr uid_t kNobody = 65534;
  if (is_root && seteuid(kNobody) != 0) GTEST_SKIP() << "root cannot be another user here";
  const std::string why = WhyNotFree();
  if (is_root) {
    ASSERT_EQ(seteuid(0), 0);
  }
  EXPECT_EQ(why, "cannot listen on unix:" + path_ +
                     ": whether another process does cannot be told (Permission denied); stop it "
                     "and remove that file, or choose another");
}

TEST_F(UnixSocketTest, IsNotFreeWhereConnectionsQueueThatNobodyAccepts) {
  const FileDescriptor listening = Bind();
  ASSERT_EQ(listen(listening.number(), 0), 0);
  // The first connects and fills the queue; the next one may not wait.
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(WhyNotFree(), "cannot listen on unix:" + path_ +
                                ": another process does; stop it or choose another");
  }
}

}  // namespace
}  // namespace ballast::server
