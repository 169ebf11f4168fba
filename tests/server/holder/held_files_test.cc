#include "server/holder/held_files.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdlib>
#include <memory>
#include <string>

#include "absl/strings/str_cat.h"
#include "server/holder/holder_table.h"
#include "tests/support/messages.h"

namespace ballast::server {
namespace {

// A child's end, and the other one, which is the test's.
class HeldFilesTest : public testing::Test {
 protected:
  void SetUp() override {
    int ends[2] = {};
    ASSERT_EQ(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, ends), 0);
    holder_ = FileDescriptor(ends[0]);
    held_ = OfTable(ends[1], kHolderProtocol).value();
    ASSERT_NE(held_, nullptr);
  }
  static absl::StatusOr<std::unique_ptr<HeldFiles>> OfTable(int socket, uint32_t protocol) {
    FileDescriptor table(memfd_create("table", 0));
    EXPECT_EQ(ftruncate(table.number(), sizeof(HolderTable)), 0);
    EXPECT_EQ(pwrite(table.number(), &protocol, sizeof(protocol), 0),
              static_cast<ssize_t>(sizeof(protocol)));
    setenv(kHolderVariable, absl::StrCat(socket, ",", table.Release()).c_str(), 1);
    return HeldFiles::OfHolder();
  }
  absl::Status Keep(const std::string& name) {
    const absl::Status kept = held_->Keep(name, file_.number());
    if (kept.ok()) EXPECT_EQ(Told().kind, HolderMessage::Kind::kKeep);
    return kept;
  }
  HolderMessage Told() {
    HolderMessage message = {};
    EXPECT_EQ(recv(holder_.number(), &message, sizeof(message), 0),
              static_cast<ssize_t>(sizeof(message)));
    return message;
  }

  FileDescriptor holder_;
  const FileDescriptor file_{open("/dev/null", O_RDONLY | O_CLOEXEC)};
  std::unique_ptr<HeldFiles> held_;
};

TEST_F(HeldFilesTest, AreCountedAsTheHolderCountsThem) {
  for (int i = 0; i < kMostHeld; ++i) ASSERT_TRUE(Keep(absl::StrCat("memory ", i)).ok());
  // Memory that failed before it was kept is given up by its name, too.
  for (int i = 0; i < 3; ++i) held_->Drop(absl::StrCat("never kept ", i));
  const absl::Status refused = Keep("one more");
  EXPECT_TRUE(Refused(refused, absl::StatusCode::kResourceExhausted));
  held_->Drop("memory 7");
  const HolderMessage dropped = Told();  // Of the others it is told nothing.
  EXPECT_EQ(dropped.kind, HolderMessage::Kind::kDrop);
  EXPECT_STREQ(dropped.name, "memory 7");
  EXPECT_TRUE(Keep("one more").ok());
  EXPECT_FALSE(Keep("and another").ok());
}

TEST_F(HeldFilesTest, OfATableOfAnUnknownFormatAreRefused) {
  for (const uint32_t protocol : {uint32_t{0}, kHolderProtocol + 1}) {
    const absl::Status refused = OfTable(holder_.number(), protocol).status();
    EXPECT_TRUE(Refused(refused, absl::StatusCode::kFailedPrecondition));
  }
}

}  // namespace
}  // namespace ballast::server
