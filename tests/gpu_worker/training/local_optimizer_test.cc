#include "gpu_worker/training/local_optimizer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "cpu_optimizer_service/common/buckets.h"
#include "cpu_optimizer_service/common/float_format.h"
#include "cpu_optimizer_service/common/gradient_norm.h"
#include "cpu_optimizer_service/common/norm/exact_sum.h"
#include "gpu_worker/base/random.h"
#include "gpu_worker/buckets/gradient_staging.h"
#include "gpu_worker/collective/single_collective.h"
#include "gpu_worker/training/scalar_arithmetic.h"
#include "tests/cpu_optimizer_service/job/job_driver.h"
#include "tests/gpu_worker/collective/ranks.h"
#include "tests/support/block_sums.h"
#include "tests/support/messages.h"
#include "tests/support/plain_adamw.h"

namespace ballast::worker::local_optimizer_test {
namespace {

using testing::HasSubstr;

constexpr int64_t kElements = 2048;  // In each of two groups.

struct World {
  int world_size = 1;
  int64_t chunk_elements = 1024;
  DType wire_dtype = DType::kBFloat16;
  double max_norm = 1.0;
  UnusedPolicy unused_policy = UnusedPolicy::kError;
  int64_t first_elements = 0;  // Of a parameter before the other in each group; 0: there is none.
};

JobSpec MakeJob(const World& world) {
  JobSpec job;
  job.name = "test";
  job.unused_policy = world.unused_policy;
  job.layout.world_size = world.world_size;
  job.layout.group_count = 2;
  job.layout.chunk_elements = world.chunk_elements;
  for (int group = 0; group < 2; ++group) {
    job.groups.push_back({.name = "g" + std::to_string(group), .wire_dtype = world.wire_dtype});
    job.groups.back().hyper_parameters.weight_decay = 0.1 * group;
    if (world.first_elements > 0) {
      job.layout.parameters.push_back({.name = "first" + std::to_string(group),
                                       .shape = {world.first_elements},
                                       .group = group});
    }
    job.layout.parameters.push_back({.name = "p" + std::to_string(group),
                                     .shape = {kElements - 10 - world.first_elements},
                                     .group = group});
  }
  const std::vector<Bucket> buckets =
      MakeBuckets(FlatElements(job.layout), world.world_size, kElements / 2);
  job.layout.partitions = PartitionsOf(buckets, world.world_size);
  return job;
}

// Notes what the optimizer asks of it.
class NotingArithmetic final : public LocalArithmetic {
 public:
  struct Notes {
    std::vector<int64_t> updates;        // Elements of each.
    std::vector<BlocksInChunks> blocks;  // The last.
    int64_t elements_read = 0;
  };
  NotingArithmetic(std::unique_ptr<LocalArithmetic> wrapped, Notes& notes)
      : wrapped_(std::move(wrapped)), notes_(notes) {}

  absl::Status SetFirstWeights(int chunk, absl::Span<const float> values) override {
    return wrapped_->SetFirstWeights(chunk, values);
  }
  absl::Status AddGradients(std::vector<Addition> additions) override {
    return wrapped_->AddGradients(std::move(additions));
  }
  absl::Status ZeroGradient(int chunk) override { return wrapped_->ZeroGradient(chunk); }
  absl::Status BlockSums(absl::Span<const BlocksInChunks> runs, absl::Span<double> sums) override {
    notes_.blocks.assign(runs.begin(), runs.end());
    return wrapped_->BlockSums(runs, sums);
  }
  absl::Status ReadGradient(int chunk, int64_t begin, absl::Span<float> values) override {
    notes_.elements_read += static_cast<int64_t>(values.size());
    return wrapped_->ReadGradient(chunk, begin, values);
  }
  absl::Status Update(int chunk, int64_t begin, int64_t elements,
                      const AdamScalars& scalars) override {
    notes_.updates.push_back(elements);
    return wrapped_->Update(chunk, begin, elements, scalars);
  }
  absl::Status TryUpdate(int chunk, int64_t begin, int64_t elements, const AdamScalars* scalars,
                         State& state) override {
    return wrapped_->TryUpdate(chunk, begin, elements, scalars, state);
  }
  absl::Status Finish() override { return wrapped_->Finish(); }

 private:
  const std::unique_ptr<LocalArithmetic> wrapped_;
  Notes& notes_;
};

// One rank that holds its share of weights and pushes gradients that are functions of their place.
class Rank {
 public:
  Rank(const World& world, Collective& collective)
      : job_(MakeJob(world)),
        max_norm_(world.max_norm),
        layout_(Layout::Create(job_.layout).value()),
        weights_(2 * kElements),
        collective_(collective),
        staging_(layout_, {world.wire_dtype, world.wire_dtype}, collective.rank(),
                 absl::Seconds(60)),
        optimizer_(job_, layout_, collective,
                   std::make_unique<NotingArithmetic>(
                       std::make_unique<ScalarArithmetic>(
                           job_.groups, layout_, [this](int chunk) { return WeightsOf(chunk); }),
                       notes_)) {
    EXPECT_TRUE(optimizer_
                    .Join([this](int chunk, absl::Span<float> values) {
                      for (size_t i = 0; i < values.size(); ++i) {
                        values[i] = RandomNormal(1, layout_.chunks()[chunk].group,
                                                 layout_.chunks()[chunk].begin + i);
                      }
                    })
                    .ok());
  }

  void Begin() {
    ASSERT_TRUE(optimizer_.BeginStep({.scale = {.divisors = {4, 8}}, .overrides = {}}).ok());
  }
  absl::Status Push(int chunk_index, uint64_t step, uint32_t micro_step, float factor = 1) {
    const Chunk& chunk = layout_.chunks()[chunk_index];
    std::vector<float> values(chunk.elements);
    for (int64_t i = 0; i < chunk.elements; ++i) {
      values[i] = factor * RandomNormal(2 + step, 10 * micro_step + chunk.group, chunk.begin + i);
    }
    const GradientStaging::Payload payload = staging_.Fill(chunk_index, micro_step, values).value();
    return optimizer_.Push({.chunk = chunk_index,
                            .micro_step_begin = micro_step,
                            .micro_step_end = micro_step + 1,
                            .payload = payload.bytes,
                            .released = payload.released});
  }
  void PushAll(uint64_t step, uint32_t micro_step, float factor = 1) {
    for (const int chunk : layout_.chunks_of_rank(collective_.rank())) {
      ASSERT_TRUE(Push(chunk, step, micro_step, factor).ok());
    }
  }
  client::StepDecision Step(uint64_t step, uint32_t micro_steps) {
    Begin();
    for (uint32_t m = 0; m < micro_steps; ++m) PushAll(step, m);
    const client::StepDecision decision = Seal({}, micro_steps).value();
    EXPECT_TRUE(optimizer_.ReceiveWeights().ok());
    return decision;
  }

  absl::StatusOr<client::StepDecision> Seal(const UsedParameters& used = {},
                                            uint32_t micro_steps = 1) {
    for (uint32_t m = 0; m < micro_steps; ++m) {
      EXPECT_TRUE(optimizer_.EndMicroStep(m, used).ok());
    }
    return optimizer_.Seal(micro_steps, {.clipping = {.max_norm = max_norm_}});
  }

  LocalOptimizer& optimizer() { return optimizer_; }
  const NotingArithmetic::Notes& notes() const { return notes_; }
  int my_chunk() const { return layout_.chunks_of_rank(collective_.rank())[0]; }
  // By element of the flat spaces, group after group; other ranks' are zero.
  const std::vector<uint16_t>& weights() const { return weights_; }

 private:
  absl::Span<std::byte> WeightsOf(int index) {
    const Chunk& chunk = layout_.chunks()[index];
    uint16_t* first = weights_.data() + chunk.group * kElements + chunk.begin;
    return {reinterpret_cast<std::byte*>(first), static_cast<size_t>(2 * chunk.elements)};
  }

  const JobSpec job_;
  const double max_norm_;
  const Layout layout_;
  std::vector<uint16_t> weights_;
  Collective& collective_;
  GradientStaging staging_;
  NotingArithmetic::Notes notes_;
  LocalOptimizer optimizer_;
};

// On a GPU each is a launch, or a part of one.
TEST(LocalOptimizer, AsksForNeighboursInOnePieceHoweverManyChunksTheyAre) {
  using testing::ElementsAre;
  RunRanks(1, [](Collective& collective) {
    Rank rank({.chunk_elements = 256, .first_elements = 700}, collective);
    rank.Step(1, 1);
    EXPECT_THAT(rank.notes().updates, ElementsAre(kElements - 10, kElements - 10));
    // By parameter, from its first block to the short last one.
    EXPECT_EQ(rank.notes().elements_read, 0);
    ASSERT_EQ(rank.notes().blocks.size(), 4);
    const BlocksInChunks& second = rank.notes().blocks[1];
    EXPECT_EQ(second.chunk, 2);
    EXPECT_EQ(second.begin, 700 - 2 * 256);
    EXPECT_EQ(second.elements, kElements - 10 - 700);
  });
  // The first parameter of a group has another update count once a step has not used it.
  RunRanks(1, [](Collective& collective) {
    Rank rank({.chunk_elements = 256, .unused_policy = UnusedPolicy::kSkip, .first_elements = 700},
              collective);
    rank.Begin();
    rank.PushAll(1, 0);
    ASSERT_TRUE(rank.Seal({.all = false, .parameters = {1, 2, 3}}).ok());
    ASSERT_TRUE(rank.optimizer().ReceiveWeights().ok());
    rank.Step(2, 1);
    EXPECT_THAT(rank.notes().updates,
                ElementsAre(kElements - 710, kElements - 10, 700, kElements - 710, kElements - 10));
  });
}

std::vector<uint16_t> Train(const World& world, uint32_t micro_steps) {
  std::vector<std::vector<uint16_t>> of_rank(world.world_size);
  RunRanks(world.world_size, [&](Collective& collective) {
    Rank rank(world, collective);
    for (uint64_t step = 1; step <= 4; ++step) rank.Step(step, micro_steps);
    of_rank[collective.rank()] = rank.weights();
  });
  for (int rank = 1; rank < world.world_size; ++rank) {
    for (size_t i = 0; i < of_rank[0].size(); ++i) of_rank[0][i] |= of_rank[rank][i];
  }
  return of_rank[0];
}

TEST(LocalOptimizer, SameBitsForAnyWorldAndChunkSize) {
  for (const DType wire_dtype : {DType::kBFloat16, DType::kFloat32}) {
    for (const uint32_t micro_steps : {1u, 3u}) {
      const std::vector<uint16_t> expected = Train({.wire_dtype = wire_dtype}, micro_steps);
      for (const int world_size : {1, 2, 3}) {
        for (const int64_t chunk_elements : {256, 512, 1024}) {
          EXPECT_EQ(Train({.world_size = world_size,
                           .chunk_elements = chunk_elements,
                           .wire_dtype = wire_dtype},
                          micro_steps),
                    expected)
              << world_size << " ranks, chunks of " << chunk_elements;
        }
      }
    }
  }
}

// One element, to see that the pieces are put together as torch puts them.
TEST(LocalOptimizer, TakesTheStepsOfAdamW) {
  SingleCollective collective;
  Rank rank({.wire_dtype = DType::kFloat32, .max_norm = 0}, collective);
  constexpr int kElement = 100;  // In group 1.
  PlainAdamW expected{.weight = RandomNormal(1, 1, kElement), .values = {.weight_decay = 0.1}};
  for (uint64_t step = 1; step <= 3; ++step) {
    rank.Step(step, 2);
    expected.Update((static_cast<double>(RandomNormal(2 + step, 1, kElement)) +
                     RandomNormal(2 + step, 11, kElement)) /
                    8);
    EXPECT_NEAR(BFloat16ToFloat(rank.weights()[kElements + kElement]), expected.weight,
                std::abs(expected.weight) / 256);
  }
}

TEST(LocalOptimizer, ClipsByTheGlobalNorm) {
  SingleCollective collective;
  Rank rank({.max_norm = 0.5}, collective);
  const client::StepDecision decision = rank.Step(1, 1);
  EXPECT_TRUE(decision.applied);
  // The norm of two groups of about unit-normal gradients divided by 4 and by 8.
  EXPECT_NEAR(decision.norm, std::sqrt(2048 / 16.0 + 2048 / 64.0), 0.5);
  EXPECT_NEAR(decision.clip_coefficient, 0.5 / decision.norm, 1e-6);
}

TEST(LocalOptimizer, TheNormIsThatOfWholeParametersWhereChunksAndRanksCutBlocks) {
  constexpr int64_t kFirst = 333;
  std::vector<double> group_sums;
  for (int group = 0; group < 2; ++group) {
    ExactSum sum;
    for (const auto& [offset, elements] :
         {std::pair(int64_t{0}, kFirst), {kFirst, kElements - 10 - kFirst}}) {
      std::vector<float> values;
      for (int64_t i = 0; i < elements; ++i) values.push_back(RandomNormal(3, group, offset + i));
      AddBlocks(values, sum);
    }
    group_sums.push_back(sum.Rounded());
  }
  const double expected = GlobalNorm(group_sums, {.divisors = {4, 8}});
  for (const int world_size : {1, 2, 3}) {
    for (const int64_t chunk_elements : {256, 768, 1024}) {
      RunRanks(world_size, [&](Collective& collective) {
        Rank rank({.world_size = world_size,
                   .chunk_elements = chunk_elements,
                   .wire_dtype = DType::kFloat32,
                   .first_elements = kFirst},
                  collective);
        EXPECT_EQ(rank.Step(1, 1).norm, expected)
            << world_size << " ranks, chunks of " << chunk_elements;
      });
    }
  }
}

TEST(LocalOptimizer, RefusesToSealWithAChunkMissing) {
  SingleCollective collective;
  Rank rank({}, collective);
  rank.Begin();
  rank.PushAll(1, 0);
  const absl::Status status = rank.Seal({}, 2).status();
  EXPECT_TRUE(Refused(status, absl::StatusCode::kFailedPrecondition));
  rank.PushAll(1, 1);
  EXPECT_TRUE(rank.Seal({}, 2).ok());
}

TEST(LocalOptimizer, RefusesAContributionTwice) {
  SingleCollective collective;
  Rank rank({}, collective);
  rank.Begin();
  ASSERT_TRUE(rank.Push(rank.my_chunk(), 1, 0).ok());
  EXPECT_EQ(rank.Push(rank.my_chunk(), 1, 0).code(), absl::StatusCode::kFailedPrecondition);
}

TEST(LocalOptimizer, RefusesAStepInWhichNoRankUsedAParameter) {
  RunRanks(2, [](Collective& collective) {
    Rank rank({.world_size = 2}, collective);
    // Used by one rank is enough; by none is not.
    for (const bool used_by_rank_1 : {true, false}) {
      rank.Begin();
      rank.PushAll(1, 0);
      const bool all = used_by_rank_1 && collective.rank() == 1;
      const absl::StatusOr<client::StepDecision> decision =
          rank.Seal({.all = all, .parameters = {0}});
      EXPECT_EQ(decision.ok(), used_by_rank_1);
      if (!decision.ok()) EXPECT_THAT(decision.status().message(), HasSubstr("parameter p1"));
    }
  });
}

TEST(LocalOptimizer, ANonFiniteGradientSkipsTheStepAndChangesNothing) {
  SingleCollective collective;
  Rank rank({}, collective), spared({}, collective);
  rank.Step(1, 1);
  spared.Step(1, 1);
  const std::vector<uint16_t> before = rank.weights();
  rank.Begin();
  rank.PushAll(2, 0, std::numeric_limits<float>::infinity());
  const client::StepDecision decision = rank.Seal().value();
  EXPECT_FALSE(decision.applied);
  EXPECT_TRUE(Says(decision.skip_reason));
  ASSERT_TRUE(rank.optimizer().ReceiveWeights().ok());
  EXPECT_EQ(rank.weights(), before);
  EXPECT_EQ(rank.optimizer().committed_step(), 2);
  // The next step is as if the skipped one had not been: same moments, same update count.
  rank.Step(3, 1);
  spared.Step(3, 1);
  EXPECT_EQ(rank.weights(), spared.weights());
}

// Steps that would leave state that is not finite, among others, in the service's engine and here.
struct OverflowStep {
  uint64_t seed = 0;
  std::optional<float> value;  // Of one element of group 1.
  int64_t element = 0;
  double divisor = 1;
  HyperParameterOverrides overrides = {};  // Of group 1, from this step on.
};

JobSpec OverflowJob(int world_size) {
  JobSpec job = MakeJobSpec({.group_sizes = {{1000, 24}, {700, 3000}},
                             .world_size = world_size,
                             .bucket_elements = 1024,
                             .chunk_elements = 512});
  for (GroupSpec& group : job.groups) group.wire_dtype = DType::kFloat32;
  job.unused_policy = UnusedPolicy::kSkip;
  return job;
}

StepSettings SettingsOf(const OverflowStep& step) {
  StepSettings settings = {.scale = {.divisors = {1, step.divisor}}, .overrides = {}};
  settings.overrides[1] = step.overrides;
  return settings;
}

std::vector<float> GradientOf(const OverflowStep& step, const Layout& layout, int chunk,
                              std::vector<float> values) {
  for (const ChunkPiece& piece : layout.Pieces(chunk)) {
    const int64_t at = step.element - piece.parameter_offset;
    if (step.value.has_value() && piece.parameter == 3 && 0 <= at && at < piece.elements) {
      values[piece.chunk_offset + at] = *step.value;
    }
  }
  return values;
}

TEST(LocalOptimizer, SkipsWhatWouldOverflowTheStateAsTheServiceDoesWithItsWordsAndItsBits) {
  constexpr float kHuge = 3e38f;
  const std::vector<OverflowStep> steps = {
      {.seed = 11, .value = kHuge, .element = 2900, .divisor = 0.5},  // exp_avg; the first step.
      {.seed = 12},
      {.seed = 13, .value = 1e21f, .element = 100},  // exp_avg_sq alone.
      {.seed = 14, .value = -kHuge, .element = 5, .divisor = 0.25},
      {.seed = 15, .value = 1e20f, .element = 7},  // Large, and stays finite.
      {.seed = 16, .value = 0, .element = 2000, .overrides = {.eps = 0.0}},
      {.seed = 17, .value = 1.0f, .element = 3, .overrides = {.lr = 3e37, .beta1 = 0.0}},
      {.seed = 18, .overrides = {.lr = 1e-3, .eps = 1e-8}},
  };
  for (const int world_size : {1, 2, 3}) {
    const JobSpec job = OverflowJob(world_size);
    const Layout layout = Layout::Create(job.layout).value();
    Engine engine({.memory_limit_bytes = int64_t{256} << 20, .threads = 2});
    JobDriver driver(engine, job);
    driver.UploadWeights();
    driver.AttachAll();
    // Without parameter 0: its update count falls behind, and what a trial leaves as it is.
    const UsedParameters used = {.all = false, .parameters = {1, 2, 3}};
    for (const OverflowStep& step : steps) {
      driver.BeginAll(SettingsOf(step));
      for (int c = 0; c < static_cast<int>(layout.chunks().size()); ++c) {
        std::vector<float> values = GradientOf(step, layout, c, driver.Values(c, step.seed));
        for (const ChunkPiece& piece : layout.Pieces(c)) {
          if (piece.parameter == 0) {
            std::fill_n(values.begin() + piece.chunk_offset, piece.elements, 0.0f);
          }
        }
        ASSERT_TRUE(driver.Send(c, values, 0, /*final=*/true).ok());
      }
      driver.EndMicroStepAll(0, used);
      driver.SealAll(1);
    }
    const std::vector<StepOutcome> expected = driver.listener(0).outcomes();
    ASSERT_EQ(expected.size(), steps.size());

    RunRanks(world_size, [&](Collective& collective) {
      std::vector<std::vector<std::byte>> weights(layout.chunks().size());
      for (const int c : layout.chunks_of_rank(collective.rank())) {
        weights[c].resize(layout.chunks()[c].elements *
                          SizeBytes(job.groups[layout.chunks()[c].group].return_dtype));
      }
      LocalOptimizer optimizer(job, layout, collective,
                               std::make_unique<ScalarArithmetic>(job.groups, layout, [&](int c) {
                                 return absl::MakeSpan(weights[c]);
                               }));
      ASSERT_TRUE(optimizer
                      .Join([&](int c, absl::Span<float> to) {
                        const std::vector<float> first = driver.Values(c, 1);
                        std::copy(first.begin(), first.end(), to.begin());
                      })
                      .ok());
      for (size_t i = 0; i < steps.size(); ++i) {
        SCOPED_TRACE(testing::Message() << "step " << i + 1 << " of rank " << collective.rank());
        ASSERT_TRUE(optimizer.BeginStep(SettingsOf(steps[i])).ok());
        for (const int c : layout.chunks_of_rank(collective.rank())) {
          std::vector<float> values =
              GradientOf(steps[i], layout, c, driver.Values(c, steps[i].seed));
          for (const ChunkPiece& piece : layout.Pieces(c)) {
            if (piece.parameter == 0) {
              std::fill_n(values.begin() + piece.chunk_offset, piece.elements, 0.0f);
            }
          }
          const std::vector<std::byte> payload = driver.Encode(c, values);
          ASSERT_TRUE(optimizer
                          .Push({.chunk = c,
                                 .micro_step_begin = 0,
                                 .micro_step_end = 1,
                                 .payload = payload,
                                 .released = nullptr})
                          .ok());
        }
        ASSERT_TRUE(optimizer.EndMicroStep(0, used).ok());
        const client::StepDecision decision = optimizer.Seal(1, {}).value();
        EXPECT_EQ(decision.applied, expected[i].decision.apply);
        EXPECT_EQ(decision.skip_reason, expected[i].skip_reason);
        EXPECT_EQ(decision.norm, expected[i].decision.norm);
        ASSERT_TRUE(optimizer.ReceiveWeights().ok());
      }
      const auto shards = driver.listener(collective.rank()).shards();
      for (const int c : layout.chunks_of_rank(collective.rank())) {
        EXPECT_TRUE(weights[c] == shards.at(c)) << "chunk " << c << " of " << world_size;
      }
    });
    // What the steps are there for.
    EXPECT_TRUE(Says(expected[0].skip_reason));
    EXPECT_TRUE(Says(expected[2].skip_reason));
    EXPECT_TRUE(expected[4].decision.apply);
    EXPECT_TRUE(expected[5].decision.apply);  // Without eps every step is tried.
    EXPECT_TRUE(expected[7].decision.apply);
  }
}

}  // namespace
}  // namespace ballast::worker::local_optimizer_test
