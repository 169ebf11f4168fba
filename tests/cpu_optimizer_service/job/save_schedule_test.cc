#include "cpu_optimizer_service/state/save_schedule.h"

#include <gtest/gtest.h>

namespace ballast {
namespace {

using std::chrono::seconds;

constexpr CheckpointPolicy kEveryTenSteps = {.every_steps = 10};
constexpr CheckpointPolicy kEveryMinute = {.every_seconds = 60};
const SaveSchedule::Time kStart(seconds(1000));

TEST(SaveSchedule, CountsStepsFromTheLastSave) {
  SaveSchedule schedule(kStart);
  EXPECT_FALSE(schedule.IsDue(kEveryTenSteps, 9, kStart));
  EXPECT_TRUE(schedule.IsDue(kEveryTenSteps, 10, kStart));
  schedule.SavedAt(10, kStart);
  EXPECT_FALSE(schedule.IsDue(kEveryTenSteps, 10, kStart));
  EXPECT_FALSE(schedule.IsDue(kEveryTenSteps, 19, kStart));
  EXPECT_TRUE(schedule.IsDue(kEveryTenSteps, 20, kStart));
}

TEST(SaveSchedule, CountsTimeFromTheLastSaveOrTheJobsBegin) {
  SaveSchedule schedule(kStart);
  EXPECT_FALSE(schedule.IsDue(kEveryMinute, 1, kStart + seconds(59)));
  EXPECT_TRUE(schedule.IsDue(kEveryMinute, 1, kStart + seconds(60)));
  schedule.SavedAt(1, kStart + seconds(60));
  EXPECT_FALSE(schedule.IsDue(kEveryMinute, 2, kStart + seconds(119)));
  EXPECT_TRUE(schedule.IsDue(kEveryMinute, 2, kStart + seconds(120)));
  EXPECT_FALSE(schedule.IsDue(kEveryMinute, 1, kStart + seconds(120))) << "it is saved";
}

TEST(SaveSchedule, BeginsWithTheStateThatFirstWeightsBring) {
  SaveSchedule schedule(kStart);
  schedule.BeginAt(25);
  EXPECT_FALSE(schedule.IsDue(kEveryTenSteps, 29, kStart));
  EXPECT_TRUE(schedule.IsDue(kEveryTenSteps, 30, kStart));
}

TEST(SaveSchedule, OfAJobThatWentBackHasTheUndoneStepsSavedAgain) {
  SaveSchedule schedule(kStart);
  schedule.SavedAt(20, kStart);
  schedule.GoBackTo(19);
  EXPECT_TRUE(schedule.IsDue(kEveryTenSteps, 20, kStart));
  schedule.SavedAt(20, kStart);
  schedule.GoBackTo(24);
  EXPECT_FALSE(schedule.IsDue(kEveryTenSteps, 24, kStart));
}

}  // namespace
}  // namespace ballast
