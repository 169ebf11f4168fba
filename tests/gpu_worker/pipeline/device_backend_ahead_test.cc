// Weights on their way back, on a device that does its work as late and in as odd an order as
// streams and events allow: announced as they arrive, provisional, and while the next step's first
// forward pass is given; and the times that a step reports of it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <thread>
#include <utility>

#include "gpu_worker/pipeline/device_backend.h"
#include "tests/gpu_worker/collective/ranks.h"
#include "tests/gpu_worker/pipeline/one_shot_event.h"
#include "tests/gpu_worker/pipeline/pipeline_rank.h"
#include "tests/support/eventually.h"

namespace ballast::worker::device_backend_ahead_test {
namespace {

using testing::HasSubstr;

constexpr uint64_t kSeeds = 8;
// Seeds that have the device do all at once.
constexpr uint64_t kPromptSeed = 3;

constexpr uint64_t kWrong = 1000;  // A step whose weights no pass may read.

// Whether a chunk is in the bucket that a forward pass needs first, that of its first parameter,
// "a".
bool IsFirst(const PipelineRank& rank, int chunk) {
  const Layout& layout = rank.job().layout;
  return layout.chunks()[chunk].group == layout.spec().parameters[0].group &&
         layout.chunks()[chunk].begin < 768;  // The bucket's elements.
}

class DeviceBackendAhead : public testing::TestWithParam<UpdateMode> {};
INSTANTIATE_TEST_SUITE_P(Modes, DeviceBackendAhead,
                         testing::Values(UpdateMode::kWait, UpdateMode::kSpeculate),
                         [](const auto& info) {
                           return info.param == UpdateMode::kWait ? "Wait" : "Speculate";
                         });

TEST_P(DeviceBackendAhead, EachPassReadsTheWeightsOfItsStepHoweverTheyCome) {
  for (const int world_size : {1, 2}) {
    for (uint64_t seed = 0; seed < kSeeds; ++seed) {
      SCOPED_TRACE(testing::Message() << world_size << " ranks, seed " << seed);
      const auto run = [&](Collective* host) {
        RankOptions options{.micro_steps = 2, .update_mode = GetParam(), .device = {.seed = seed}};
        if (host != nullptr) options.device.seed += host->rank();
        PipelineRank rank(options, host);
        ASSERT_TRUE(rank.Create().ok());
        ASSERT_TRUE(rank.GiveWeights(0, seed).ok());
        for (uint64_t step = 1; step <= 4; ++step) {
          ASSERT_TRUE(rank.Passes(step).ok());
          ASSERT_TRUE(rank.GiveWeightsUnderForward(step,
                                                   [&] {
                                                     for (const int chunk :
                                                          rank.Shuffled(seed + step)) {
                                                       rank.TellWeights(step, chunk);
                                                     }
                                                   })
                          .ok());
        }
        for (uint64_t step = 1; step <= 4; ++step) {
          rank.ExpectRead(2 * (step - 1), step - 1);
          rank.ExpectRead(2 * (step - 1) + 1, step - 1);
        }
        rank.ExpectWhole(4);
      };
      if (world_size == 1) {
        run(nullptr);
      } else {
        RunRanks(world_size, [&](Collective& host) { run(&host); });
      }
    }
  }
}

// The chunks of its first bucket come, and the rest once the pass has given what reads it.
TEST_P(DeviceBackendAhead, TheForwardPassBeginsWithTheFirstBucketsWhileOtherWeightsAreMissing) {
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    OneShotEvent begun;
    RankOptions options{.update_mode = GetParam(), .device = {.seed = seed}};
    options.script.after_forward = [&](const PassPosition& at, int parameter) {
      if (at.step == 2 && parameter == 0) begun.Open();
      return absl::OkStatus();
    };
    PipelineRank rank(options);
    ASSERT_TRUE(rank.Create().ok());
    ASSERT_TRUE(rank.GiveWeights(0, seed).ok());
    ASSERT_TRUE(rank.Passes(1).ok());
    ASSERT_TRUE(rank.GiveWeightsUnderForward(1,
                                             [&] {
                                               for (const int chunk : rank.Shuffled(seed)) {
                                                 if (IsFirst(rank, chunk))
                                                   rank.TellWeights(1, chunk);
                                               }
                                               EXPECT_TRUE(begun.Wait())
                                                   << "the pass waited for all weights";
                                               for (const int chunk : rank.Shuffled(seed)) {
                                                 if (!IsFirst(rank, chunk))
                                                   rank.TellWeights(1, chunk);
                                               }
                                             })
                    .ok());
    ASSERT_TRUE(rank.Passes(2).ok());
    rank.ExpectRead(1, 1);
  }
}

// ---------------------------------------------------------------- provisional weights

// Each as soon as the chunk's gradient is final, while the pass goes on. Some stand, some are
// dropped and arrive again, some are never provisional.
TEST(DeviceBackendAhead, WeightsAheadOfTheDecisionAreReadIfTheyStandAndNeverIfNot) {
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    PipelineRank* self = nullptr;
    uint64_t step = 1;
    RankOptions options{
        .micro_steps = 2, .update_mode = UpdateMode::kSpeculate, .device = {.seed = seed}};
    options.push = [&](client::GradientPush push) {
      self->Note(push);
      push.released();
      if (!push.final || push.chunk % 3 == 2) return absl::OkStatus();
      self->WriteWeights(push.chunk % 3 == 0 ? step : kWrong, push.chunk);
      self->backend().OnProvisionalWeights(push.chunk);
      return absl::OkStatus();
    };
    PipelineRank rank(options);
    self = &rank;
    ASSERT_TRUE(rank.Create().ok());
    ASSERT_TRUE(rank.GiveWeights(0, seed).ok());
    for (; step <= 3; ++step) {
      ASSERT_TRUE(rank.Passes(step).ok());
      ASSERT_TRUE(rank.GiveWeightsUnderForward(step,
                                               [&] {
                                                 for (const int chunk :
                                                      rank.Shuffled(seed + step)) {
                                                   if (chunk % 3 == 1)
                                                     rank.backend().OnDroppedWeights(chunk);
                                                   if (chunk % 3 != 0)
                                                     rank.WriteWeights(step, chunk);
                                                   rank.backend().OnWeights(chunk);
                                                 }
                                               })
                      .ok());
    }
    ASSERT_TRUE(rank.Passes(4).ok());
    for (size_t pass = 0; pass < 8; ++pass) rank.ExpectRead(pass, pass / 2);
    rank.ExpectRightBytes();
  }
}

TEST(DeviceBackendAhead, WeightsAheadOfAStepThatIsSkippedAreNeverRead) {
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    PipelineRank rank({.update_mode = UpdateMode::kSpeculate, .device = {.seed = seed}});
    ASSERT_TRUE(rank.Create().ok());
    ASSERT_TRUE(rank.GiveWeights(0, seed).ok());
    ASSERT_TRUE(rank.Passes(1).ok());
    for (const int chunk : rank.Shuffled(seed)) {
      rank.WriteWeights(kWrong, chunk);
      rank.backend().OnProvisionalWeights(chunk);
    }
    for (const int chunk : rank.Shuffled(seed)) rank.backend().OnDroppedWeights(chunk);
    ASSERT_TRUE(rank.Passes(2).ok());
    rank.ExpectRead(1, 0);
    // None of step 2's comes ahead.
    ASSERT_TRUE(rank.GiveWeightsUnderForward(2,
                                             [&] {
                                               for (const int chunk : rank.Shuffled(seed))
                                                 rank.TellWeights(2, chunk);
                                             })
                    .ok());
    ASSERT_TRUE(rank.Passes(3).ok());
    rank.ExpectRead(2, 2);
  }
}

// ---------------------------------------------------------------- weights that do not come

TEST(DeviceBackendAhead, AbandonedWeightsHoldUpNoRankAndTheNextOnesAreRead) {
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    RunRanks(2, [&](Collective& host) {
      RankOptions options{.update_mode = UpdateMode::kSpeculate, .device = {.seed = seed}};
      options.device.seed += host.rank();
      PipelineRank rank(options, &host);
      ASSERT_TRUE(rank.Create().ok());
      ASSERT_TRUE(rank.GiveWeights(0, seed).ok());
      ASSERT_TRUE(rank.Passes(1).ok());
      const std::vector<int> chunks = rank.Shuffled(seed);
      ASSERT_TRUE(rank.GiveWeightsUnderForward(1,
                                               [&] {
                                                 for (const int chunk : chunks) {
                                                   if (host.rank() == 0 || chunk % 2 == 0)
                                                     rank.TellWeights(kWrong, chunk);
                                                 }
                                                 if (host.rank() == 1)
                                                   rank.backend().AbandonWeights();
                                               })
                      .ok());
      // As when all have joined again.
      ASSERT_TRUE(rank.UseWeightsMemory().ok());
      ASSERT_TRUE(rank.GiveWeights(1, seed).ok());
      ASSERT_TRUE(rank.Passes(2).ok());
      rank.ExpectRead(1, 1);
    });
  }
}

// Some have arrived, and the gather waits for the rest.
TEST(DeviceBackendAhead, ABackendThatGoesWaitsForNoWeights) {
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    std::atomic<bool> expected = false;
    OneShotEvent begun;
    RankOptions options{.device = {.seed = seed}};
    options.device.fail = [&](absl::string_view operation, absl::string_view what) {
      if (expected && operation == "record" && what == "communicate") begun.Open();
      return absl::OkStatus();
    };
    PipelineRank rank(options);
    ASSERT_TRUE(rank.Create().ok());
    ASSERT_TRUE(rank.GiveWeights(0, seed).ok());
    ASSERT_TRUE(rank.Passes(1).ok());
    expected = true;
    ASSERT_TRUE(rank.backend().ExpectWeights().ok());
    for (const int chunk : rank.Shuffled(seed)) {
      if (IsFirst(rank, chunk)) rank.TellWeights(1, chunk);
    }
    ASSERT_TRUE(begun.Wait());
    rank.Destroy();
  }
}

TEST(DeviceBackendAhead, ADeviceThatFailsEndsAForwardPassThatWaitsForWeights) {
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    std::atomic<bool> lost = false;
    RankOptions options{.device = {.seed = seed}};
    options.device.fail = [&](absl::string_view, absl::string_view) {
      return lost ? absl::UnavailableError("GPU 0 is lost") : absl::OkStatus();
    };
    PipelineRank rank(options);
    ASSERT_TRUE(rank.Create().ok());
    ASSERT_TRUE(rank.GiveWeights(0, seed).ok());
    ASSERT_TRUE(rank.Passes(1).ok());
    const absl::Status status = rank.GiveWeightsUnderForward(1, [&] {
      lost = true;
      rank.TellWeights(1, rank.Shuffled(seed).front());  // Whose copy fails; no other comes.
      rank.backend().AbandonWeights();
    });
    EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
    EXPECT_THAT(status.message(), HasSubstr("GPU 0 is lost"));
    EXPECT_THAT(rank.MicroStep(2, 0).message(), HasSubstr("GPU 0 is lost"));
  }
}

// ---------------------------------------------------------------- weights

// A step's weights arrived and were announced; then the session was lost, and another, which
// announces nothing, reads the committed weights into the same places.
TEST(DeviceBackendAhead, WeightsThatAreWrittenAgainAfterTheyWereToldAreTheOnesGathered) {
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    PipelineRank rank({.device = {.seed = seed}});
    ASSERT_TRUE(rank.Create().ok());
    for (const int chunk : rank.job().layout.chunks_of_rank(0)) {
      rank.WriteWeights(8, chunk);
      rank.backend().OnWeights(chunk);
    }
    rank.device().Allocate(1, "a wait for all copies").value().reset();
    ASSERT_TRUE(rank.UseWeightsMemory().ok());
    for (const int chunk : rank.job().layout.chunks_of_rank(0)) rank.WriteWeights(7, chunk);
    ASSERT_TRUE(rank.backend().GatherWeights().ok());
    ASSERT_TRUE(rank.Passes(1).ok());
    rank.ExpectRead(0, 7);
  }
}

TEST(DeviceBackendAhead, TakesWeightsFromSeveralThreadsAtOnce) {
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    PipelineRank rank({.device = {.seed = seed}});
    ASSERT_TRUE(rank.Create().ok());
    for (uint64_t step = 0; step < 2; ++step) {
      std::vector<std::thread> threads;
      for (int thread = 0; thread < 3; ++thread) {
        threads.emplace_back([&, thread] {
          for (const int chunk : rank.job().layout.chunks_of_rank(0)) {
            if (chunk % 3 != thread) continue;
            rank.WriteWeights(step, chunk);
            rank.backend().OnWeights(chunk);
          }
        });
      }
      for (std::thread& thread : threads) thread.join();
      ASSERT_TRUE(rank.backend().GatherWeights().ok());
      ASSERT_TRUE(rank.Passes(step + 1).ok());
      rank.ExpectRead(step, step);
    }
  }
}

// ---------------------------------------------------------------- times

// The device's clock, `later` seconds ahead of the host's.
std::function<std::chrono::nanoseconds()> ClockAhead(const std::atomic<int64_t>& later) {
  return [&later] {
    return std::chrono::steady_clock::now().time_since_epoch() + std::chrono::seconds(later);
  };
}

// A busy machine adds to the host's waits, which longer pauses outweigh: tests of them double the
// pause up to this.
constexpr std::chrono::seconds kLongestPause(10);

// Of a step in each of whose four passes the device computes for so long.
FinishedStep TimesOfSlowPasses(std::chrono::milliseconds pause) {
  RankOptions options{.micro_steps = 4, .device = {.seed = kPromptSeed}};
  options.script.other = [&](const PassPosition&, int group, int64_t offset) {
    if (group == 0 && offset == 0) std::this_thread::sleep_for(pause);
    return std::nullopt;
  };
  PipelineRank rank(options);
  EXPECT_TRUE(rank.Create().ok());
  EXPECT_TRUE(rank.GiveWeights(0, 1).ok());
  return rank.Passes(1).value();
}

// The thread that gives the passes is far ahead, and waits for buckets while the device computes.
TEST(DeviceBackendTimes, OfPassesAreTheDevicesAndNotThoseOfTheThreadThatGivesThem) {
  for (std::chrono::milliseconds pause(100);; pause *= 2) {
    const FinishedStep times = TimesOfSlowPasses(pause);
    EXPECT_GE(times.compute_seconds, 4 * absl::ToDoubleSeconds(absl::FromChrono(pause)));
    const double waits = times.reduce_seconds + times.send_seconds + times.weights_seconds;
    if (waits < times.compute_seconds / 2) break;
    ASSERT_LT(pause, kLongestPause)
        << waits << " s of waits, " << times.compute_seconds << " s of passes";
  }
}

// Of a step whose first gradient the optimizer takes only after a pause.
FinishedStep TimesWithAPause(std::chrono::milliseconds pause) {
  PipelineRank* self = nullptr;
  bool first = true;
  RankOptions options{.micro_steps = 3, .device = {.seed = kPromptSeed}};
  options.backend.staging_slots = 1;
  options.push = [&](client::GradientPush push) {
    if (std::exchange(first, false)) std::this_thread::sleep_for(pause);
    self->Note(push);
    push.released();
    return absl::OkStatus();
  };
  PipelineRank rank(options);
  self = &rank;
  EXPECT_TRUE(rank.Create().ok());
  EXPECT_TRUE(rank.GiveWeights(0, 1).ok());
  return rank.Passes(1).value();
}

TEST(DeviceBackendTimes, AnOptimizerThatTakesNothingForAWhileIsTimeOfSending) {
  for (std::chrono::milliseconds pause(100);; pause *= 2) {
    const FinishedStep times = TimesWithAPause(pause);
    const double least = absl::ToDoubleSeconds(absl::FromChrono(pause)) / 2;
    if (times.send_seconds >= least && times.reduce_seconds < times.send_seconds) break;
    ASSERT_LT(pause, kLongestPause)
        << times.send_seconds << " s of sending, " << times.reduce_seconds << " s of reducing";
  }
}

TEST(DeviceBackendTimes, TimeBeforeAStepsFirstKernelIsIdle) {
  std::atomic<int64_t> later = 0;
  PipelineRank rank(
      {.micro_steps = 2, .device = {.seed = kPromptSeed, .clock = ClockAhead(later)}});
  ASSERT_TRUE(rank.Create().ok());
  ASSERT_TRUE(rank.GiveWeights(0, 1).ok());
  later += 5000;  // Nothing was before.
  EXPECT_LT(rank.Passes(1).value().idle_seconds, 100);
  rank.device().Allocate(1, "a wait for all work").value().reset();
  later += 1000;
  ASSERT_TRUE(rank.GiveWeights(1, 1).ok());
  const FinishedStep times = rank.Passes(2).value();
  EXPECT_GT(times.idle_seconds, 900);
  EXPECT_LT(times.idle_seconds, 1100);
  EXPECT_LT(times.compute_seconds, 500);
}

TEST(DeviceBackendTimes, WeightsThatAPassWaitsForAreTimeOfTheStepThatReadsThem) {
  std::atomic<int64_t> later = 0;
  std::atomic<int> readings = 0;
  PipelineRank rank({.device = {.seed = kPromptSeed, .clock = [&, clock = ClockAhead(later)] {
                                  const std::chrono::nanoseconds now = clock();
                                  ++readings;
                                  return now;
                                }}});
  ASSERT_TRUE(rank.Create().ok());
  ASSERT_TRUE(rank.GiveWeights(0, 1).ok());
  ASSERT_TRUE(rank.Passes(1).ok());
  rank.device().Allocate(1, "a wait for all work").value().reset();
  // The end of the idle time, the beginning of the pass, and that of its wait.
  const int waits = readings + 3;
  ASSERT_TRUE(rank.GiveWeightsUnderForward(1,
                                           [&] {
                                             EXPECT_TRUE(
                                                 Eventually([&] { return readings >= waits; }));
                                             later += 1000;
                                             for (const int chunk : rank.Shuffled(1))
                                               rank.TellWeights(1, chunk);
                                           })
                  .ok());
  // What lies between the forward pass and the rest is a wait for the step before, too.
  rank.device().Allocate(1, "a wait for all work").value().reset();
  later += 1000;
  const FinishedStep times = rank.Passes(2).value();
  EXPECT_GT(times.weights_seconds, 1900);
  EXPECT_LT(times.compute_seconds, times.weights_seconds);
  // And none where they were there in time.
  ASSERT_TRUE(rank.GiveWeights(2, 1).ok());
  rank.device().Allocate(1, "a wait for all copies").value().reset();
  EXPECT_LT(rank.Passes(3).value().weights_seconds, times.weights_seconds / 2);
}

}  // namespace
}  // namespace ballast::worker::device_backend_ahead_test
