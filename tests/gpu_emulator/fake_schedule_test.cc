// What fake_device_test.cc cannot see through a device.
#include "tests/gpu_emulator/fake_schedule.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace ballast::worker {
namespace {

using testing::ElementsAre;

TEST(FakeSchedule, DoesNothingThatIsGivenOnceItIsLost) {
  std::string diary;
  FakeSchedule schedule(3, [](bool) {});
  const auto queue = schedule.AddQueue("a");
  schedule.Give(queue, [&] { diary += 'a'; });
  schedule.AwaitAll();
  schedule.Lose();
  // As by a thread that began its call before another lost the device.
  const FakeSchedule::Point late = schedule.Give(queue, [&] { diary += 'b'; });
  EXPECT_FALSE(schedule.Demand(late));
  EXPECT_FALSE(schedule.Await(late));
  schedule.AwaitAll();
  EXPECT_EQ(diary, "a");
}

TEST(FakeSchedule, CallsAroundEachPieceOfWork) {
  std::vector<std::string> seen;
  FakeSchedule schedule(0, [&](bool begins) { seen.push_back(begins ? "begins" : "ends"); });
  const auto queue = schedule.AddQueue("a");
  schedule.Give(queue, [&] { seen.push_back("work"); });
  schedule.GiveWait(queue, schedule.End(queue));  // Has no effect.
  schedule.AwaitAll();
  EXPECT_THAT(seen, ElementsAre("begins", "work", "ends"));
}

TEST(FakeSchedule, DoesWhatAQueueThatWasGivenUpStillHas) {
  std::string diary;
  FakeSchedule schedule(0, [](bool) {});
  schedule.Give(schedule.AddQueue("a"), [&] { diary += 'a'; });
  const auto other = schedule.AddQueue("b");
  schedule.AwaitAll();
  EXPECT_EQ(diary, "a");
}

TEST(FakeSchedule, KnowsWhoStillUsesMemory) {
  std::byte memory[8];
  const absl::Span<const std::byte> host(memory, 8);
  FakeSchedule schedule(0, [](bool) {});
  const auto queue = schedule.AddQueue("copies");
  schedule.Give(
      queue, [] {}, host.subspan(2, 2));
  EXPECT_EQ(schedule.UserOf(host.subspan(0, 3)), "copies");
  EXPECT_EQ(schedule.UserOf(host.subspan(0, 2)), "");
  EXPECT_EQ(schedule.UserOf(host.subspan(4)), "");
  schedule.AwaitAll();
  EXPECT_EQ(schedule.UserOf(host), "");
}

}  // namespace
}  // namespace ballast::worker
