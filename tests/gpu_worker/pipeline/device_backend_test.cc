// The pipeline of gradients and weights around the passes, on a device that does its work as late
// and in as odd an order as streams and events allow. Weights that come while the next pass begins
// are in device_backend_ahead_test.cc, the whole training in device_training_test.cc, what goes
// wrong in device_backend_errors_test.cc.
#include "gpu_worker/pipeline/device_backend.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>
#include <thread>
#include <tuple>

#include "tests/gpu_worker/collective/every_world.h"
#include "tests/gpu_worker/collective/ranks.h"
#include "tests/gpu_worker/pipeline/one_shot_event.h"
#include "tests/gpu_worker/pipeline/pipeline_rank.h"

namespace ballast::worker {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

constexpr uint64_t kSeeds = 8;

// Runs the ranks of a world, each on a device whose seed is its own.
void RunWorld(int world_size, const RankOptions& options, uint64_t seed,
              const std::function<void(PipelineRank&)>& body) {
  const auto run = [&](Collective* host) {
    RankOptions own = options;
    own.device.seed = seed + (host == nullptr ? 0 : host->rank());
    PipelineRank rank(own, host);
    ASSERT_TRUE(rank.Create().ok());
    body(rank);
  };
  if (world_size == 1) return run(nullptr);
  RunRanks(world_size, [&](Collective& host) { run(&host); });
}

class DeviceBackendWorlds : public testing::TestWithParam<World> {};

INSTANTIATE_TEST_SUITE_P(Worlds, DeviceBackendWorlds, EveryWorld(), NameOfWorld);

TEST_P(DeviceBackendWorlds, EachChunkGoesOutOnceWithItsBytesAndWeightsComeBackBeforeTheyAreRead) {
  const auto [world_size, micro_steps, wire_dtype, accumulation] = GetParam();
  const RankOptions options{.wire_dtype = wire_dtype,
                            .micro_steps = micro_steps,
                            .backend = {.accumulation = accumulation}};
  const uint64_t seeds = world_size == 1 ? kSeeds : kSeeds / 2;
  for (uint64_t seed = 0; seed < seeds; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    RunWorld(world_size, options, seed, [&, micro_steps = micro_steps](PipelineRank& rank) {
      ASSERT_TRUE(rank.GiveWeights(0, seed).ok());
      for (uint64_t step = 1; step <= 3; ++step) {
        const absl::StatusOr<FinishedStep> finished = rank.Passes(step);
        ASSERT_TRUE(finished.ok()) << finished.status();
        double loss = 0;
        for (uint32_t m = 0; m < micro_steps; ++m) {
          loss += ScriptedPasses::LossOf({step, m});
          rank.ExpectRead((step - 1) * micro_steps + m, step - 1);
        }
        EXPECT_EQ(finished->loss_sum, loss);
        ASSERT_TRUE(rank.GiveWeights(step, seed + step).ok());
      }
      rank.ExpectWhole(3);
      for (int group = 0; group < rank.job().layout.group_count(); ++group) {
        std::vector<uint16_t> weights(rank.job().layout.flat_elements(group));
        ASSERT_TRUE(rank.backend()
                        .ReadWeights(group, {reinterpret_cast<std::byte*>(weights.data()),
                                             weights.size() * sizeof(uint16_t)})
                        .ok());
        for (size_t i = 0; i < weights.size(); ++i) ASSERT_EQ(weights[i], WeightOf(3, group, i));
      }
    });
  }
}

// Ranks whose buckets become ready in different orders still reduce in one.
TEST(DeviceBackend, ReducesInTheSameOrderOnRanksWhoseBackwardLeavesOutOtherParameters) {
  RankOptions options{.micro_steps = 2};
  // The same on both ranks, for Expected; another in each micro-step.
  options.script.reaches = [](const PassPosition& at, int parameter) {
    return parameter != static_cast<int>(at.step + at.micro_step) % 5;
  };
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    RunWorld(2, options, seed, [&](PipelineRank& rank) {
      for (uint64_t step = 1; step <= 2; ++step) ASSERT_TRUE(rank.Passes(step).ok());
      rank.ExpectWhole(2);
      for (const Ended& ended : rank.ended()) {
        EXPECT_FALSE(ended.used.all);
        EXPECT_EQ(ended.used.parameters.size(), ScriptedParameters().size() - 1);
        EXPECT_THAT(ended.used.parameters,
                    testing::Not(testing::Contains((ended.step + ended.micro_step) % 5)));
      }
    });
  }
}

TEST(DeviceBackend, MultipliesByTheLossScaleAndSaysThatAllWereUsed) {
  PipelineRank rank({.wire_dtype = DType::kFloat32});
  ASSERT_TRUE(rank.Create().ok());
  ASSERT_TRUE(rank.MicroStep(1, 0, /*loss_scale=*/4).ok());
  ASSERT_TRUE(rank.backend().FinishStep().ok());
  ASSERT_FALSE(rank.pushed().empty());
  for (const Pushed& push : rank.pushed()) {
    const Chunk& chunk = rank.job().layout.chunks()[push.chunk];
    for (int64_t i = 0; i < chunk.elements; ++i) {
      if (rank.job().layout.ParameterAt(chunk.group, chunk.begin + i) < 0) continue;
      EXPECT_EQ(LoadElement(push.payload.data(), DType::kFloat32, i),
                4 * GradientOf(0, {1, 0}, chunk.group, chunk.begin + i));
    }
  }
  ASSERT_EQ(rank.ended().size(), 1);
  EXPECT_TRUE(rank.ended()[0].used.all);
}

// ---------------------------------------------------------------- overlap and backpressure

TEST(DeviceBackend, GivesTheNextMicroStepsPassesWhileTheLastOnesShardsWait) {
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    OneShotEvent door;
    PipelineRank* self = nullptr;
    RankOptions options{.micro_steps = 3, .device = {.seed = seed}};
    options.backend.staging_slots = 64;  // All that the three micro-steps have.
    options.push = [&](client::GradientPush push) {
      EXPECT_TRUE(door.Wait()) << "the passes waited for the sink";
      self->Note(push);
      push.released();
      return absl::OkStatus();
    };
    PipelineRank rank(options);
    self = &rank;
    ASSERT_TRUE(rank.Create().ok());
    for (uint32_t m = 0; m < 3; ++m) ASSERT_TRUE(rank.MicroStep(1, m).ok());
    EXPECT_THAT(rank.pushed(), IsEmpty());
    door.Open();
    ASSERT_TRUE(rank.backend().FinishStep().ok());
    rank.ExpectWhole(1);
  }
}

TEST(DeviceBackend, HandsOverTheFirstShardsBeforeBackwardHasGivenTheLastGradient) {
  OneShotEvent first_push;
  PipelineRank* self = nullptr;
  RankOptions options;
  options.script.before_gradient = [&](const PassPosition& at, int parameter) {
    if (parameter == ScriptedBackwardOrder().back()) EXPECT_TRUE(first_push.Wait());
    return absl::OkStatus();
  };
  options.push = [&](client::GradientPush push) {
    self->Note(push);
    push.released();
    first_push.Open();
    return absl::OkStatus();
  };
  PipelineRank rank(options);
  self = &rank;
  ASSERT_TRUE(rank.Create().ok());
  ASSERT_TRUE(rank.Passes(1).ok());
  rank.ExpectWhole(1);
}

TEST(DeviceBackend, HasNoMoreShardsOutThanSlotsWhenTheOptimizerIsSlow) {
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    std::mutex mutex;
    std::condition_variable changed;
    std::deque<client::GradientPush> out;
    size_t most = 0;
    bool over = false;
    PipelineRank* self = nullptr;
    RankOptions options{.micro_steps = 2, .device = {.seed = seed}};
    options.backend.staging_slots = 2;
    options.push = [&](client::GradientPush push) {
      const std::lock_guard<std::mutex> lock(mutex);
      out.push_back(std::move(push));
      most = std::max(most, out.size());
      changed.notify_all();
      return absl::OkStatus();
    };
    PipelineRank rank(options);
    self = &rank;
    // Takes one at a time, and reads it only then: a slot that is reused too early shows.
    std::thread optimizer([&] {
      std::unique_lock<std::mutex> lock(mutex);
      while (true) {
        changed.wait(lock, [&] { return over || !out.empty(); });
        if (out.empty()) return;
        const client::GradientPush push = out.front();
        self->Note(push);
        out.pop_front();
        lock.unlock();
        push.released();
        lock.lock();
      }
    });
    ASSERT_TRUE(rank.Create().ok());
    for (uint64_t step = 1; step <= 2; ++step) {
      ASSERT_TRUE(rank.Passes(step).ok());
      // What is pushed may still be out: what it is noted as is the step's.
      std::unique_lock<std::mutex> lock(mutex);
      while (!out.empty()) {
        lock.unlock();
        std::this_thread::yield();
        lock.lock();
      }
    }
    {
      const std::lock_guard<std::mutex> lock(mutex);
      over = true;
      changed.notify_all();
    }
    optimizer.join();
    EXPECT_LE(most, 2);
    rank.ExpectRightBytes();
    EXPECT_EQ(rank.pushed().size(), 2 * 2 * rank.job().layout.chunks_of_rank(0).size());
  }
}

// ---------------------------------------------------------------- the optimizer's memory

TEST(DeviceBackend, CopiesStraightIntoTheOptimizersMemoryWhichIsPinnedOnce) {
  for (const bool half : {false, true}) {  // For the other half the optimizer has none.
    std::atomic<int> pins = 0;
    PipelineRank* self = nullptr;
    OptimizersMemory* optimizers = nullptr;
    const auto at = [&](int chunk) {
      return half && chunk % 2 == 1 ? absl::Span<std::byte>() : optimizers->at(chunk);
    };
    RankOptions options{.micro_steps = 2};
    options.device.seed = 1;
    options.device.fail = [&](absl::string_view operation, absl::string_view what) {
      pins += operation == "pin";
      return absl::OkStatus();
    };
    options.push = [&](client::GradientPush push) {
      if (!at(push.chunk).empty()) EXPECT_EQ(push.payload.data(), at(push.chunk).data());
      self->Note(push);
      push.released();
      return absl::OkStatus();
    };
    PipelineRank rank(options);
    self = &rank;
    OptimizersMemory memory(rank.job(), 0, options.wire_dtype);
    optimizers = &memory;
    ASSERT_TRUE(rank.Create().ok());
    pins = 0;  // The weights' is there.
    ASSERT_TRUE(rank.backend().UseGradientMemory(at).ok());
    if (!half) EXPECT_EQ(pins, 1);  // Half of it may have gaps at the edges of pages.
    ASSERT_TRUE(rank.Passes(1).ok());
    rank.ExpectWhole(1);
    // As after a lost session: the memory goes, and other memory comes.
    ASSERT_TRUE(rank.backend().UseGradientMemory([](int) { return absl::Span<std::byte>(); }).ok());
    OptimizersMemory other(rank.job(), 0, options.wire_dtype);
    optimizers = &other;
    memory = OptimizersMemory(rank.job(), 0, options.wire_dtype);
    ASSERT_TRUE(rank.backend().UseGradientMemory(at).ok());
    ASSERT_TRUE(rank.Passes(2).ok());
    rank.ExpectWhole(2);
    rank.Destroy();
  }
}

// ---------------------------------------------------------------- the optimizer on the device

TEST(DeviceBackend, LeavesGradientsAndWeightsOnTheDeviceForAnOptimizerThere) {
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    PipelineRank* self = nullptr;
    std::unique_ptr<DeviceStream> stream;
    std::atomic<int> copies_out = 0;
    RankOptions options{.micro_steps = 2};
    options.backend.on_device = true;
    options.device = {.seed = seed, .fail = [&](absl::string_view, absl::string_view what) {
                        copies_out += what == "copy_out" || what == "copy_in";
                        return absl::OkStatus();
                      }};
    options.push = [&](client::GradientPush push) {
      std::vector<std::byte> bytes(push.payload.size());
      EXPECT_TRUE(stream->CopyToHost(absl::MakeSpan(bytes), push.payload.data()).ok());
      EXPECT_TRUE(stream->Synchronize().ok());
      push.payload = bytes;
      self->Note(push);
      push.released();
      return absl::OkStatus();
    };
    PipelineRank rank(options);
    self = &rank;
    stream = rank.device().CreateStream("optimizer").value();
    ASSERT_TRUE(rank.Create().ok());
    copies_out = 0;
    for (uint64_t step = 1; step <= 2; ++step) {
      for (const int index : rank.job().layout.chunks_of_rank(0)) {
        const Chunk& chunk = rank.job().layout.chunks()[index];
        std::vector<uint16_t> weights(chunk.elements);
        for (int64_t i = 0; i < chunk.elements; ++i) {
          weights[i] = WeightOf(step - 1, chunk.group, chunk.begin + i);
        }
        const absl::Span<std::byte> to = rank.backend().weights(index);
        ASSERT_TRUE(
            stream
                ->CopyToDevice(to.data(),
                               {reinterpret_cast<const std::byte*>(weights.data()), to.size()})
                .ok());
        ASSERT_TRUE(stream->Synchronize().ok());
      }
      ASSERT_TRUE(rank.backend().GatherWeights().ok());
      ASSERT_TRUE(rank.Passes(step).ok());
      rank.ExpectRead((step - 1) * 2, step - 1);
    }
    rank.ExpectWhole(2);
    EXPECT_EQ(copies_out, 0);
    stream.reset();
  }
}

// ---------------------------------------------------------------- the timeline

TEST(DeviceBackend, TellsATimelineWhatItsStreamsDid) {
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    Timeline timeline({});
    const Timeline::Clock::time_point before = Timeline::Clock::now();
    PipelineRank rank({.micro_steps = 2, .device = {.seed = seed}, .timeline = &timeline});
    ASSERT_TRUE(rank.Create().ok());
    ASSERT_TRUE(rank.GiveWeights(0, seed).ok());
    ASSERT_TRUE(rank.Passes(1).ok());
    rank.Destroy();  // All that was given is announced then.
    const size_t buckets = rank.job().buckets.size();
    const size_t chunks = rank.job().layout.chunks_of_rank(0).size();
    std::map<std::string, size_t> spans;
    const nlohmann::json file = nlohmann::json::parse(timeline.ToJson());
    for (const nlohmann::json& event : file["traceEvents"]) {
      if (event["ph"] != "X") continue;
      ++spans[event["cat"]];
      using Microseconds = std::chrono::duration<double, std::micro>;
      const Microseconds began(event["ts"].get<double>());
      const Microseconds ended(event["ts"].get<double>() + event["dur"].get<double>());
      // The file drops fractions of a microsecond.
      EXPECT_GE(began, before.time_since_epoch() - std::chrono::microseconds(1));
      EXPECT_LE(ended, Timeline::Clock::now().time_since_epoch() + std::chrono::microseconds(1));
      EXPECT_GE(event["dur"].get<double>(), 0);
    }
    EXPECT_EQ(spans["compute"], 2);
    EXPECT_EQ(spans["reduce"], 2 * buckets);
    // Gradients to slots of their own, weights from memory in which neighbours follow one another.
    EXPECT_EQ(spans["copy"], 2 * chunks + buckets);
    EXPECT_EQ(spans["send"], rank.hand_overs());
    EXPECT_GE(rank.hand_overs(), 2 * buckets);
    EXPECT_LE(rank.hand_overs(), 2 * chunks);
    EXPECT_EQ(spans["gather"], buckets);
    EXPECT_LE(spans["stall"], buckets);  // Those that were not there in time.
    if (seed % 4 == 0) EXPECT_GT(spans["stall"], 0);
  }
}

// A large model has thousands of chunks, and tens of them to a bucket.
TEST(DeviceBackend, CopiesNeighboursAtOnceWithOneEventForABucket) {
  std::map<std::string, int> asked;
  std::mutex mutex;
  RankOptions options{.micro_steps = 2};
  options.device.fail = [&](absl::string_view operation, absl::string_view what) {
    const std::lock_guard lock(mutex);
    ++asked[absl::StrCat(operation, " ", what)];
    return absl::OkStatus();
  };
  PipelineRank rank(options);
  ASSERT_TRUE(rank.Create().ok());
  OptimizersMemory gradients(rank.job(), 0, DType::kBFloat16);
  ASSERT_TRUE(
      rank.backend().UseGradientMemory([&](int chunk) { return gradients.at(chunk); }).ok());
  ASSERT_TRUE(rank.GiveWeights(0, 1).ok());
  ASSERT_TRUE(rank.Passes(1).ok());
  rank.ExpectWhole(1);
  rank.Destroy();  // Before the optimizer's memory.
  const auto buckets = static_cast<int>(rank.job().buckets.size());
  ASSERT_GT(rank.job().layout.chunks().size(), rank.job().buckets.size());
  const std::lock_guard lock(mutex);
  EXPECT_EQ(asked["copy to host copy_out"], 2 * buckets);
  EXPECT_EQ(asked["record copy_out"], 2 * 2 * buckets);  // There, and copied out.
  EXPECT_EQ(rank.hand_overs(), 2 * rank.job().buckets.size());
  EXPECT_EQ(asked["copy to device copy_in"], buckets);
}

// ---------------------------------------------------------------- gradients that are not finite

TEST(DeviceBackend, NamesTheFirstElementThatIsNotFiniteWithTheValueThatTravels) {
  for (const Accumulation accumulation : {Accumulation::kService, Accumulation::kWorker}) {
    for (uint64_t seed = 0; seed < kSeeds; ++seed) {
      RankOptions options{
          .wire_dtype = DType::kFloat16, .micro_steps = 2, .device = {.seed = seed}};
      options.backend.accumulation = accumulation;
      options.backend.check_gradients = true;
      // 70000 is finite until it is rounded to fp16. Parameter 2 follows 0 in the decay group.
      options.script.other = [](const PassPosition& at, int group,
                                int64_t offset) -> std::optional<float> {
        if (at.step != 2 || at.micro_step != 1 || group != kDecayGroup) return std::nullopt;
        if (offset == 700 + 333) return -70000.0f;
        if (offset == 700 + 334) return std::numeric_limits<float>::quiet_NaN();
        if (offset == 700 + 620 + 5) return std::numeric_limits<float>::infinity();
        return std::nullopt;
      };
      PipelineRank rank(options);
      ASSERT_TRUE(rank.Create().ok());
      for (uint64_t step = 1; step <= 3; ++step) ASSERT_TRUE(rank.Passes(step).ok());
      for (const Ended& ended : rank.ended()) {
        const bool bad = ended.step == 2 && ended.micro_step == 1;
        ASSERT_EQ(ended.used.non_finite.has_value(), bad);
        if (!bad) continue;
        EXPECT_EQ(ended.used.non_finite->parameter, 2);
        EXPECT_EQ(ended.used.non_finite->element, 333);
        EXPECT_EQ(ended.used.non_finite->value, -std::numeric_limits<float>::infinity());
      }
    }
  }
}

}  // namespace
}  // namespace ballast::worker
