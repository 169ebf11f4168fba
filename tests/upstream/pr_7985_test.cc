// DeepSpeed PR 7985: the fp32 accumulator was reduced before the last micro-batch had been added to
// it, so that this gradient stayed private to its rank.
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <tuple>
#include <vector>

#include "cpu_optimizer_service/common/reason.h"
#include "tests/cpu_optimizer_service/job/job_driver.h"
#include "tests/support/messages.h"
#include "tests/upstream/linear_model.h"
#include "tests/upstream/offloaded_run.h"
#include "tests/upstream/tensors.h"

namespace ballast {
namespace {

constexpr int kRanks = 2;

class Pr7985Test : public testing::TestWithParam<std::tuple<Through, Accumulation>> {
 protected:
  static Through through() { return std::get<0>(GetParam()); }
  static Accumulation where() { return std::get<1>(GetParam()); }
};

INSTANTIATE_TEST_SUITE_P(
    Everywhere, Pr7985Test,
    testing::Combine(testing::Values(Through::kEngine, Through::kClient),
                     testing::Values(Accumulation::kInService, Accumulation::kOnWorker)),
    [](const auto& info) { return Name(std::get<0>(info.param)) + Name(std::get<1>(info.param)); });

// The report's: weight ones(4), loss = sum(w * x), so the gradient is the input.
TEST_P(Pr7985Test, TheAverageHoldsTheLastMicroBatchOfEveryRank) {
  // The same weight once in a partition of each rank: "on both" can then be seen.
  JobSpec spec = SpreadJob("average",
                           {{.name = "w.on_rank0", .shape = {4}, .group = 0},
                            {.name = "w.on_rank1", .shape = {4}, .group = 1}},
                           kRanks);
  for (GroupSpec& group : spec.groups) group.hyper_parameters.beta1 = 0;  // exp_avg: the gradient.
  ASSERT_EQ(spec.layout.partitions[0].rank, 0);
  ASSERT_EQ(spec.layout.partitions[1].rank, 1);
  const std::vector<float> ones(4, 1.0f);
  const auto run = OffloadedRun::Start(through(), spec, {{0, ones}, {1, ones}});
  const auto gradients = [](const std::vector<float>& input) {
    return Tensors{{0, input}, {1, input}};
  };
  const Backwards backwards = {
      {gradients({1, 3, 5, 7}), gradients({1 + 18, 3 + 18, 5 + 18, 7 + 18})},
      {gradients({11, 13, 15, 17}), gradients({11 + 18, 13 + 18, 15 + 18, 17 + 18})}};
  // Ranks times micro-batches.
  const auto outcome = run->Step(backwards, {.scale = {.divisors = {4, 4}}}, where());
  ASSERT_TRUE(outcome.ok()) << outcome.status();
  const std::vector<float> average = {15, 17, 19, 21};
  EXPECT_EQ(run->State(Plane::kExpAvg), (Tensors{{0, average}, {1, average}}));
  const double squares = 15 * 15 + 17 * 17 + 19 * 19 + 21 * 21;
  EXPECT_DOUBLE_EQ(outcome->decision.norm, std::sqrt(2 * squares));
}

// The loss over the global batch of 64 before each of ten steps.
std::vector<float> Losses(Through through, Accumulation where, int micro_batch, int accumulation) {
  constexpr int kSteps = 10;
  const LinearModel model(2, 8);
  JobSpec spec = SpreadJob("regression", model.Parameters(), kRanks);
  for (GroupSpec& group : spec.groups) group.hyper_parameters = {.lr = 1e-2, .beta2 = 0.95};
  const auto run = OffloadedRun::Start(through, spec, model.FirstWeights());
  const double divisor = kRanks * accumulation;
  std::vector<float> losses;
  for (int step = 0; step < kSteps; ++step) {
    const Tensors weights = run->Weights();
    Backwards backwards(accumulation, std::vector<Tensors>(kRanks));
    float loss = 0;
    for (int rank = 0; rank < kRanks; ++rank) {
      for (int m = 0; m < accumulation; ++m) {
        const uint64_t first = 64 * step + 32 * rank + m * micro_batch;
        loss += model.Backward(weights, {0, 1}, model.MakeSamples(first, micro_batch),
                               backwards[m][rank]);
      }
    }
    losses.push_back(loss / static_cast<float>(divisor));
    EXPECT_TRUE(run->Step(backwards, {.scale = {.divisors = {divisor, divisor}}}, where)
                    .value()
                    .decision.apply);
  }
  return losses;
}

TEST_P(Pr7985Test, HowTheGlobalBatchIsCutDoesNotShowInTheLoss) {
  const std::vector<float> small = Losses(through(), where(), 2, 16);
  const std::vector<float> large = Losses(through(), where(), 8, 4);
  for (size_t step = 0; step < small.size(); ++step) {
    EXPECT_LE(std::fabs(small[step] - large[step]), 0.0005f) << "at step " << step + 1;
  }
  EXPECT_LT(small.back(), 0.9f * small.front());  // It learns.
}

// A contribution that leaves a micro-batch out, or holds one that is there already, has no place.
TEST(Pr7985LedgerTest, AMicroBatchLeftOutOrGivenTwiceIsRefused) {
  Engine engine({.memory_limit_bytes = int64_t{64} << 20, .threads = 1});
  JobDriver driver(engine, MakeJobSpec({.group_sizes = {{256}}}));
  driver.UploadWeights();
  driver.AttachAll();
  driver.BeginAll();
  const std::vector<std::byte> bytes = driver.Encode(0, driver.Values(0, 1));
  const absl::Span<const std::byte> piece(bytes);
  const auto contribute = [&](uint32_t begin, uint32_t end) {
    return driver.stream(0)
        .Contribute({.step = 1,
                     .chunk = 0,
                     .micro_step_begin = begin,
                     .micro_step_end = end,
                     .payload = {&piece, 1}})
        .status();
  };
  ASSERT_TRUE(contribute(0, 1).ok());
  EXPECT_TRUE(Refused(contribute(2, 3), absl::StatusCode::kFailedPrecondition));
  EXPECT_TRUE(Refused(contribute(0, 2), absl::StatusCode::kFailedPrecondition));
  // What was refused is missing at the seal.
  for (uint32_t m = 0; m < 3; ++m) driver.EndMicroStepAll(m);
  const auto refusal = driver.stream(0).Seal(1, 3).value();
  ASSERT_TRUE(refusal.has_value());
  EXPECT_TRUE(
      Refused(refusal->status, absl::StatusCode::kFailedPrecondition, reason::kSendAndSealAgain));
}

}  // namespace
}  // namespace ballast
