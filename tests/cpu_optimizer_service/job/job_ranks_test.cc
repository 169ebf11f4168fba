// Who holds which rank of a job: attaching, streams, generations, first weights, closing.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "cpu_optimizer_service/common/reason.h"
#include "cpu_optimizer_service/job/job.h"
#include "tests/cpu_optimizer_service/job/job_driver.h"

namespace ballast {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

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

TEST_F(JobRanksTest, ASecondStreamReplacesTheFirstAndKnowsWhatWasDelivered) {
  JobDriver driver = Make(MakeJobSpec({.group_sizes = {{512}}, .chunk_elements = 256}));
  driver.BeginAll();
  ASSERT_TRUE(driver.Send(1, driver.Values(1, 3), 0).ok());
  auto listener = std::make_shared<RecordingListener>();
  const auto second = driver.job().OpenStream({.uid = driver.job().uid(),
                                               .rank = 0,
                                               .process_id = "process0",
                                               .generation = driver.job().Status().generation},
                                              listener);
  ASSERT_TRUE(second.ok());
  EXPECT_EQ(driver.listener(0).detached().code(), absl::StatusCode::kAborted);
  EXPECT_EQ(driver.stream(0).EndMicroStep(1, 0, {}).code(), absl::StatusCode::kAborted);
  const RankPosition& position = (*second)->position();
  EXPECT_EQ(position.open_step, 1u);
  ASSERT_EQ(position.delivered.size(), 1u);
  EXPECT_EQ(position.delivered[0].chunk, 1);
  EXPECT_EQ(position.delivered[0].next_micro_step, 1u);
}

TEST_F(JobRanksTest, WaitingNamesTheRanksThatHaveNotSealed) {
  JobDriver driver = Make(MakeJobSpec({.world_size = 3}));
  driver.BeginAll();
  driver.SendAll(1, 0);
  driver.EndMicroStepAll(0);
  driver.job().TellWaiting();
  EXPECT_FALSE(driver.job().SecondsSinceFirstSeal().has_value());
  ASSERT_FALSE(driver.stream(1).Seal(1, 1).value().has_value());
  EXPECT_TRUE(driver.job().SecondsSinceFirstSeal().has_value());
  driver.job().TellWaiting();
  EXPECT_THAT(driver.listener(1).waiting(), ElementsAre(0, 2));
  EXPECT_TRUE(driver.listener(0).waiting().empty());
  driver.SealAll(1);  // A late seal still commits.
  EXPECT_EQ(driver.job().Status().committed_step, 1u);
}

TEST_F(JobRanksTest, StepsWithoutWeightsAreRefused) {
  JobDriver driver(engine_, MakeJobSpec({}));
  driver.AttachAll();
  const absl::Status status = driver.stream(0).BeginStep(1, {});
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()), HasSubstr("no weights yet"));
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
  EXPECT_THAT(std::string(driver.job().WriteInitialWeights(0, {piece}).status().message()),
              HasSubstr("the first weight of p0 is -inf at element 7"));
  weights[7] = 0;
  EXPECT_EQ(upload(0, 256), absl::StatusCode::kOk);
  EXPECT_EQ(upload(0, 256), absl::StatusCode::kFailedPrecondition);
}

TEST_F(JobRanksTest, ABrokenStreamIsReopenedInMidStepByItsProcess) {
  JobDriver driver = Make(MakeJobSpec({.group_sizes = {{512}}, .chunk_elements = 256}));
  const Generation generation = driver.job().Status().generation;
  driver.BeginAll();
  ASSERT_TRUE(driver.Send(1, driver.Values(1, 3), 0).ok());
  driver.Detach(0);
  const AttachRequest again = {.rank = 0,
                               .process_id = "process0",
                               .uid = driver.job().uid(),
                               .expected_committed_step = 0,
                               .generation = generation};
  EXPECT_EQ(driver.job().Attach(again)->generation, generation);
  driver.Reopen(0);
  ASSERT_EQ(driver.stream(0).position().delivered.size(), 1u);
  EXPECT_EQ(driver.stream(0).position().open_step, 1u);
  EXPECT_EQ(driver.Send(1, driver.Values(1, 9), 0).value(), ContributionResult::kRepeat);
  ASSERT_TRUE(driver.Send(0, driver.Values(0, 3), 0).ok());
  driver.EndMicroStepAll(0);
  driver.SealAll(1);
  EXPECT_EQ(driver.job().Status().generation, generation);
  JobDriver unbroken =
      Make(MakeJobSpec({.group_sizes = {{512}}, .chunk_elements = 256}, "unbroken"));
  unbroken.Step(3);
  EXPECT_EQ(driver.job().StateHash(), unbroken.job().StateHash());
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

TEST_F(JobRanksTest, TheEndOfABrokenStreamDoesNotTakeTheRankFromTheNextOne) {
  JobDriver driver = Make(MakeJobSpec({}));
  const Generation generation = driver.job().Status().generation;
  ASSERT_TRUE(
      driver.job().Attach({.rank = 0, .process_id = "process0", .generation = generation}).ok());
  EXPECT_EQ(driver.listener(0).detached().code(), absl::StatusCode::kAborted);
  driver.Detach(0);  // Noticed only now.
  const auto reopened = driver.job().OpenStream(
      {.uid = driver.job().uid(), .rank = 0, .process_id = "process0", .generation = generation},
      std::make_shared<RecordingListener>());
  EXPECT_TRUE(reopened.ok()) << reopened.status();
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
  const absl::Status older = retake("process1", old_generation);
  EXPECT_EQ(older.code(), absl::StatusCode::kAborted);
  EXPECT_THAT(std::string(older.message()), HasSubstr("at generation 1.2, not 1.1"));
  const absl::Status taken = retake("process1", old_generation.Next());
  EXPECT_EQ(taken.code(), absl::StatusCode::kAborted);
  EXPECT_THAT(std::string(taken.message()), HasSubstr("another process has taken rank 1"));
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
  const auto different = job.Attach({.rank = 0, .process_id = "process0", .spec = spec});
  EXPECT_EQ(different.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(different.status().message()),
              HasSubstr("the shape of parameter p1 is [24] here and [6, 4] there"));
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

TEST_F(JobRanksTest, AProcessThatWasReplacedDoesNotTakeItsRankBack) {
  JobDriver driver = Make(MakeJobSpec({.world_size = 2}));
  driver.Attach(0, "old0");
  driver.Attach(1, "old1");
  const auto rejoin = [&](int rank, const std::string& process) {
    return driver.job().Attach({.rank = rank, .process_id = process, .rejoin = true}).status();
  };
  driver.Attach(1, "new1");  // The generation rises, and rank 0 is free.
  const Generation generation = driver.job().Status().generation;
  const absl::Status replaced = rejoin(1, "old1");
  EXPECT_EQ(replaced.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(replaced.message()), HasSubstr("another process has taken rank 1"));
  EXPECT_EQ(ReasonOf(replaced), reason::kRankReplaced);
  EXPECT_EQ(driver.job().Status().ranks[1].process_id, "new1");
  EXPECT_EQ(driver.job().Status().generation, generation);
  // Nobody has replaced it yet. Who replaces it then is not evicted by the other rank's return.
  EXPECT_TRUE(rejoin(0, "old0").ok());
  driver.Attach(0, "new0");
  EXPECT_EQ(rejoin(0, "old0").code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(rejoin(1, "old1").code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_TRUE(rejoin(1, "new1").ok());
  EXPECT_TRUE(rejoin(0, "new0").ok());
  EXPECT_EQ(driver.job().Status().generation, generation.Next());
}

TEST_F(JobRanksTest, ASealThatAReopenedStreamRepeatsIsTakenOnceWhateverHasHappenedMeanwhile) {
  JobDriver driver = Make(MakeJobSpec({.world_size = 2}));
  driver.BeginAll();
  driver.SendAll(1, 0);
  driver.EndMicroStepAll(0);
  ASSERT_FALSE(driver.stream(1).Seal(1, 1).value().has_value());
  driver.Reopen(1);  // Its seal stands.
  ASSERT_FALSE(driver.stream(0).Seal(1, 1).value().has_value());
  driver.listener(0).WaitForCommit(1);
  EXPECT_FALSE(driver.stream(1).Seal(1, 1).value().has_value());
  ASSERT_TRUE(driver.stream(0).BeginStep(2, {}).ok());
  EXPECT_FALSE(driver.stream(1).Seal(1, 1).value().has_value());
  // Another number was never sealed, and another step never committed.
  EXPECT_EQ(driver.stream(1).Seal(1, 2).status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(driver.stream(1).Seal(3, 1).status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(driver.job().Status().committed_step, 1u);
}

TEST_F(JobRanksTest, ARankThatLeftDuringTheUpdateIsFreeAfterIt) {
  JobDriver driver = Make(MakeJobSpec({.world_size = 2}));
  driver.BeginAll();
  driver.SendAll(1, 0);
  driver.EndMicroStepAll(0);
  ASSERT_FALSE(driver.stream(0).Seal(1, 1).value().has_value());
  driver.Detach(0);
  ASSERT_FALSE(driver.stream(1).Seal(1, 1).value().has_value());
  driver.listener(1).WaitForCommit(1);
  const Generation generation = driver.job().Status().generation;
  driver.Attach(0, "restarted");
  EXPECT_EQ(driver.job().Status().generation, generation);
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
