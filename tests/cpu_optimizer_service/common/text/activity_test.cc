#include "cpu_optimizer_service/common/text/activity.h"

#include <gtest/gtest.h>

#include <thread>
#include <vector>

namespace ballast {
namespace {

TEST(Activity, LineSaysWhatHowFarAndHowLongStill) {
  Activity activity = {.kind = ActivityKind::kMakingSecondVersions,
                       .done_bytes = int64_t{3} << 30,
                       .total_bytes = int64_t{5} << 30,
                       .seconds = 6};
  EXPECT_EQ(ToLine(activity),
            "making memory for second versions: 3 of 5 GiB, 512.00 MiB/s, 4s left");
  // What stands still says that, and no reason.
  activity.seconds_since_progress = 61;
  EXPECT_EQ(ToLine(activity),
            "making memory for second versions: 3 of 5 GiB, and nothing more for 61 s");
  EXPECT_EQ(ToLine({.kind = ActivityKind::kVerifyingCheckpoint, .directory = "/c/gpt"}),
            "verifying a checkpoint in /c/gpt: 0 B");
}

TEST(Activity, IsListedWhileItsProgressLivesOldestFirst) {
  Activities activities;
  auto first = activities.Begin({.job = "a", .total_bytes = 10});
  const auto second =
      activities.Begin({.kind = ActivityKind::kWritingCheckpoint, .directory = "/c"});
  first->Count(4);
  second->Expect(7);
  const std::vector<Activity> both = activities.List();
  ASSERT_EQ(both.size(), 2u);
  EXPECT_EQ(both[0].job, "a");
  EXPECT_EQ(both[0].done_bytes, 4);
  EXPECT_EQ(both[0].total_bytes, 10);
  EXPECT_EQ(both[1].directory, "/c");
  EXPECT_EQ(both[1].total_bytes, 7);
  EXPECT_NE(both[0].number, both[1].number);
  first = nullptr;
  ASSERT_EQ(activities.List().size(), 1u);
  EXPECT_EQ(activities.List()[0].number, both[1].number);
}

TEST(Activity, CountsOnTheThreadThatIsTold) {
  Progress outer;
  Progress inner;
  const CountsIn counts(outer);
  Progress::OfThisThread().Count(1);
  {
    const CountsIn deeper(inner);
    Progress::OfThisThread().Count(10);
    // It has been told nothing.
    std::thread([] { Progress::OfThisThread().Count(100); }).join();
  }
  Progress::OfThisThread().Count(1);
  EXPECT_EQ(outer.done_bytes(), 2);
  EXPECT_EQ(inner.done_bytes(), 10);
}

}  // namespace
}  // namespace ballast
