#include "gpu_worker/training/local_optimizer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "cpu_optimizer_service/common/buckets.h"
#include "cpu_optimizer_service/common/float_format.h"
#include "cpu_optimizer_service/common/gradient_norm.h"
#include "gpu_worker/base/random.h"
#include "gpu_worker/buckets/gradient_staging.h"
#include "gpu_worker/collective/single_collective.h"
#include "gpu_worker/training/scalar_arithmetic.h"
#include "tests/gpu_worker/collective/ranks.h"

namespace ballast::worker {
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
  job.max_norm = world.max_norm;
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
      MakeBuckets(FlatElements(job.layout.parameters, 2), world.world_size, kElements / 2);
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
  absl::Status AddGradient(int chunk, bool first, absl::Span<const std::byte> payload,
                           std::function<void()> released) override {
    return wrapped_->AddGradient(chunk, first, payload, std::move(released));
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
    return optimizer_.Seal(micro_steps);
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

// AdamW in double, one element, to see that the pieces are put together as torch puts them.
TEST(LocalOptimizer, TakesTheStepsOfAdamW) {
  SingleCollective collective;
  Rank rank({.wire_dtype = DType::kFloat32, .max_norm = 0}, collective);
  constexpr int kElement = 100;  // In group 1.
  double w = RandomNormal(1, 1, kElement), m = 0, v = 0;
  for (uint64_t step = 1; step <= 3; ++step) {
    rank.Step(step, 2);
    const double g = (static_cast<double>(RandomNormal(2 + step, 1, kElement)) +
                      RandomNormal(2 + step, 11, kElement)) /
                     8;
    m = 0.9 * m + 0.1 * g;
    v = 0.999 * v + 0.001 * g * g;
    w -= 1e-3 * 0.1 * w;
    w -= 1e-3 * (m / (1 - std::pow(0.9, step))) /
         (std::sqrt(v / (1 - std::pow(0.999, step))) + 1e-8);
    EXPECT_NEAR(BFloat16ToFloat(rank.weights()[kElements + kElement]), w, std::abs(w) / 256);
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

TEST(LocalOptimizer, TheNormIsThatOfTheWrittenOrderWhereChunksAndRanksCutBlocks) {
  constexpr int64_t kFirst = 333;
  std::vector<double> group_sums;
  for (int group = 0; group < 2; ++group) {
    std::vector<double> parameter_sums;
    for (const auto& [offset, elements] :
         {std::pair(int64_t{0}, kFirst), {kFirst, kElements - 10 - kFirst}}) {
      std::vector<float> values;
      for (int64_t i = 0; i < elements; ++i) values.push_back(RandomNormal(3, group, offset + i));
      std::vector<double> blocks;
      for (int64_t at = 0; at < elements; at += kBlockElements) {
        blocks.push_back(BlockSumOfSquaresReference(values.data() + at, DType::kFloat32,
                                                    std::min(kBlockElements, elements - at)));
      }
      parameter_sums.push_back(ParameterSum(blocks));
    }
    group_sums.push_back(SumInOrder(parameter_sums));
  }
  const double expected = Decide(group_sums, {.divisors = {4, 8}}, 1.0).norm;
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
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(status.message(), HasSubstr("rank 0 sent 1 of 2 micro-steps"));
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
  EXPECT_THAT(decision.skip_reason, HasSubstr("not finite"));
  ASSERT_TRUE(rank.optimizer().ReceiveWeights().ok());
  EXPECT_EQ(rank.weights(), before);
  EXPECT_EQ(rank.optimizer().committed_step(), 2);
  // The next step is as if the skipped one had not been: same moments, same update count.
  rank.Step(3, 1);
  spared.Step(3, 1);
  EXPECT_EQ(rank.weights(), spared.weights());
}

}  // namespace
}  // namespace ballast::worker
