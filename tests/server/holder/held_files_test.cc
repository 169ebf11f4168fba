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

namespace ballast::server {
namespace {

using testing::HasSubstr;

// A child's end, and the other one, which is the test's.
class HeldFilesTest : public testing::Test {
 protected:
  void SetUp() override {
    int ends[2] = {};
    ASSERT_EQ(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, ends), 0);
    holder_ = FileDescriptor(ends[0]);
    FileDescriptor table(memfd_create("table", 0));
    ASSERT_EQ(ftruncate(table.number(), sizeof(HolderTable)), 0);
    ASSERT_EQ(pwrite(table.number(), &kHolderProtocol, sizeof(kHolderProtocol), 0),
              static_cast<ssize_t>(sizeof(kHolderProtocol)));
    setenv(kHolderVariable, absl::StrCat(ends[1], ",", table.Release()).c_str(), 1);
    held_ = HeldFiles::OfHolder().value();
    ASSERT_NE(held_, nullptr);
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
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(refused.message(), HasSubstr("16384 descriptors, as many as it takes"));
  held_->Drop("memory 7");
  const HolderMessage dropped = Told();  // Of the others it is told nothing.
  EXPECT_EQ(dropped.kind, HolderMessage::Kind::kDrop);
  EXPECT_STREQ(dropped.name, "memory 7");
  EXPECT_TRUE(Keep("one more").ok());
  EXPECT_FALSE(Keep("and another").ok());
}

}  // namespace
}  // namespace ballast::server
