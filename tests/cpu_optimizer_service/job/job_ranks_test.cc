// Who holds which rank of a job: attaching, streams, generations, first weights, closing.
#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "cpu_optimizer_service/common/reason.h"
#include "cpu_optimizer_service/job/job.h"
#include "tests/cpu_optimizer_service/job/job_driver.h"
#include "tests/support/messages.h"

namespace ballast {
namespace {

using JobRanksTest = JobDriverTest;

TEST_F(JobRanksTest, ANewProcessRaisesTheGenerationInMidStepAndNotBetweenSteps) {
  JobDriver driver = Make(MakeJobSpec({.world_size = 2}));
  driver.BeginAll();
  driver.SendAll(9, 0);
  const Generation generation = driver.job().Status().generation;
  const auto attachment = driver.job().Attach({.rank = 1, .process_id = "newcomer"}).value();
  EXPECT_EQ(attachment.generation, generation.Next());
  EXPECT_EQ(driver.listener(0).detached().code(), absl::StatusCode::kAborted);
  EXPECT_EQ(ReasonOf(driver.listener(0).detached()), reason::kOlderGeneration);
  EXPECT_EQ(driver.listener(1).detached().code(), absl::StatusCode::kAborted);
  EXPECT_EQ(driver.stream(0).EndMicroStep(1, 0, {}).code(), absl::StatusCode::kAborted);
  EXPECT_EQ(driver.Send(0, driver.Values(0, 9), 1).status().code(), absl::StatusCode::kAborted);
  EXPECT_EQ(driver.job().Status().phase, JobPhase::kReady);

  driver.Attach(0);
  driver.Attach(1, "newcomer");
  driver.Step(9);
  JobSpec other = MakeJobSpec({.world_size = 2}, "undisturbed");
  JobDriver undisturbed = Make(other);
  undisturbed.Step(9);
  EXPECT_EQ(driver.job().StateHash(), undisturbed.job().StateHash());

  const Generation now = driver.job().Status().generation;
  driver.DetachAll();
  driver.Attach(0, "restarted0");
  driver.Attach(1, "restarted1");
  EXPECT_EQ(driver.job().Status().generation, now);
}

TEST_F(JobRanksTest, ARankThatLeavesInMidStepIsShown) {
  JobDriver driver = Make(MakeJobSpec({.world_size = 2}));
  driver.BeginAll();
  driver.SendAll(9, 0);
  EXPECT_FALSE(driver.job().Status().ranks[1].left);
  driver.Detach(1);
  const std::vector<RankProgress> ranks = driver.job().Status().ranks;
  EXPECT_FALSE(ranks[0].left);
  EXPECT_TRUE(ranks[1].left);
  EXPECT_TRUE(ranks[1].attached);  // Its gradients are in the step.
}

TEST_F(JobRanksTest, StepsWithoutWeightsAreRefused) {
  JobDriver driver(engine_, MakeJobSpec({}));
  driver.AttachAll();
  EXPECT_TRUE(Refused(driver.stream(0).BeginStep(1, {}), absl::StatusCode::kFailedPrecondition,
                      reason::kNoWeightsYet));
  driver.UploadWeights();
  EXPECT_TRUE(driver.stream(0).BeginStep(1, {}).ok());
}

TEST_F(JobRanksTest, UploadingWeightsChecksSizePaddingAndState) {
  JobDriver driver(engine_, MakeJobSpec({.group_sizes = {{100}}}));
  std::vector<float> weights(256, 0.0f);
  const auto upload = [&](int64_t chunk, int64_t elements) {
    const auto piece =
        absl::MakeConstSpan(reinterpret_cast<const std::byte*>(weights.data()), elements * 4);
    return driver.job().WriteInitialWeights(chunk, {piece}).status().code();
  };
  EXPECT_EQ(upload(1, 256), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(upload(0, 255), absl::StatusCode::kInvalidArgument);
  weights[100] = 1;
  EXPECT_EQ(upload(0, 256), absl::StatusCode::kInvalidArgument);
  weights[100] = 0;
  for (const float bad : {std::nanf(""), HUGE_VALF, -HUGE_VALF}) {
    weights[7] = bad;
    EXPECT_EQ(upload(0, 256), absl::StatusCode::kInvalidArgument) << bad;
  }
  const auto piece = absl::MakeConstSpan(reinterpret_cast<const std::byte*>(weights.data()), 1024);
  EXPECT_TRUE(
      Refused(driver.job().WriteInitialWeights(0, {piece}), absl::StatusCode::kInvalidArgument));
  weights[7] = 0;
  EXPECT_EQ(upload(0, 256), absl::StatusCode::kOk);
  EXPECT_EQ(upload(0, 256), absl::StatusCode::kFailedPrecondition);
}

// P2: what was sent in an attempt that its process gave up never meets what it sends in the next.
TEST_F(JobRanksTest, ANewSessionOfTheSameProcessDoesTheStepAnew) {
  const JobShape shape = {.group_sizes = {{512}}, .chunk_elements = 256};
  JobDriver driver = Make(MakeJobSpec(shape));
  const Generation generation = driver.job().Status().generation;
  driver.BeginAll();
  ASSERT_TRUE(driver.Send(0, driver.Values(0, 3), 0).ok());
  driver.Attach(0);
  EXPECT_EQ(driver.job().Status().generation, generation.Next());
  driver.Step(9);
  JobDriver clean = Make(MakeJobSpec(shape, "clean"));
  clean.Step(9);
  EXPECT_EQ(driver.job().StateHash(), clean.job().StateHash());
  driver.Attach(0);  // Between steps there is nothing to keep apart.
  EXPECT_EQ(driver.job().Status().generation, generation.Next());
}

TEST_F(JobRanksTest, FirstWeightsOfTwoAttemptsDoNotMix) {
  JobDriver driver(engine_, MakeJobSpec({.world_size = 2}));
  driver.AttachAll();
  // True if the job is ready then.
  const auto upload = [&](int rank) {
    bool ready = false;
    for (const int chunk : driver.layout().chunks_of_rank(rank)) {
      const std::vector<float> values = driver.Values(chunk, 1);
      const auto piece = absl::MakeConstSpan(reinterpret_cast<const std::byte*>(values.data()),
                                             values.size() * sizeof(float));
      ready = driver.job().WriteInitialWeights(chunk, {piece}).value();
    }
    return ready;
  };
  EXPECT_FALSE(upload(0));
  driver.Attach(1, "new1");  // The generation rises, and rank 0's weights are forgotten.
  EXPECT_FALSE(upload(1));
  driver.Attach(0, "new0");
  driver.Detach(1);  // Rank 1 is free: the next process takes it in the same generation.
  driver.Attach(1, "newer1");
  EXPECT_EQ(driver.job().Status().generation, 2u);
  EXPECT_FALSE(upload(0));
  EXPECT_TRUE(upload(1));
}

TEST_F(JobRanksTest, ASlowOldProcessCannotTakeItsRankBack) {
  JobDriver driver = Make(MakeJobSpec({.world_size = 2}));
  const Generation old_generation = driver.job().Status().generation;
  driver.BeginAll();
  driver.Attach(1, "newcomer");  // The generation rises.
  driver.Attach(0);
  driver.BeginAll();
  driver.SendAll(4, 0);
  const auto retake = [&](const std::string& process, Generation generation) {
    const absl::Status status =
        driver.job().Attach({.rank = 1, .process_id = process, .generation = generation}).status();
    EXPECT_EQ(driver.job().Status().generation, old_generation.Next());
    EXPECT_EQ(driver.job().Status().ranks[1].process_id, "newcomer");
    EXPECT_TRUE(driver.listener(0).detached().ok());
    EXPECT_TRUE(driver.listener(1).detached().ok());
    return status;
  };
  EXPECT_TRUE(Refused(retake("process1", old_generation), absl::StatusCode::kAborted,
                      reason::kOlderGeneration));
  EXPECT_TRUE(Refused(retake("process1", old_generation.Next()), absl::StatusCode::kAborted,
                      reason::kRankReplaced));
  EXPECT_EQ(retake("newcomer", old_generation).code(), absl::StatusCode::kAborted);
  EXPECT_EQ(retake("newcomer", old_generation.Next().Next()).code(), absl::StatusCode::kAborted);
  driver.Attach(1, "newcomer", UpdateMode::kWait, nullptr, old_generation.Next());
  driver.EndMicroStepAll(0);
  driver.SealAll(1);  // Nothing of the step was lost meanwhile.
  EXPECT_EQ(driver.job().Status().committed_step, 1u);
  driver.Detach(1);  // Between steps: the rank is free.
  EXPECT_TRUE(driver.job()
                  .Attach({.rank = 1, .process_id = "third", .generation = old_generation.Next()})
                  .ok());
}

TEST_F(JobRanksTest, AttachChecksRankUidStepAndDescription) {
  JobDriver driver = Make(MakeJobSpec({}));
  Job& job = driver.job();
  const auto code = [&](const AttachRequest& request) {
    return job.Attach(request).status().code();
  };
  EXPECT_EQ(code({.rank = 1, .process_id = "x"}), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code({.rank = 0, .process_id = ""}), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code({.rank = 0, .process_id = "process0", .uid = "other"}),
            absl::StatusCode::kNotFound);
  EXPECT_EQ(code({.rank = 0, .process_id = "process0", .expected_committed_step = 5}),
            absl::StatusCode::kFailedPrecondition);
  JobSpec spec = job.spec();
  spec.layout.parameters[1].shape = {6, 4};
  EXPECT_TRUE(Refused(job.Attach({.rank = 0, .process_id = "process0", .spec = spec}),
                      absl::StatusCode::kFailedPrecondition, reason::kOtherDescription));
  EXPECT_EQ(code({.rank = 0,
                  .process_id = "process0",
                  .uid = job.uid(),
                  .expected_committed_step = 0,
                  .spec = job.spec()}),
            absl::StatusCode::kOk);
}

TEST_F(JobRanksTest, AStreamNeedsAnAttachedProcessAndUploadsTheRightGeneration) {
  JobDriver driver(engine_, MakeJobSpec({.group_sizes = {{256}}}));
  const auto stream = driver.job().OpenStream(
      {.uid = driver.job().uid(), .rank = 0, .process_id = "", .generation = 1},
      std::make_shared<RecordingListener>());
  EXPECT_EQ(stream.status().code(), absl::StatusCode::kAborted);
  const std::vector<float> weights(256, 1.0f);
  const auto piece = absl::MakeConstSpan(reinterpret_cast<const std::byte*>(weights.data()), 1024);
  ASSERT_TRUE(driver.job().Attach({.rank = 0, .process_id = "p"}).ok());
  const Job::Uploader begun =
      driver.job().BeginFirstWeights({.rank = 0, .process_id = "p", .generation = 1}, {}).value();
  const auto write = [&](Generation generation, const std::string& process_id) {
    Job::Uploader uploader = begun;
    uploader.generation = generation;
    uploader.process_id = process_id;
    return driver.job().WriteInitialWeights(0, {piece}, uploader);
  };
  EXPECT_EQ(write(2, "p").status().code(), absl::StatusCode::kAborted);
  EXPECT_EQ(write(1, "older").status().code(), absl::StatusCode::kAborted);
  EXPECT_TRUE(write(1, "p").value());
}

TEST_F(JobRanksTest, ClosingAJobDetachesItsStreamsAndFreesItsMemory) {
  {
    JobDriver driver = Make(MakeJobSpec({}));
    EXPECT_GT(engine_.memory().used_bytes(), 0);
    ASSERT_TRUE(engine_.CloseJob("job").ok());
    EXPECT_EQ(driver.listener(0).detached().code(), absl::StatusCode::kAborted);
    EXPECT_EQ(driver.stream(0).BeginStep(1, {}).code(), absl::StatusCode::kAborted);
    EXPECT_EQ(engine_.FindJob("job").status().code(), absl::StatusCode::kNotFound);
  }
  EXPECT_EQ(engine_.memory().used_bytes(), 0);
}

}  // namespace
}  // namespace ballast
