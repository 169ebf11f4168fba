// DeepSpeed issue 7595: backward reached the parameters, but no gradient bucket was filled, and the
// step failed far from the cause; with empty groups and layers the same buckets are rightly empty.
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cpu_optimizer_service/common/reason.h"
#include "tests/cpu_optimizer_service/job/job_driver.h"
#include "tests/support/messages.h"
#include "tests/upstream/linear_model.h"
#include "tests/upstream/offloaded_run.h"
#include "tests/upstream/tensors.h"

namespace ballast {
namespace {

constexpr double kTolerance = 5e-5;

class Issue7595Test : public testing::TestWithParam<Through> {};

INSTANTIATE_TEST_SUITE_P(Everywhere, Issue7595Test,
                         testing::Values(Through::kEngine, Through::kClient),
                         [](const auto& info) { return Name(info.param); });

Tensors RandomFor(const JobSpec& spec, const std::vector<int>& parameters, uint64_t seed) {
  const Layout layout = Layout::Create(spec.layout).value();
  Tensors tensors;
  for (const int p : parameters) {
    std::vector<float>& values = tensors[p];
    for (int64_t i = 0; i < layout.place(p).elements; ++i) {
      values.push_back(client::Random(seed, 7595, p, i));
    }
  }
  return tensors;
}

std::vector<int> AllOfThem(const JobSpec& spec) {
  std::vector<int> all(spec.layout.parameters.size());
  for (size_t p = 0; p < all.size(); ++p) all[p] = static_cast<int>(p);
  return all;
}

JobSpec WithPlainAdam(JobSpec spec) {
  for (GroupSpec& group : spec.groups) {
    group.hyper_parameters = {.lr = 1e-3, .weight_decay = 0, .decoupled_weight_decay = false};
  }
  return spec;
}

// Two parameters with a block each: rank 0 owns `first`, rank 1 `second`.
JobSpec TwoParameters(const std::string& name) {
  return WithPlainAdam(
      SpreadJob(name, {{.name = "first", .shape = {256}}, {.name = "second", .shape = {256}}}, 2));
}

// Trains in Ballast and without, and compares all weights after each step.
class Comparison {
 public:
  Comparison(Through through, const JobSpec& spec)
      : Comparison(through, spec, RandomFor(spec, AllOfThem(spec), 1)) {}
  Comparison(Through through, const JobSpec& spec, const Tensors& first)
      : run_(OffloadedRun::Start(through, spec, first)),
        reference_(first, spec.groups[0].hyper_parameters) {}

  OffloadedRun& run() { return *run_; }
  const PlainAdam& reference() const { return reference_; }

  const StepOutcome& last_outcome() const { return outcome_; }

  void Step(const Backwards& backwards) {
    TensorsOf<double> sum;
    for (const auto& ranks : backwards) {
      for (const Tensors& rank : ranks) AddTo(sum, ToDouble(rank));
    }
    StepWith(backwards, sum, 1);
  }
  // `reference_sum` is what backward without offload gave.
  void StepWith(const Backwards& backwards, const TensorsOf<double>& reference_sum,
                double divisor) {
    StepSettings settings;
    settings.scale.divisors.assign(run_->job().spec().groups.size(), divisor);
    const auto outcome = run_->Step(backwards, settings);
    ASSERT_TRUE(outcome.ok()) << outcome.status();
    EXPECT_TRUE(outcome->decision.apply) << outcome->skip_reason;
    outcome_ = *outcome;
    reference_.Step(reference_sum, divisor);
    EXPECT_LE(MaxDifference(run_->Weights(), reference_.weights()), kTolerance)
        << "at step " << outcome->step;
  }

 private:
  std::unique_ptr<OffloadedRun> run_;
  PlainAdam reference_;
  StepOutcome outcome_;
};

// ------------------------------------------------------------- hooks that never fire

TEST_P(Issue7595Test, HooksThatFireNoMoreOnOneWorkerAreRefusedAtItsSealByName) {
  const JobSpec spec = TwoParameters("one-worker");
  const auto run = OffloadedRun::Start(GetParam(), spec, RandomFor(spec, {0, 1}, 1));
  const std::string before = run->job().StateHash();
  const std::vector<Tensors> ranks = {RandomFor(spec, {0, 1}, 2), RandomFor(spec, {0, 1}, 3)};
  run->Begin();
  for (uint32_t m = 0; m < 2; ++m) {
    run->Send(0, ranks, m, m + 1);
    run->Send(1, ranks, m, m + 1);  // Its buckets are sent and hold what rank 0's backward gave.
    run->EndMicroStep(0, m, {});
    run->EndMicroStep(1, m, m == 0 ? UsedParameters{} : UsedIn({}));
  }
  EXPECT_TRUE(
      Refused(run->Seal(1, 2), absl::StatusCode::kFailedPrecondition, reason::kAbortAndRedo));
  EXPECT_EQ(run->job().Status().committed_step, 0u);
  EXPECT_EQ(run->job().StateHash(), before);
}

// Backward did its part, the transport did not: another error, which sending heals.
TEST_P(Issue7595Test, AMicroStepThatNeverArrivedIsRefusedAtItsSealByName) {
  const JobSpec spec = TwoParameters("not-sent");
  const auto run = OffloadedRun::Start(GetParam(), spec, RandomFor(spec, {0, 1}, 1));
  const std::string before = run->job().StateHash();
  const std::vector<Tensors> ranks = {RandomFor(spec, {0, 1}, 2), RandomFor(spec, {0, 1}, 3)};
  run->Begin();
  for (uint32_t m = 0; m < 2; ++m) {
    run->Send(0, ranks, m, m + 1);
    if (m == 0) run->Send(1, ranks, m, m + 1);
    run->EndMicroStep(0, m, {});
    run->EndMicroStep(1, m, {});
  }
  EXPECT_TRUE(
      Refused(run->Seal(1, 2), absl::StatusCode::kFailedPrecondition, reason::kSendAndSealAgain));
  EXPECT_EQ(run->job().Status().committed_step, 0u);
  EXPECT_EQ(run->job().StateHash(), before);

  // The step is still open: what was missing makes it whole.
  run->Send(1, ranks, 1, 2);
  EXPECT_TRUE(run->SealAll(2).ok());
  EXPECT_NE(run->job().StateHash(), before);
}

TEST_P(Issue7595Test, NoHookOnAnyWorkerIsRefusedAtEachSeal) {
  const JobSpec spec = TwoParameters("both-workers");
  const auto run = OffloadedRun::Start(GetParam(), spec, RandomFor(spec, {0, 1}, 1));
  const std::string before = run->job().StateHash();
  run->Begin();
  for (int rank = 0; rank < 2; ++rank) run->EndMicroStep(rank, 0, UsedIn({}));
  for (int rank = 0; rank < 2; ++rank) {
    EXPECT_TRUE(
        Refused(run->Seal(rank, 1), absl::StatusCode::kFailedPrecondition, reason::kAbortAndRedo));
  }
  EXPECT_EQ(run->job().Status().committed_step, 0u);
  EXPECT_EQ(run->job().StateHash(), before);
}

TEST_P(Issue7595Test, ASealOfNoMicroStepsCannotPassForAStep) {
  const JobSpec spec = TwoParameters("none");
  const auto run = OffloadedRun::Start(GetParam(), spec, RandomFor(spec, {0, 1}, 1));
  run->Begin();
  EXPECT_FALSE(run->Seal(0, 0).ok());
  EXPECT_EQ(run->job().Status().committed_step, 0u);
}

// Three states of an empty bucket; each has an answer of its own.
TEST(Issue7595EmptyBucketTest, NothingArrivedDeclaredUnusedAndAlreadyDrainedAreToldApart) {
  Engine engine({.memory_limit_bytes = int64_t{64} << 20, .threads = 1});
  JobSpec spec = TwoParameters("states");
  spec.layout.world_size = 1;
  for (PartitionRange& range : spec.layout.partitions) range.rank = 0;
  JobDriver driver(engine, spec);
  driver.UploadWeights();
  driver.AttachAll();
  const auto refusal_with = [&](bool second_arrives, const UsedParameters& used) {
    driver.BeginAll();
    EXPECT_EQ(driver.Send(0, driver.Values(0, 5), 0).value(), ContributionResult::kAdded);
    if (second_arrives) {
      EXPECT_TRUE(driver.stream(0).Contribute({.step = 1, .chunk = 1, .empty = true}).ok());
    }
    driver.EndMicroStepAll(0, used);
    const auto refusal = driver.stream(0).Seal(1, 1).value();
    EXPECT_TRUE(driver.job().AbortStep().ok());
    driver.AttachAll();
    return refusal.has_value() ? refusal->status : absl::OkStatus();
  };
  const UsedParameters first_only = {.all = false, .parameters = {0}};
  EXPECT_TRUE(Refused(refusal_with(false, first_only), absl::StatusCode::kFailedPrecondition,
                      reason::kSendAndSealAgain));
  EXPECT_TRUE(Refused(refusal_with(true, first_only), absl::StatusCode::kFailedPrecondition,
                      reason::kAbortAndRedo));
  EXPECT_TRUE(Refused(refusal_with(false, UsedIn({})), absl::StatusCode::kFailedPrecondition,
                      reason::kAbortAndRedo));
  EXPECT_TRUE(Refused(refusal_with(true, UsedIn({})), absl::StatusCode::kFailedPrecondition,
                      reason::kAbortAndRedo));
  EXPECT_TRUE(Refused(refusal_with(true, {}), absl::StatusCode::kFailedPrecondition,
                      reason::kAbortAndRedo));

  // Drained: the service holds all of it, and an empty bucket at the seal is as it should be. What
  // comes again is a repeat; what comes after the commit is of no open step.
  driver.BeginAll();
  driver.SendAll(6, 0, true);
  driver.EndMicroStepAll(0);
  EXPECT_EQ(driver.Send(0, driver.Values(0, 9), 0).value(), ContributionResult::kRepeat);
  driver.SealAll(1);
  EXPECT_EQ(driver.job().Status().committed_step, 1u);
  EXPECT_TRUE(Refused(driver.Send(0, driver.Values(0, 9), 0), absl::StatusCode::kFailedPrecondition,
                      reason::kOtherStep));
}

// ------------------------------------------------------------- parameters that take no part

// The report's model: 1083 parameters, of which backward reaches 63.
JobSpec Parameters1083(UnusedPolicy policy) {
  std::vector<ParameterSpec> parameters;
  for (int p = 0; p < 1083; ++p) {
    parameters.push_back({.name = "p" + std::to_string(p), .shape = {1 + p % 37}, .group = p % 2});
  }
  JobSpec spec = WithPlainAdam(SpreadJob("p1083", std::move(parameters), 2));
  spec.unused_policy = policy;
  return spec;
}

std::vector<int> The63() {
  std::vector<int> reached;
  for (int i = 0; i < 63; ++i) reached.push_back(17 * i + 3);
  return reached;
}

TEST_P(Issue7595Test, Of1083ParametersThe63ReachedAreUpdatedAndNoOther) {
  const JobSpec spec = Parameters1083(UnusedPolicy::kSkip);
  Comparison comparison(GetParam(), spec);
  OffloadedRun& run = comparison.run();
  const Tensors before = run.State(Plane::kMaster);
  for (uint64_t step = 1; step <= 2; ++step) {
    comparison.Step({{RandomFor(spec, The63(), 10 * step), RandomFor(spec, The63(), 11 * step)}});
  }
  const Tensors after = run.State(Plane::kMaster);
  const Tensors exp_avg = run.State(Plane::kExpAvg);
  const std::vector<int> reached = The63();
  int updated = 0;
  for (int p = 0; p < 1083; ++p) {
    const bool takes_part = std::find(reached.begin(), reached.end(), p) != reached.end();
    EXPECT_EQ(run.update_count(p), takes_part ? 2 : 0) << "p" << p;
    if (takes_part) {
      EXPECT_NE(after.at(p), before.at(p)) << "p" << p;
      ++updated;
    } else {
      EXPECT_EQ(after.at(p), before.at(p)) << "p" << p;
      EXPECT_EQ(exp_avg.at(p), std::vector<float>(after.at(p).size(), 0.0f)) << "p" << p;
    }
  }
  EXPECT_EQ(updated, 63);
  // Through the wire come the first 64, and how many others there are.
  EXPECT_EQ(comparison.last_outcome().unused_parameters.size(),
            GetParam() == Through::kClient ? 64u : 1020u);
}

TEST_P(Issue7595Test, Of1083ParametersThoseNotReachedAreAnErrorUnlessAllowed) {
  const JobSpec spec = Parameters1083(UnusedPolicy::kError);
  const auto run = OffloadedRun::Start(GetParam(), spec, RandomFor(spec, AllOfThem(spec), 1));
  EXPECT_TRUE(Refused(run->Step({{RandomFor(spec, The63(), 2), RandomFor(spec, The63(), 3)}}),
                      absl::StatusCode::kFailedPrecondition, reason::kAbortAndRedo));
  EXPECT_EQ(run->job().Status().committed_step, 0u);
}

TEST_P(Issue7595Test, UseThatAlternatesPerIterationFollowsTorch) {
  JobSpec spec = WithPlainAdam(SpreadJob("alternating",
                                         {{.name = "always", .shape = {4, 4}},
                                          {.name = "even", .shape = {4, 4}},
                                          {.name = "odd", .shape = {4, 4}, .group = 1}},
                                         2));
  spec.unused_policy = UnusedPolicy::kSkip;
  Comparison comparison(GetParam(), spec);
  for (uint64_t step = 0; step < 16; ++step) {
    const std::vector<int> used = {0, step % 2 == 0 ? 1 : 2};
    Backwards backwards(2, std::vector<Tensors>(2));
    for (uint64_t m = 0; m < 2; ++m) {
      for (uint64_t rank = 0; rank < 2; ++rank) {
        backwards[m][rank] = RandomFor(spec, used, 100 * step + 10 * m + rank);
      }
    }
    comparison.Step(backwards);
  }
  EXPECT_EQ(comparison.run().update_count(0), 16);
  EXPECT_EQ(comparison.run().update_count(1), 8);
  EXPECT_EQ(comparison.run().update_count(2), 8);
}

TEST_P(Issue7595Test, TwoHeadsInWindowsABAEqualNoOffload) {
  const LinearModel model(3, 8);  // A trunk and two heads.
  JobSpec spec = WithPlainAdam(SpreadJob("heads", model.Parameters(), 2));
  spec.unused_policy = UnusedPolicy::kSkip;
  Comparison comparison(GetParam(), spec, model.FirstWeights());
  uint64_t sample = 0;
  for (const int head : {1, 2, 1}) {
    for (int step = 0; step < 3; ++step) {
      const Tensors weights = comparison.run().Weights();
      Backwards backwards(2, std::vector<Tensors>(2));
      TensorsOf<double> sum;
      for (auto& ranks : backwards) {
        for (Tensors& gradients : ranks) {
          const std::vector<Sample> batch = model.MakeSamples(sample, 4);
          sample += batch.size();
          model.Backward(weights, {0, head}, batch, gradients);
          model.Backward(comparison.reference().weights(), {0, head}, batch, sum);
        }
      }
      comparison.StepWith(backwards, sum, 4);
    }
  }
  EXPECT_EQ(comparison.run().update_count(0), 9);
  EXPECT_EQ(comparison.run().update_count(2), 6);
  EXPECT_EQ(comparison.run().update_count(4), 3);
}

// ------------------------------------------------------------- empty by right

TEST_P(Issue7595Test, ARankWithNothingTakesPart) {
  // Three ranks and two parameters of hidden 1: one block, which one rank owns.
  const JobSpec spec =
      WithPlainAdam(InFloat32(MakeJobSpec({.group_sizes = {{1, 1}}, .world_size = 3})));
  Comparison comparison(GetParam(), spec);
  ASSERT_EQ(comparison.run().job().layout().partition_elements(2), 0);
  for (uint64_t step = 1; step <= 2; ++step) {
    Backwards backwards(2, std::vector<Tensors>(3));
    for (uint64_t rank = 0; rank < 3; ++rank) {
      backwards[0][rank] = RandomFor(spec, {0, 1}, 10 * step + rank);
      backwards[1][rank] = RandomFor(spec, {0, 1}, 20 * step + rank);
    }
    comparison.Step(backwards);
  }
}

TEST_P(Issue7595Test, AnEmptyGroupMayStandFirstInTheMiddleOrLast) {
  const std::vector<std::vector<int64_t>> orders = {{0, 8, 24}, {8, 0, 24}, {8, 24, 0}};
  for (const auto& sizes : orders) {
    for (const bool has_parameter : {false, true}) {  // Of no elements; or no parameter at all.
      JobShape shape = {.group_sizes = {}, .world_size = 2};
      for (const int64_t size : sizes) {
        const bool listed = size > 0 || has_parameter;
        shape.group_sizes.push_back(listed ? std::vector<int64_t>{size} : std::vector<int64_t>{});
      }
      const JobSpec spec = WithPlainAdam(InFloat32(MakeJobSpec(shape)));
      Comparison comparison(GetParam(), spec);
      for (uint64_t step = 1; step <= 2; ++step) {
        comparison.Step({{RandomFor(spec, AllOfThem(spec), 10 * step),
                          RandomFor(spec, AllOfThem(spec), 11 * step)}});
      }
      EXPECT_TRUE(comparison.last_outcome().unused_parameters.empty());
    }
  }
}

TEST_P(Issue7595Test, AParameterWithoutElementsAmongOthersCostsNothing) {
  const JobSpec spec =
      WithPlainAdam(InFloat32(MakeJobSpec({.group_sizes = {{8, 0, 24}}, .world_size = 2})));
  Comparison comparison(GetParam(), spec);
  // Autograd may or may not give an empty gradient to it; neither is a fault.
  comparison.Step({{RandomFor(spec, {0, 1, 2}, 2), RandomFor(spec, {0, 1, 2}, 3)}});
  comparison.Step({{RandomFor(spec, {0, 2}, 4), RandomFor(spec, {0, 2}, 5)}});
  EXPECT_EQ(comparison.run().job().layout().flat_elements(0), kBlockElements);
}

TEST_P(Issue7595Test, ATrailingLayerOf4By0TakesPart) {
  const JobSpec spec = WithPlainAdam(SpreadJob("trailing",
                                               {{.name = "layer0", .shape = {4, 4}},
                                                {.name = "layer1", .shape = {4, 4}, .group = 1},
                                                {.name = "layer2", .shape = {4, 0}, .group = 2}},
                                               2));
  Comparison comparison(GetParam(), spec);
  comparison.Step({{RandomFor(spec, {0, 1, 2}, 2), RandomFor(spec, {0, 1, 2}, 3)}});
  comparison.Step({{RandomFor(spec, {0, 1}, 4), RandomFor(spec, {0, 1}, 5)}});
  EXPECT_TRUE(comparison.run().State(Plane::kMaster).at(2).empty());
}

}  // namespace
}  // namespace ballast
