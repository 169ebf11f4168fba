// DeepSpeed PR 7981: with ZeRO-1/2 and an offloaded optimizer, all but the last of several
// backwards per step were lost, because accumulation followed a configured number and not what was
// done.
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <tuple>
#include <vector>

#include "tests/upstream/linear_model.h"
#include "tests/upstream/offloaded_run.h"
#include "tests/upstream/tensors.h"

namespace ballast {
namespace {

constexpr int kRanks = 2;
constexpr double kTolerance = 5e-5;

class Pr7981Test : public testing::TestWithParam<std::tuple<Through, Accumulation>> {
 protected:
  static Through through() { return std::get<0>(GetParam()); }
  static Accumulation where() { return std::get<1>(GetParam()); }
};

INSTANTIATE_TEST_SUITE_P(
    Everywhere, Pr7981Test,
    testing::Combine(testing::Values(Through::kEngine, Through::kClient),
                     testing::Values(Accumulation::kInService, Accumulation::kOnWorker)),
    [](const auto& info) { return Name(std::get<0>(info.param)) + Name(std::get<1>(info.param)); });

// Whole numbers of at most 7 bits, so that bf16 holds them and fp32 sums of them are exact.
std::vector<float> WholeNumbers(uint64_t seed, int64_t elements) {
  std::vector<float> values;
  for (int64_t i = 0; i < elements; ++i) {
    values.push_back(std::round(client::Random(seed, 7981, 0, i) * 100));
  }
  return values;
}

// exp_avg is then the step's gradient itself.
void MakeExpAvgTheGradient(JobSpec& spec) {
  for (GroupSpec& group : spec.groups) group.hyper_parameters.beta1 = 0;
}

// Two parameters that share a block, and two with blocks of their own.
JobSpec FourParameters(const std::string& name) {
  JobSpec spec = SpreadJob(name,
                           {{.name = "early", .shape = {256}},
                            {.name = "late", .shape = {256}},
                            {.name = "shared.early", .shape = {100}, .group = 1},
                            {.name = "shared.late", .shape = {100}, .group = 1}},
                           kRanks);
  MakeExpAvgTheGradient(spec);
  return spec;
}

Tensors Zeros(const JobSpec& spec) {
  Tensors zeros;
  for (size_t p = 0; p < spec.layout.parameters.size(); ++p) {
    zeros[static_cast<int>(p)].resize(spec.layout.parameters[p].shape[0]);
  }
  return zeros;
}

Tensors WholeNumbersFor(const JobSpec& spec, const std::vector<int>& parameters, uint64_t seed) {
  Tensors gradients;
  for (const int p : parameters) {
    gradients[p] = WholeNumbers(seed + 1000 * p, spec.layout.parameters[p].shape[0]);
  }
  return gradients;
}

Tensors SumOf(const Backwards& backwards) {
  Tensors sum;
  for (const auto& ranks : backwards) {
    for (const Tensors& gradients : ranks) AddTo(sum, gradients);
  }
  return sum;
}

// Trains with `backwards` per step; how far the weights end from those of no offload.
double DifferenceFromNoOffload(Through through, Accumulation where, int backwards, int steps) {
  const LinearModel model(2, 8);
  JobSpec spec = SpreadJob("mlp", model.Parameters(), kRanks);
  for (GroupSpec& group : spec.groups) {
    group.hyper_parameters = {.lr = 1e-3, .weight_decay = 0, .decoupled_weight_decay = false};
  }
  const auto run = OffloadedRun::Start(through, spec, model.FirstWeights());
  PlainAdam reference(model.FirstWeights(), spec.groups[0].hyper_parameters);
  const double divisor = kRanks * backwards;
  const StepSettings settings{.scale = {.divisors = {divisor, divisor}}};
  uint64_t sample = 0;
  for (int step = 0; step < steps; ++step) {
    const Tensors weights = run->Weights();
    Backwards offloaded(backwards, std::vector<Tensors>(kRanks));
    TensorsOf<double> sum;
    for (int m = 0; m < backwards; ++m) {
      for (int rank = 0; rank < kRanks; ++rank) {
        const std::vector<Sample> batch = model.MakeSamples(sample, 4);
        sample += batch.size();
        model.Backward(weights, {0, 1}, batch, offloaded[m][rank]);
        model.Backward(reference.weights(), {0, 1}, batch, sum);
      }
    }
    EXPECT_TRUE(run->Step(offloaded, settings, where).value().decision.apply);
    reference.Step(sum, divisor);
  }
  return MaxDifference(run->Weights(), reference.weights());
}

TEST_P(Pr7981Test, WeightsAreThoseOfNoOffloadForAnyNumberOfBackwards) {
  for (const int steps : {1, 3}) {
    for (const int backwards : {1, 3, 4}) {
      EXPECT_LE(DifferenceFromNoOffload(through(), where(), backwards, steps), kTolerance)
          << backwards << " backwards in each of " << steps << " steps";
    }
  }
}

TEST_P(Pr7981Test, CommittedSumsAreTheArithmeticSum) {
  JobSpec spec =
      SpreadJob("sums", {{.name = "w", .shape = {700}}, {.name = "b", .shape = {9}}}, kRanks);
  MakeExpAvgTheGradient(spec);
  // What each micro-step reduces to fits bf16; the sum of several does not.
  if (where() == Accumulation::kInService) spec.groups[0].wire_dtype = DType::kBFloat16;
  const auto run = OffloadedRun::Start(through(), spec, Zeros(spec));
  uint64_t seed = 0;
  // The number of backwards may differ from step to step.
  for (const int backwards : {4, 1, 3, 3, 1, 4}) {
    Backwards gradients(backwards, std::vector<Tensors>(kRanks));
    for (auto& ranks : gradients) {
      for (Tensors& rank : ranks) rank = WholeNumbersFor(spec, {0, 1}, ++seed);
    }
    ASSERT_TRUE(run->Step(gradients, {}, where()).ok());
    EXPECT_EQ(run->State(Plane::kExpAvg), SumOf(gradients)) << backwards << " backwards";
  }
}

TEST_P(Pr7981Test, OneBackwardUsesNoAccumulator) {
  const JobSpec spec = SpreadJob("one", {{.name = "w", .shape = {700}}}, kRanks);
  const auto run = OffloadedRun::Start(through(), spec, Zeros(spec));
  const std::vector<Tensors> ranks = {WholeNumbersFor(spec, {0}, 1), WholeNumbersFor(spec, {0}, 2)};
  ASSERT_TRUE(run->Step({ranks}, {}, where()).ok());
  EXPECT_EQ(run->job().Status().accumulators_in_use, 0);
  ASSERT_TRUE(run->Step({ranks, ranks, ranks}, {}, where()).ok());
  EXPECT_EQ(run->job().Status().accumulators_in_use,
            where() == Accumulation::kInService ? 3 : 0);  // Of 3 chunks.
  ASSERT_TRUE(run->Step({ranks}, {}, where()).ok());
  EXPECT_EQ(run->job().Status().accumulators_in_use, 0);
}

TEST_P(Pr7981Test, AJobOfOneBackwardPerStepReservesNoAccumulators) {
  JobSpec spec = SpreadJob("reserved", {{.name = "w", .shape = {700}}}, kRanks);
  EXPECT_EQ(
      OffloadedRun::Start(through(), spec, Zeros(spec))->job().Status().memory.accumulator_bytes,
      3 * kBlockElements * 4);
  spec.max_micro_steps = 1;
  const auto run = OffloadedRun::Start(through(), spec, Zeros(spec));
  EXPECT_EQ(run->job().Status().memory.accumulator_bytes, 0);
  const std::vector<Tensors> ranks = {WholeNumbersFor(spec, {0}, 1), WholeNumbersFor(spec, {0}, 2)};
  EXPECT_TRUE(run->Step({ranks}, {}, where()).ok());
}

TEST_P(Pr7981Test, AParameterFirstUsedInALaterMicroStepHasThisStepsSumOnly) {
  const JobSpec spec = FourParameters("later");
  const auto run = OffloadedRun::Start(through(), spec, Zeros(spec));
  for (uint64_t step = 0; step < 3; ++step) {
    Backwards gradients(3, std::vector<Tensors>(kRanks));
    for (uint32_t m = 0; m < 3; ++m) {
      for (uint64_t rank = 0; rank < kRanks; ++rank) {
        const std::vector<int> used = m == 0 ? std::vector{0, 2} : std::vector{0, 1, 2, 3};
        gradients[m][rank] = WholeNumbersFor(spec, used, 100 * step + 10 * m + rank);
      }
    }
    ASSERT_TRUE(run->Step(gradients, {}, where()).ok());
    EXPECT_EQ(run->State(Plane::kExpAvg), SumOf(gradients)) << "at step " << step + 1;
  }
}

TEST_P(Pr7981Test, AParameterAbsentAtTheLastMicroStepKeepsItsEarlierGradients) {
  const JobSpec spec = FourParameters("absent");
  const auto run = OffloadedRun::Start(through(), spec, Zeros(spec));
  for (uint64_t step = 0; step < 3; ++step) {
    Backwards gradients(3, std::vector<Tensors>(kRanks));
    for (uint32_t m = 0; m < 3; ++m) {
      // "early" on one rank only, and only at first.
      gradients[m][0] = WholeNumbersFor(spec, m == 0 ? std::vector{0, 1, 2, 3} : std::vector{1, 3},
                                        100 * step + m);
      gradients[m][1] = WholeNumbersFor(spec, {1, 3}, 100 * step + 50 + m);
    }
    ASSERT_TRUE(run->Step(gradients, {}, where()).ok());
    EXPECT_EQ(run->State(Plane::kExpAvg), SumOf(gradients)) << "at step " << step + 1;
  }
}

TEST_P(Pr7981Test, AnUnusedParameterReplaysNothingOfTheStepBefore) {
  JobSpec spec = FourParameters("replay");
  spec.unused_policy = UnusedPolicy::kZero;  // Takes its gradient from the step, like ZeRO.
  const auto run = OffloadedRun::Start(through(), spec, Zeros(spec));
  const auto gradients_of = [&](const std::vector<int>& used, uint64_t seed) {
    Backwards gradients(2, std::vector<Tensors>(kRanks));
    for (auto& ranks : gradients) {
      for (Tensors& rank : ranks) rank = WholeNumbersFor(spec, used, ++seed);
    }
    return gradients;
  };
  ASSERT_TRUE(run->Step(gradients_of({0, 1, 2, 3}, 10), {}, where()).ok());
  const Backwards second = gradients_of({0, 2}, 20);
  const auto outcome = run->Step(second, {}, where());
  ASSERT_TRUE(outcome.ok()) << outcome.status();
  EXPECT_EQ(outcome->unused_parameters, (std::vector<std::string>{"late", "shared.late"}));
  Tensors expected = Zeros(spec);
  AddTo(expected, SumOf(second));
  EXPECT_EQ(run->State(Plane::kExpAvg), expected);
}

}  // namespace
}  // namespace ballast
