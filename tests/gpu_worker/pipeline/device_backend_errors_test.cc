// What goes wrong around the passes: the optimizer, the device at each of its operations, memory.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <mutex>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "tests/gpu_worker/collective/ranks.h"
#include "tests/gpu_worker/pipeline/pipeline_rank.h"
#include "tests/support/messages.h"
#include "tests/support/sanitizers.h"

namespace ballast::worker {
namespace {

using testing::HasSubstr;
using testing::Not;

constexpr uint64_t kSeeds = 4;

// ---------------------------------------------------------------- the optimizer

TEST(DeviceBackendErrors, AnErrorOfTheSinkEndsTheStepOnOneRankAndNoCollectiveOfTheOthers) {
  for (const Accumulation accumulation : {Accumulation::kService, Accumulation::kWorker}) {
    for (uint64_t seed = 0; seed < kSeeds / 2; ++seed) {
      RunRanks(2, [&](Collective& host) {
        PipelineRank* self = nullptr;
        std::atomic<int> calls = 0;
        std::atomic<bool> failing = host.rank() == 0;
        RankOptions options{.micro_steps = 3, .device = {.seed = seed + host.rank()}};
        options.backend.accumulation = accumulation;
        options.push = [&](client::GradientPush push) {
          // The place takes another payload as soon as it is released.
          const bool refused = failing && ++calls == 3;
          if (!refused) self->Note(push);
          push.released();
          return refused ? absl::AbortedError("an operator's abort") : absl::OkStatus();
        };
        PipelineRank rank(options, &host);
        self = &rank;
        ASSERT_TRUE(rank.Create().ok());
        ASSERT_TRUE(rank.GiveWeights(0, seed).ok());
        const absl::StatusOr<FinishedStep> finished = rank.Passes(1);
        if (host.rank() == 0) {
          EXPECT_EQ(finished.status().code(), absl::StatusCode::kAborted);
          EXPECT_THAT(finished.status().message(), HasSubstr("an operator's abort"));
          EXPECT_THAT(finished.status().message(), HasSubstr("step 1: chunk"));
          EXPECT_EQ(calls, 3) << "the sink was called after its error";
          EXPECT_EQ(rank.pushed().size(), 2);
          EXPECT_THAT(rank.ended(), testing::SizeIs(accumulation == Accumulation::kWorker ? 2 : 0));
        } else {
          EXPECT_TRUE(finished.ok()) << finished.status();
          rank.ExpectWhole(1);
        }
        // The step is done again, with nothing of the first attempt in it.
        failing = false;
        const size_t before = rank.pushed().size();
        ASSERT_TRUE(rank.GiveWeights(1, seed).ok());
        ASSERT_TRUE(rank.Passes(2).ok());
        rank.ExpectRightBytes();
        const size_t reductions = accumulation == Accumulation::kWorker ? 1 : 3;
        EXPECT_EQ(rank.pushed().size() - before,
                  reductions * rank.job().layout.chunks_of_rank(host.rank()).size());
        rank.ExpectRead(3, 1);
      });
    }
  }
}

TEST(DeviceBackendErrors, AnOptimizerThatTakesNothingEndsTheStepInTimeAndIsNamed) {
  for (const bool own_memory : {false, true}) {
    std::mutex mutex;
    std::vector<std::function<void()>> out;
    RankOptions options{.micro_steps = 2};
    options.backend.staging_slots = 2;
    options.backend.timeout = absl::Milliseconds(50);
    options.push = [&](client::GradientPush push) {
      const std::lock_guard<std::mutex> lock(mutex);
      out.push_back(std::move(push.released));
      return absl::OkStatus();
    };
    PipelineRank rank(options);
    OptimizersMemory memory(rank.job(), 0, options.wire_dtype);
    ASSERT_TRUE(rank.Create().ok());
    if (own_memory) {
      ASSERT_TRUE(
          rank.backend().UseGradientMemory([&](int chunk) { return memory.at(chunk); }).ok());
    }
    const absl::StatusOr<FinishedStep> finished = rank.Passes(1);
    EXPECT_TRUE(Refused(finished, absl::StatusCode::kDeadlineExceeded));
    for (const auto& released : out) released();
    out.clear();
    rank.Destroy();  // Before the memory.
  }
}

TEST(DeviceBackendErrors, ABackwardThatReachesNothingIsAnErrorOfThisRankAlone) {
  RunRanks(2, [&](Collective& host) {
    RankOptions options{.micro_steps = 2};
    options.script.reaches = [&](const PassPosition& at, int) {
      return host.rank() != 1 || at.step != 1 || at.micro_step != 1;
    };
    PipelineRank rank(options, &host);
    ASSERT_TRUE(rank.Create().ok());
    const absl::StatusOr<FinishedStep> finished = rank.Passes(1);
    if (host.rank() == 1) {
      EXPECT_EQ(finished.status().code(), absl::StatusCode::kFailedPrecondition);
      EXPECT_THAT(finished.status().message(), HasSubstr("rank 1"));
      // Not the one that reached nothing; the error may come before the other is handed over.
      EXPECT_LE(rank.ended().size(), 1);
    } else {
      EXPECT_TRUE(finished.ok()) << finished.status();
    }
    EXPECT_TRUE(rank.Passes(2).ok());
  });
}

// ---------------------------------------------------------------- the device

struct Outcome {
  absl::Status status;
  int operations = 0;
  bool failed = false;  // The operation was before the destruction.
};

// With the optimizer's memory its weights come ahead, and under the next forward pass.
enum class Where { kRing, kOptimizersMemory, kOnDevice };

// What a session does when another rank's device is lost, or its own: no more weights come.
absl::Status GiveWeightsAhead(PipelineRank& rank, uint64_t step, uint64_t seed) {
  return rank.GiveWeightsUnderForward(step, [&rank, step, seed] {
    for (const int chunk : rank.Shuffled(seed)) {
      if (chunk % 2 == 0) {
        rank.WriteWeights(step, chunk);
        rank.backend().OnProvisionalWeights(chunk);
      }
      if (chunk % 4 == 0) rank.backend().OnDroppedWeights(chunk);
      rank.TellWeights(step, chunk);
    }
  });
}

// Two steps and their weights; operation `failing` (from 0) returns `error`.
Outcome RunUntilItFails(uint64_t seed, Where where, int failing, const absl::Status& error) {
  const bool on_device = where == Where::kOnDevice;
  std::atomic<int> operations = 0;
  std::string failed;
  std::atomic<bool> has_failed = false;
  RankOptions options{.micro_steps = 2};
  if (where == Where::kOptimizersMemory) options.update_mode = UpdateMode::kSpeculate;
  options.backend.check_gradients = true;
  options.backend.on_device = on_device;
  options.backend.staging_slots = 3;
  options.device.seed = seed;
  options.device.fail = [&](absl::string_view operation, absl::string_view what) {
    if (operations++ != failing) return absl::OkStatus();
    failed = absl::StrCat(operation, " ", what);
    has_failed = true;
    return absl::Status(error.code(), absl::StrCat(error.message(), " (", failed, ")"));
  };
  // Payloads on the device cannot be looked at here once it is lost.
  if (on_device) {
    options.push = [](client::GradientPush push) {
      push.released();
      return absl::OkStatus();
    };
  }
  PipelineRank rank(options);
  OptimizersMemory memory(rank.job(), 0, options.wire_dtype);
  const auto run = [&]() -> absl::Status {
    BALLAST_RETURN_IF_ERROR(rank.Create());
    if (where == Where::kOptimizersMemory) {
      BALLAST_RETURN_IF_ERROR(
          rank.backend().UseGradientMemory([&](int chunk) { return memory.at(chunk); }));
    }
    for (uint64_t step = 1; step <= 2; ++step) {
      if (on_device) {
        BALLAST_RETURN_IF_ERROR(rank.backend().GatherWeights());
      } else if (where == Where::kRing || step == 1) {
        BALLAST_RETURN_IF_ERROR(rank.GiveWeights(step - 1, seed + step));
      } else {
        BALLAST_RETURN_IF_ERROR(GiveWeightsAhead(rank, step - 1, seed + step));
      }
      BALLAST_RETURN_IF_ERROR(rank.Passes(step).status());
    }
    std::vector<std::byte> weights(16);
    return rank.backend().ReadWeights(0, absl::MakeSpan(weights));
  };
  const absl::Status status = run();
  const bool failed_in_time = has_failed;
  rank.ExpectRightBytes();
  // The device aborts if its copies still use memory that goes.
  if (where == Where::kOptimizersMemory && rank.created()) {
    rank.backend().UseGradientMemory([](int) { return absl::Span<std::byte>(); }).IgnoreError();
    rank.backend().UseWeightsMemory([](int) { return absl::Span<std::byte>(); }).IgnoreError();
    memory.memory = {};
    rank.ForgetWeightsMemory();
  }
  rank.Destroy();
  if (failed_in_time) EXPECT_THAT(status.message(), HasSubstr(failed));
  return {.status = status, .operations = operations, .failed = failed_in_time};
}

class DeviceBackendFailures : public testing::TestWithParam<std::tuple<uint64_t, Where>> {};
// Each run is as long as a step, and there are some 1,500.
INSTANTIATE_TEST_SUITE_P(Seeds, DeviceBackendFailures,
                         testing::Combine(testing::Values(uint64_t{1}),
                                          testing::Values(Where::kRing, Where::kOptimizersMemory,
                                                          Where::kOnDevice)));

// Whatever operation the device is lost at, that is the error, and nothing wrong is handed over.
TEST_P(DeviceBackendFailures, AtEachOperationALostDeviceEndsTheRunWithItsError) {
  const auto [seed, where] = GetParam();
  const Outcome whole = RunUntilItFails(seed, where, -1, absl::OkStatus());
  ASSERT_TRUE(whole.status.ok()) << whole.status;
  ASSERT_GT(whole.operations, 200);
  for (int failing = 0; failing < whole.operations; ++failing) {
    SCOPED_TRACE(testing::Message() << "operation " << failing);
    const Outcome run =
        RunUntilItFails(seed, where, failing, absl::UnavailableError("GPU 0 is lost"));
    ASSERT_EQ(run.status.ok(), !run.failed) << run.status;
    if (!run.failed) continue;
    EXPECT_EQ(run.status.code(), absl::StatusCode::kUnavailable);
    EXPECT_THAT(run.status.message(), HasSubstr("GPU 0 is lost"));
  }
}

TEST_P(DeviceBackendFailures, AtEachOperationAnErrorOfTheDeviceEndsTheRunWithIt) {
  const auto [seed, where] = GetParam();
  const Outcome whole = RunUntilItFails(seed, where, -1, absl::OkStatus());
  for (int failing = 0; failing < whole.operations; ++failing) {
    SCOPED_TRACE(testing::Message() << "operation " << failing);
    const Outcome run =
        RunUntilItFails(seed, where, failing, absl::InternalError("the driver failed"));
    ASSERT_EQ(run.status.ok(), !run.failed) << run.status;
    if (!run.failed) continue;
    EXPECT_EQ(run.status.code(), absl::StatusCode::kInternal);
    EXPECT_THAT(run.status.message(), HasSubstr("the driver failed"));
  }
}

TEST(DeviceBackendErrors, AfterAFailureEveryCallSaysItAndNothingIsHandedOver) {
  std::atomic<bool> lost = false;
  RankOptions options;
  options.device.fail = [&](absl::string_view, absl::string_view) {
    return lost ? absl::UnavailableError("GPU 0 is lost") : absl::OkStatus();
  };
  PipelineRank rank(options);
  ASSERT_TRUE(rank.Create().ok());
  ASSERT_TRUE(rank.GiveWeights(0, 1).ok());
  ASSERT_TRUE(rank.Passes(1).ok());
  lost = true;
  const size_t pushed = rank.pushed().size();
  EXPECT_THAT(rank.MicroStep(2, 0).message(), HasSubstr("step 2 micro-step 0: GPU 0 is lost"));
  for (int again = 0; again < 2; ++again) {
    EXPECT_THAT(rank.MicroStep(2, 0).message(), HasSubstr("GPU 0 is lost"));
    EXPECT_THAT(rank.backend().FinishStep().status().message(), HasSubstr("GPU 0 is lost"));
    rank.backend().OnWeights(0);
    EXPECT_THAT(rank.backend().GatherWeights().message(), HasSubstr("GPU 0 is lost"));
    std::vector<std::byte> weights(16);
    EXPECT_THAT(rank.backend().ReadWeights(0, absl::MakeSpan(weights)).message(),
                HasSubstr("GPU 0 is lost"));
  }
  EXPECT_EQ(rank.pushed().size(), pushed);
}

TEST(DeviceBackendErrors, WhatWasAbortedIsNoGradientAndNoWeightThoughTheDeviceIsWell) {
  std::atomic<bool> aborted = false;
  RankOptions options;
  options.finish = [&] {
    return aborted ? absl::DeadlineExceededError("rank 0: not done in time") : absl::OkStatus();
  };
  for (const bool at_reduction : {true, false}) {
    aborted = false;
    PipelineRank rank(options);
    ASSERT_TRUE(rank.Create().ok());
    ASSERT_TRUE(rank.GiveWeights(0, 1).ok());
    ASSERT_TRUE(rank.Passes(1).ok());
    if (at_reduction) {
      aborted = true;
      EXPECT_THAT(rank.Passes(2).status().message(), HasSubstr("not done in time"));
    } else {
      ASSERT_TRUE(rank.GiveWeights(1, 1).ok());
      aborted = true;
      std::vector<std::byte> weights(16);
      EXPECT_THAT(rank.backend().ReadWeights(0, absl::MakeSpan(weights)).message(),
                  HasSubstr("not done in time"));
    }
  }
}

TEST(DeviceBackendErrors, EndsWhateverIsOnItsWay) {
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    {
      PipelineRank rank({.micro_steps = 2, .device = {.seed = seed}});
      ASSERT_TRUE(rank.Create().ok());
    }
    for (const bool fails : {false, true}) {
      RankOptions options{.micro_steps = 2, .device = {.seed = seed}};
      options.script.before_gradient = [&](const PassPosition& at, int parameter) {
        return fails && parameter == 2 ? absl::InternalError("a kernel failed") : absl::OkStatus();
      };
      PipelineRank rank(options);
      ASSERT_TRUE(rank.Create().ok());
      for (const int chunk : rank.job().layout.chunks_of_rank(0)) {
        rank.WriteWeights(0, chunk);
        rank.backend().OnWeights(chunk);
      }
      ASSERT_TRUE(rank.backend().GatherWeights().ok());
      EXPECT_EQ(rank.MicroStep(1, 0).ok(), !fails);  // And no FinishStep.
      rank.Destroy();
      rank.ExpectRightBytes();
    }
  }
}

// ---------------------------------------------------------------- memory

TEST(DeviceBackendErrors, WorksWithMemoryThatCannotBePinned) {
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    PipelineRank rank({.micro_steps = 2, .device = {.seed = seed, .can_pin = false}});
    ASSERT_TRUE(rank.Create().ok());
    for (uint64_t step = 1; step <= 2; ++step) {
      ASSERT_TRUE(rank.GiveWeights(step - 1, seed + step).ok());
      ASSERT_TRUE(rank.Passes(step).ok());
      rank.ExpectRead((step - 1) * 2, step - 1);
    }
    rank.ExpectWhole(2);
  }
}

TEST(DeviceBackendErrors, SaysWhatAModelThatDoesNotFitNeedsAndWhatToMakeSmaller) {
  for (const Accumulation accumulation : {Accumulation::kService, Accumulation::kWorker}) {
    RankOptions options{.micro_steps = 2};
    if (accumulation == Accumulation::kWorker) options.update_mode = UpdateMode::kSpeculate;
    options.backend.accumulation = accumulation;
    options.device.memory_bytes = 20000;
    PipelineRank rank(options);
    EXPECT_TRUE(Refused(rank.Create(), absl::StatusCode::kResourceExhausted));
  }
}

TEST(DeviceBackendErrors, MemoryThatTheHostLacksIsNotExplainedAsTheGpus) {
  RankOptions options;
  options.device.fail = [](absl::string_view operation, absl::string_view what) {
    return operation == "allocate host" && absl::StrContains(what, "staging")
               ? absl::ResourceExhaustedError("this host has no memory for staging")
               : absl::OkStatus();
  };
  PipelineRank rank(options);
  EXPECT_TRUE(Refused(rank.Create(), absl::StatusCode::kResourceExhausted));
}

TEST(DeviceBackendErrors, RefusesWeightsInAnotherFormatThanThePasses) {
  FakeDevice device;
  const std::unique_ptr<DeviceMatmul> matmul = MakeFakeMatmul();
  const std::unique_ptr<DeviceCollective> collective = MakeSingleDeviceCollective(device);
  const TrainingJob job =
      MakeTrainingJob(ScriptedParameters(), {.weights_dtype = DType::kFloat32}).value();
  const absl::Status status =
      MakeDeviceBackendOf({}, {device, *matmul, *collective, job}, ScriptedBackwardOrder(),
                          [](const DeviceGptParts&) -> absl::StatusOr<std::unique_ptr<DeviceGpt>> {
                            return absl::InternalError("not asked");
                          })
          .status();
  EXPECT_TRUE(Refused(status, absl::StatusCode::kInvalidArgument));
}

}  // namespace
}  // namespace ballast::worker
