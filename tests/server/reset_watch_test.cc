#include "server/reset_watch.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace ballast::server {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

constexpr char kPeer[] = "ipv4:10.0.0.1:50051";

class ResetWatchTest : public testing::Test {
 protected:
  void GiveUp(const std::string& peer, int64_t calls) {
    for (int64_t i = 0; i < calls; ++i) watch_.GivenUp(peer, now_);
  }

  ResetWatch::Clock::time_point now_ = ResetWatch::Clock::now();
  std::vector<std::string> closed_;
  std::vector<std::string> warnings_;
  ResetWatch watch_{[this](const std::string& peer) { closed_.push_back(peer); },
                    [this](const std::string& line) { warnings_.push_back(line); }};
};

TEST_F(ResetWatchTest, ClosesTheConnectionThatGivesUpTooManyCallsAndSaysSo) {
  GiveUp(kPeer, ResetWatch::kMost - 1);
  GiveUp("ipv4:10.0.0.1:50052", ResetWatch::kMost - 1);  // The same client's other connection.
  EXPECT_THAT(closed_, IsEmpty());
  GiveUp(kPeer, 100);
  EXPECT_THAT(closed_, ElementsAre(kPeer));
  ASSERT_THAT(warnings_, SizeIs(1));
  EXPECT_THAT(warnings_[0], AllOf(HasSubstr("closed 1 connections"), HasSubstr(kPeer)));
}

TEST_F(ResetWatchTest, HoldsOthersOfTheHostForAWhile) {
  GiveUp(kPeer, ResetWatch::kMost - 1);
  EXPECT_LE(watch_.HeldUntil("ipv4:10.0.0.1"), now_);
  GiveUp(kPeer, 100);
  EXPECT_EQ(watch_.HeldUntil("ipv4:10.0.0.1"), now_ + ResetWatch::kHold);
  EXPECT_LE(watch_.HeldUntil("ipv4:10.0.0.2"), now_);
  for (int i = 0; i < 5; ++i) GiveUp("ipv4:10.0.0.1:" + std::to_string(i), ResetWatch::kMost);
  EXPECT_EQ(watch_.HeldUntil("ipv4:10.0.0.1"), now_ + ResetWatch::kLongestHold);
  now_ += ResetWatch::kWithin;
  GiveUp(kPeer, ResetWatch::kMost);
  EXPECT_EQ(watch_.HeldUntil("ipv4:10.0.0.1"), now_ + ResetWatch::kHold);
}

TEST_F(ResetWatchTest, AsManyCallsInMoreTimeAreHonest) {
  for (int i = 0; i < 50; ++i) {
    GiveUp(kPeer, ResetWatch::kMost / 2 - 1);
    now_ += ResetWatch::kWithin / 2 + std::chrono::seconds(1);
  }
  EXPECT_THAT(closed_, IsEmpty());
}

TEST_F(ResetWatchTest, WarnsOfManyInALineNowAndThen) {
  for (int i = 0; i < 5; ++i) GiveUp("ipv6:%5B::1%5D:" + std::to_string(i), ResetWatch::kMost);
  EXPECT_THAT(closed_, SizeIs(5));
  EXPECT_THAT(warnings_, SizeIs(1));
  now_ += RareWarning::kEvery;
  GiveUp(kPeer, ResetWatch::kMost);
  ASSERT_THAT(warnings_, SizeIs(2));
  EXPECT_THAT(warnings_[1], HasSubstr("closed 5 connections"));
}

TEST_F(ResetWatchTest, ConnectionsWithoutANameOfTheirOwnAreLeftAlone) {
  for (const char* peer : {"unix:", "inproc", "unknown", ""}) GiveUp(peer, 2 * ResetWatch::kMost);
  EXPECT_THAT(closed_, IsEmpty());
}

}  // namespace
}  // namespace ballast::server
