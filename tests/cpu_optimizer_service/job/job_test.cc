#include "cpu_optimizer_service/job/job.h"

#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "cpu_optimizer_service/common/reason.h"
#include "cpu_optimizer_service/common/rules/adam.h"
#include "tests/cpu_optimizer_service/job/job_driver.h"
#include "tests/support/messages.h"

namespace ballast {
namespace {

using JobTest = JobDriverTest;

TEST_F(JobTest, OneGroupOneRankOneStepEqualsTheReference) {
  JobSpec spec = MakeJobSpec({.group_sizes = {{700}}});
  JobDriver driver = Make(spec);
  EXPECT_TRUE(driver.Step(7).decision.apply);

  std::vector<float> master(700), exp_avg(700, 0), exp_avg_sq(700, 0);
  std::vector<uint16_t> gradient(700), shard(700);
  for (int i = 0; i < 700; ++i) {
    master[i] = TestValue(1, 0, i);
    gradient[i] = FloatToBFloat16(TestValue(7, 0, i));
  }
  UpdateAdamReference({.elements = 700,
                       .gradient = gradient.data(),
                       .gradient_dtype = DType::kBFloat16,
                       .master = master.data(),
                       .exp_avg = exp_avg.data(),
                       .exp_avg_sq = exp_avg_sq.data(),
                       .new_master = master.data(),
                       .new_exp_avg = exp_avg.data(),
                       .new_exp_avg_sq = exp_avg_sq.data(),
                       .shard = shard.data(),
                       .scalars = MakeAdamScalars(spec.groups[0].hyper_parameters, 1, 1.0f)});
  const Snapshot snapshot = driver.job().TakeSnapshot({0}).value();
  std::vector<float> plane(700);
  snapshot.Read(0, Plane::kMaster, 0, absl::MakeSpan(plane));
  EXPECT_EQ(plane, master);
  snapshot.Read(0, Plane::kExpAvg, 0, absl::MakeSpan(plane));
  EXPECT_EQ(plane, exp_avg);
  snapshot.Read(0, Plane::kExpAvgSq, 0, absl::MakeSpan(plane));
  EXPECT_EQ(plane, exp_avg_sq);
  EXPECT_EQ(snapshot.update_count(0), 1);
  const auto returned = driver.listener(0).shards().at(0).value();
  EXPECT_EQ(std::memcmp(returned.data(), shard.data(), 1400), 0);
}

TEST_F(JobTest, P1SealWithAChunkWithheldIsRefusedAndTouchesNothing) {
  JobDriver driver = Make(MakeJobSpec({.group_sizes = {{1000, 24, 3000}}, .world_size = 2}));
  const std::string before = driver.job().StateHash();
  driver.BeginAll();
  const int withheld = driver.layout().chunks_of_rank(1)[0];
  for (int c = 0; c < static_cast<int>(driver.layout().chunks().size()); ++c) {
    if (c != withheld) ASSERT_TRUE(driver.Send(c, driver.Values(c, 5), 0).ok());
  }
  driver.EndMicroStepAll(0);
  EXPECT_FALSE(driver.stream(0).Seal(1, 1).value().has_value());
  const auto refusal = driver.stream(1).Seal(1, 1).value();
  ASSERT_TRUE(refusal.has_value());
  EXPECT_TRUE(
      Refused(refusal->status, absl::StatusCode::kFailedPrecondition, reason::kSendAndSealAgain));
  ASSERT_EQ(refusal->missing.size(), 1u);
  EXPECT_EQ(refusal->missing[0].rank, 1);
  EXPECT_EQ(refusal->missing[0].micro_step, 0u);
  EXPECT_EQ(driver.job().StateHash(), before);

  ASSERT_TRUE(driver.Send(withheld, driver.Values(withheld, 5), 0).ok());
  driver.SealAll(1);
  EXPECT_TRUE(driver.listener(0).outcomes().back().decision.apply);
  EXPECT_NE(driver.job().StateHash(), before);
}

TEST_F(JobTest, P2ARepeatIsAcknowledgedAndChangesNothing) {
  const JobSpec spec = MakeJobSpec({.world_size = 2});
  JobDriver once = Make(spec);
  once.Step(3, 2);
  JobSpec again = spec;
  again.name = "again";
  JobDriver twice = Make(again);
  twice.BeginAll();
  for (uint32_t m = 0; m < 2; ++m) {
    twice.SendAll(3 + m, m);
    for (int c = 0; c < static_cast<int>(twice.layout().chunks().size()); ++c) {
      EXPECT_EQ(twice.Send(c, twice.Values(c, 99), 0).value(), ContributionResult::kRepeat);
    }
    twice.EndMicroStepAll(m);
  }
  twice.SealAll(2);
  EXPECT_EQ(once.job().StateHash(), twice.job().StateHash());
}

TEST_F(JobTest, P1GradientsOfEveryMicroStepAreInTheSum) {
  // Integers add exactly: the first moment after one step is (1 - beta1) times their sum.
  JobSpec spec = MakeJobSpec({.group_sizes = {{512}}});
  spec.groups[0].hyper_parameters.beta1 = 0;
  JobDriver driver = Make(spec);
  driver.BeginAll();
  for (uint32_t m = 0; m < 4; ++m) {
    ASSERT_TRUE(driver.Send(0, std::vector<float>(512, static_cast<float>(1 << m)), m).ok());
    driver.EndMicroStepAll(m);
  }
  driver.SealAll(4);
  std::vector<float> exp_avg(512);
  driver.job().TakeSnapshot({0}).value().Read(0, Plane::kExpAvg, 0, absl::MakeSpan(exp_avg));
  EXPECT_EQ(exp_avg, std::vector<float>(512, 15.0f));
}

TEST_F(JobTest, P3AnAbortedStepLeavesNothingBehind) {
  const JobSpec spec = MakeJobSpec({.world_size = 2});
  JobDriver clean = Make(spec);
  clean.Step(3);
  JobSpec other = spec;
  other.name = "aborted";
  JobDriver aborted = Make(other);
  aborted.BeginAll({.overrides = {{0, {.lr = 0.5}}}});
  aborted.SendAll(1000, 0);
  aborted.EndMicroStepAll(0);
  EXPECT_FALSE(aborted.stream(0).Seal(1, 1).value().has_value());
  EXPECT_EQ(aborted.job().AbortStep().value(), 1u);
  // A rank that waits for the decision hears of it.
  EXPECT_TRUE(Refused(aborted.listener(0).detached(), absl::StatusCode::kAborted,
                      reason::kOlderGeneration));
  aborted.AttachAll();
  aborted.Step(3);
  EXPECT_EQ(clean.job().StateHash(), aborted.job().StateHash());
  EXPECT_EQ(aborted.job().AbortStep().status().code(), absl::StatusCode::kFailedPrecondition);
}

TEST_F(JobTest, P10ANaNSkipsTheStepNamesTheParameterAndLeavesEveryByte) {
  JobDriver driver = Make(MakeJobSpec({.group_sizes = {{1000, 24, 3000}}}));
  driver.Step(2);
  const std::string before = driver.job().StateHash();
  driver.BeginAll();
  driver.SendAllWith(NAN, 0, 1010, 5, 0);
  driver.EndMicroStepAll(0);
  driver.SealAll(1);
  const StepOutcome outcome = driver.listener(0).outcomes().back();
  EXPECT_FALSE(outcome.decision.apply);
  EXPECT_TRUE(Says(outcome.skip_reason));
  EXPECT_EQ(driver.job().Status().committed_step, 2u);
  EXPECT_EQ(driver.job().Status().skipped_steps, 1u);
  EXPECT_EQ(driver.job().StateHash(), before);
}

TEST_F(JobTest, ClippingScalesByTheGlobalNorm) {
  JobSpec spec = MakeJobSpec({.group_sizes = {{256}, {256}}});
  for (auto& group : spec.groups) group.hyper_parameters.beta1 = 0;
  JobDriver driver = Make(spec);
  driver.SetMaxNorm(1.0);
  driver.BeginAll();
  ASSERT_TRUE(driver.Send(0, std::vector<float>(256, 3.0f), 0).ok());
  ASSERT_TRUE(driver.Send(1, std::vector<float>(256, 4.0f), 0).ok());
  driver.EndMicroStepAll(0);
  driver.SealAll(1);
  const Decision decision = driver.listener(0).outcomes().back().decision;
  EXPECT_DOUBLE_EQ(decision.norm, 80.0);  // sqrt(256 * 9 + 256 * 16)
  EXPECT_DOUBLE_EQ(decision.clip_coefficient, 1.0 / (80.0 + 1e-6));
  std::vector<float> exp_avg(256);
  driver.job().TakeSnapshot({1}).value().Read(1, Plane::kExpAvg, 0, absl::MakeSpan(exp_avg));
  EXPECT_EQ(exp_avg[0], 4.0f * static_cast<float>(1.0 / (80.0 + 1e-6)));
}

TEST_F(JobTest, OneMicroStepAllocatesNoAccumulator) {
  JobSpec spec = MakeJobSpec({});
  spec.max_micro_steps = 1;
  JobDriver driver = Make(spec);
  EXPECT_EQ(driver.job().Status().memory.accumulator_bytes, 0);
  driver.Step(3);
  EXPECT_EQ(driver.job().Status().accumulators_in_use, 0);
  driver.BeginAll();
  driver.SendAll(4, 0);
  EXPECT_TRUE(
      Refused(driver.Send(0, driver.Values(0, 5), 1), absl::StatusCode::kFailedPrecondition));
}

TEST_F(JobTest, NoMicroStepEndsBeyondTheMost) {
  JobSpec spec = MakeJobSpec({});
  spec.max_micro_steps = 2;
  JobDriver driver = Make(spec);
  driver.BeginAll();
  driver.EndMicroStepAll(0);
  driver.EndMicroStepAll(1);
  EXPECT_TRUE(
      Refused(driver.stream(0).EndMicroStep(1, 2, {}), absl::StatusCode::kFailedPrecondition));
  spec.name = "unlimited";
  spec.max_micro_steps = 0;
  JobDriver other = Make(spec);
  other.BeginAll();
  EXPECT_TRUE(Refused(other.stream(0).EndMicroStep(1, kMaxMicroSteps, {}),
                      absl::StatusCode::kFailedPrecondition));
}

TEST_F(JobTest, ContributionsAreVerifiedBeforeAnythingIsTouched) {
  JobDriver driver = Make(MakeJobSpec({.world_size = 2}));
  driver.BeginAll();
  const int own = driver.layout().chunks_of_rank(0)[0];
  const int foreign = driver.layout().chunks_of_rank(1)[0];
  const std::vector<std::byte> payload = driver.Encode(own, driver.Values(own, 1));
  const absl::Span<const std::byte> whole(payload);
  const absl::Span<const std::byte> cut = whole.first(whole.size() - 1);
  const auto code = [&](Contribution given, absl::Span<const std::byte> piece) {
    given.payload = {&piece, 1};
    return driver.stream(0).Contribute(given).status().code();
  };
  EXPECT_EQ(code({.step = 1, .chunk = own}, cut), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code({.step = 1, .chunk = own, .empty = true}, whole),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code({.step = 1, .chunk = -1}, whole), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code({.step = 1, .chunk = 1 << 20}, whole), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code({.step = 1, .chunk = foreign}, whole), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code({.step = 2, .chunk = own}, whole), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(code({.step = 1, .chunk = own, .micro_step_begin = 1, .micro_step_end = 2}, whole),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(code({.step = 1, .chunk = own, .micro_step_begin = 1, .micro_step_end = 1}, whole),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code({.step = 1, .chunk = own}, whole), absl::StatusCode::kOk);
}

TEST_F(JobTest, PayloadCutAnywhereAddsTheSame) {
  const JobSpec spec = MakeJobSpec({.group_sizes = {{512}}});
  JobDriver whole = Make(spec);
  whole.Step(8, 2);
  JobSpec other = spec;
  other.name = "pieces";
  JobDriver pieces = Make(other);
  pieces.BeginAll();
  for (uint32_t m = 0; m < 2; ++m) {
    const std::vector<std::byte> bytes = pieces.Encode(0, pieces.Values(0, 8 + m));
    const absl::Span<const std::byte> all(bytes);
    const std::vector<absl::Span<const std::byte>> cut = {all.first(3), all.subspan(3, 0),
                                                          all.subspan(3, 500), all.subspan(503)};
    ASSERT_TRUE(pieces.stream(0)
                    .Contribute({.step = 1,
                                 .chunk = 0,
                                 .micro_step_begin = m,
                                 .micro_step_end = m + 1,
                                 .payload = cut})
                    .ok());
    pieces.EndMicroStepAll(m);
  }
  pieces.SealAll(2);
  EXPECT_EQ(whole.job().StateHash(), pieces.job().StateHash());
}

TEST_F(JobTest, ShardsConvertedLateAreTheSame) {
  // More chunks than the pool has buffers, and a listener that keeps none.
  JobDriver driver = Make(MakeJobSpec({.group_sizes = {{20000}}, .chunk_elements = 256}));
  driver.Step(3);
  for (const auto& [chunk, shard] : driver.listener(0).shards()) {
    std::vector<std::byte> late(driver.layout().chunks()[chunk].elements * 2);
    ASSERT_TRUE(driver.job().ReadShard(1, 1, chunk, absl::MakeSpan(late)).ok());
    if (shard.has_value()) EXPECT_EQ(late, *shard) << "chunk " << chunk;
  }
  std::vector<std::byte> out(512);
  const auto code = [&](Generation generation, uint64_t step) {
    return driver.job().ReadShard(generation, step, 0, absl::MakeSpan(out)).code();
  };
  EXPECT_EQ(code(1, 1), absl::StatusCode::kOk);
  EXPECT_EQ(code(1, 2), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(code(2, 1), absl::StatusCode::kAborted);
}

// Wherever it is: whole blocks are judged by their sums, where those have been taken.
TEST_F(JobTest, AnyGradientOfAnUnusedParameterIsFound) {
  JobSpec spec = MakeJobSpec({.group_sizes = {{300, 5000, 200}}, .chunk_elements = 1024});
  spec.unused_policy = UnusedPolicy::kSkip;
  JobDriver driver = Make(spec);
  for (const bool final : {false, true}) {
    for (const int64_t element : {300, 511, 512, 3000, 5119, 5120, 5299, -1}) {
      driver.BeginAll();
      for (int c = 0; c < static_cast<int>(driver.layout().chunks().size()); ++c) {
        std::vector<float> values = driver.Values(c, 3);
        const int64_t begin = driver.layout().chunks()[c].begin;
        for (int64_t i = 0; i < static_cast<int64_t>(values.size()); ++i) {
          if (begin + i >= 300 && begin + i < 5300) values[i] = 0;
          if (begin + i == element) values[i] = 0x1p-126f;
        }
        ASSERT_TRUE(driver.Send(c, values, 0, final).ok());
      }
      driver.EndMicroStepAll(0, {.all = false, .parameters = {0, 2}});
      const uint64_t step = driver.next_step();
      const auto refusal = driver.stream(0).Seal(step, 1).value();
      EXPECT_EQ(refusal.has_value(), element != -1) << element << " final " << final;
      if (element == -1) {
        driver.listener(0).WaitForCommit(step);
        continue;
      }
      EXPECT_TRUE(
          Refused(refusal->status, absl::StatusCode::kFailedPrecondition, reason::kAbortAndRedo));
      ASSERT_TRUE(driver.job().AbortStep().ok());
      driver.AttachAll();
    }
  }
}

}  // namespace
}  // namespace ballast
