// What ranks and operators set: scales, hyper-parameters and their history, the trainer's state.
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "cpu_optimizer_service/common/reason.h"
#include "cpu_optimizer_service/job/job.h"
#include "tests/cpu_optimizer_service/job/job_driver.h"
#include "tests/support/messages.h"

namespace ballast {
namespace {

using JobSettingsTest = JobDriverTest;

TEST_F(JobSettingsTest, P6EveryGroupIsUpdatedWithItsOwnHyperParametersAndTheyAreRecorded) {
  JobSpec spec = MakeJobSpec({.group_sizes = {{300}, {300}, {300}}});
  spec.groups[1].hyper_parameters = {
      .lr = 0.1, .beta1 = 0.5, .weight_decay = 0, .bias_correction = false};
  spec.groups[2].hyper_parameters = {
      .lr = 0.01, .eps = 1e-4, .decoupled_weight_decay = false, .maximize = true};
  JobDriver together = Make(spec);
  together.Step(4, 1, {.overrides = {{1, {.lr = 0.2, .beta2 = 0.9}}}});
  ASSERT_TRUE(together.job().UpdateGroup(2, {.weight_decay = 0.5}).ok());
  together.Step(5);
  for (int group = 0; group < 3; ++group) {
    JobSpec alone = MakeJobSpec({.group_sizes = {{}, {}, {}}}, "alone" + std::to_string(group));
    alone.groups = spec.groups;
    alone.layout.parameters = {{.name = "p", .shape = {300}, .group = group}};
    alone.layout.partitions = {{.rank = 0, .group = group, .begin = 0, .end = 512}};
    JobDriver driver = Make(alone);
    driver.Step(4, 1, {.overrides = {{1, {.lr = 0.2, .beta2 = 0.9}}}});
    ASSERT_TRUE(driver.job().UpdateGroup(2, {.weight_decay = 0.5}).ok());
    driver.Step(5);
    std::vector<float> got(300), want(300);
    together.job().TakeSnapshot({group}).value().Read(group, Plane::kMaster, 0,
                                                      absl::MakeSpan(got));
    driver.job().TakeSnapshot({0}).value().Read(0, Plane::kMaster, 0, absl::MakeSpan(want));
    EXPECT_EQ(got, want) << "group " << group;
  }
  const auto records = together.job().Status().recent_steps;
  ASSERT_EQ(records.size(), 2u);
  EXPECT_EQ(records[0].hyper_parameters[1].lr, 0.2);
  EXPECT_EQ(records[1].hyper_parameters[1].beta2, 0.9);
  EXPECT_EQ(records[0].hyper_parameters[2].weight_decay, 1e-2);
  EXPECT_EQ(records[1].hyper_parameters[2].weight_decay, 0.5);
}

TEST_F(JobSettingsTest, AScaleThatFp32CannotHoldIsRefusedOrSkipsTheStep) {
  JobDriver driver = Make(MakeJobSpec({}));
  for (const double loss_scale : {1e-150, 1e60, 0.0, -1.0}) {
    EXPECT_EQ(driver.stream(0).BeginStep(1, {.scale = {.loss_scale = loss_scale}}).code(),
              absl::StatusCode::kInvalidArgument)
        << loss_scale;
  }
  JobSpec clipped = MakeJobSpec({.group_sizes = {{256}}}, "clipped");
  clipped.groups[0].wire_dtype = DType::kFloat32;
  JobDriver huge = Make(clipped);
  huge.SetMaxNorm(1e-3);
  const std::string before = huge.job().StateHash();
  huge.BeginAll();
  ASSERT_TRUE(huge.Send(0, std::vector<float>(256, 1e37f), 0).ok());
  huge.EndMicroStepAll(0);
  huge.SealAll(1);
  EXPECT_FALSE(huge.listener(0).outcomes().back().decision.apply);
  EXPECT_TRUE(Says(huge.listener(0).outcomes().back().skip_reason));
  EXPECT_EQ(huge.job().StateHash(), before);
}

TEST_F(JobSettingsTest, TheTrainersStateIsKeptWithTheStepThatIsCommitted) {
  JobDriver driver = Make(MakeJobSpec({.world_size = 2}));
  const auto kept = [&] { return driver.job().Status().trainer_state; };
  const std::string any("\0\xff\n", 3);
  driver.BeginAll({.trainer_state = any});
  EXPECT_EQ(kept(), "");  // Not before the commit,
  driver.SendAll(1, 0);
  driver.EndMicroStepAll(0);
  driver.SealAll(1);
  EXPECT_EQ(kept(), any);
  driver.BeginAll({.trainer_state = "aborted"});
  ASSERT_TRUE(driver.job().AbortStep().ok());
  EXPECT_EQ(kept(), any);  // nor of an attempt that came to nothing,
  driver.AttachAll();
  driver.BeginAll({.trainer_state = "skipped"});
  driver.SendAllWith(NAN, 0, 7, 2, 0);
  driver.EndMicroStepAll(0);
  driver.SealAll(1);
  EXPECT_EQ(driver.job().Status().skipped_steps, 1u);
  EXPECT_EQ(kept(), "skipped");  // but of a skipped step.
  driver.Step(4);
  EXPECT_EQ(kept(), "");
}

TEST_F(JobSettingsTest, TrainersStatesMustAgreeAndBeSmall) {
  JobDriver driver = Make(MakeJobSpec({.world_size = 2}));
  const std::string largest(kMaxTrainerStateBytes, 's');
  for (const int rank : {0, 1}) {
    EXPECT_TRUE(Refused(driver.stream(rank).BeginStep(1, {.trainer_state = largest + "s"}),
                        absl::StatusCode::kInvalidArgument));
    if (rank == 0) ASSERT_TRUE(driver.stream(0).BeginStep(1, {.trainer_state = largest}).ok());
  }
  std::string other = largest;
  other[7] = 't';
  EXPECT_TRUE(Refused(driver.stream(1).BeginStep(1, {.trainer_state = other}),
                      absl::StatusCode::kFailedPrecondition, reason::kOtherSettings));
  EXPECT_TRUE(driver.stream(1).BeginStep(1, {.trainer_state = largest}).ok());
}

}  // namespace
}  // namespace ballast
