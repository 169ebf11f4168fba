// DeepSpeed PR 7906 (issue 7905): several param groups under SuperOffload were stepped with group
// 0's settings; what review found beside it was left out of the copied settings too.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "cpu_optimizer_service/common/rules/adam.h"
#include "tests/upstream/linear_model.h"
#include "tests/upstream/offloaded_run.h"
#include "tests/upstream/tensors.h"

namespace ballast {
namespace {

constexpr int kRanks = 2;
constexpr double kDivisor = 4;

// Five groups, no hyper-parameter of one like another's; the fourth is frozen. Their flat spaces
// are of 1, 3, 5, 0 and 2 blocks.
JobSpec FiveGroups(const std::string& name, int64_t chunk_elements) {
  JobSpec spec = SpreadJob(name,
                           {{.name = "a", .shape = {10}, .group = 0},
                            {.name = "b", .shape = {600}, .group = 1},
                            {.name = "c.w", .shape = {1000}, .group = 2},
                            {.name = "c.b", .shape = {30}, .group = 2},
                            {.name = "frozen.w", .shape = {300}, .group = 3, .trainable = false},
                            {.name = "frozen.b", .shape = {30}, .group = 3, .trainable = false},
                            {.name = "e", .shape = {400}, .group = 4}},
                           kRanks);
  spec.groups[0].hyper_parameters = {.lr = 1e-3, .weight_decay = 0};
  spec.groups[1].hyper_parameters = {.lr = 3e-2,
                                     .beta1 = 0.5,
                                     .beta2 = 0.9,
                                     .eps = 1e-3,
                                     .weight_decay = 0.1,
                                     .bias_correction = false};
  spec.groups[2].hyper_parameters = {.lr = 7e-3,
                                     .beta1 = 0.8,
                                     .beta2 = 0.99,
                                     .eps = 1e-5,
                                     .weight_decay = 0.3,
                                     .decoupled_weight_decay = false,
                                     .amsgrad = true};
  spec.groups[3].hyper_parameters = {.lr = 100, .eps = 1};
  spec.groups[4].hyper_parameters = {
      .lr = 2e-2, .beta1 = 0.7, .beta2 = 0.97, .eps = 1e-2, .weight_decay = 0.05, .maximize = true};
  spec.groups[1].wire_dtype = DType::kBFloat16;
  spec.layout.chunk_elements = chunk_elements;
  if (chunk_elements > kBlockElements) {
    // A partition that is more than one block, so that chunks differ from blocks.
    spec.layout.partitions.clear();
    for (int group = 0; group < spec.layout.group_count; ++group) {
      const int64_t flat = FlatElements(spec.layout)[group];
      if (flat == 0) continue;
      spec.layout.partitions.push_back(
          {.rank = group % kRanks, .group = group, .begin = 0, .end = flat});
    }
  }
  return spec;
}

const std::vector<int> kTrainable = {0, 1, 2, 3, 6};
constexpr double kMaxNorm = 40;

// Multiples of 1/64 of at most 7 bits: exact in bf16, and so are their sums of squares in double in
// any order.
Tensors Gradients(const JobSpec& spec, uint64_t seed, float size) {
  Tensors gradients;
  for (const int p : kTrainable) {
    for (int64_t i = 0; i < spec.layout.parameters[p].shape[0]; ++i) {
      gradients[p].push_back(std::round(client::Random(seed, 7906, p, i) * 32) / 64 * size);
    }
  }
  return gradients;
}

Tensors FirstWeights(const JobSpec& spec) {
  Tensors weights;
  for (const int p : kTrainable) {
    for (int64_t i = 0; i < spec.layout.parameters[p].shape[0]; ++i) {
      weights[p].push_back(client::Random(1, 7906, p, i));
    }
  }
  return weights;
}

// The same training without offload: parameter by parameter, in plain loops.
class Reference {
 public:
  explicit Reference(const JobSpec& spec) : spec_(spec), master_(FirstWeights(spec)) {
    for (const auto& [p, values] : master_) {
      exp_avg_[p].resize(values.size());
      exp_avg_sq_[p].resize(values.size());
      if (Of(p).amsgrad) max_exp_avg_sq_[p].resize(values.size());
    }
  }

  void Override(int group, const HyperParameterOverrides& changes) {
    HyperParameters& values = spec_.groups[group].hyper_parameters;
    values = Apply(values, changes);
  }
  const HyperParameters& Of(int parameter) const {
    return spec_.groups[spec_.layout.parameters[parameter].group].hyper_parameters;
  }

  void Step(const Tensors& sum) {
    double squares = 0;
    for (const auto& [p, values] : sum) {
      for (const double value : values) squares += value * value;
    }
    norm_ = std::sqrt(squares / kDivisor / kDivisor);
    if (!std::isfinite(norm_)) return;
    clip_coefficient_ = std::min(1.0, kMaxNorm / (norm_ + 1e-6));
    ++updates_;
    for (const auto& [p, values] : sum) {
      const bool amsgrad = Of(p).amsgrad;
      UpdateAdamReference({.elements = static_cast<int64_t>(values.size()),
                           .gradient = values.data(),
                           .gradient_dtype = DType::kFloat32,
                           .master = master_[p].data(),
                           .exp_avg = exp_avg_[p].data(),
                           .exp_avg_sq = exp_avg_sq_[p].data(),
                           .max_exp_avg_sq = amsgrad ? max_exp_avg_sq_[p].data() : nullptr,
                           .new_master = master_[p].data(),
                           .new_exp_avg = exp_avg_[p].data(),
                           .new_exp_avg_sq = exp_avg_sq_[p].data(),
                           .new_max_exp_avg_sq = amsgrad ? max_exp_avg_sq_[p].data() : nullptr,
                           .scalars = MakeAdamScalars(
                               Of(p), updates_, static_cast<float>(clip_coefficient_ / kDivisor))});
    }
  }

  double norm() const { return norm_; }
  double clip_coefficient() const { return clip_coefficient_; }

  void ExpectStateOf(OffloadedRun& run, const std::string& when) const {
    EXPECT_EQ(run.State(Plane::kMaster), master_) << when;
    EXPECT_EQ(run.State(Plane::kExpAvg), exp_avg_) << when;
    EXPECT_EQ(run.State(Plane::kExpAvgSq), exp_avg_sq_) << when;
    EXPECT_EQ(run.State(Plane::kMaxExpAvgSq), max_exp_avg_sq_) << when;
    EXPECT_EQ(run.Weights(), master_) << when;
    for (const int p : kTrainable) EXPECT_EQ(run.update_count(p), updates_) << when;
  }

 private:
  JobSpec spec_;
  Tensors master_, exp_avg_, exp_avg_sq_, max_exp_avg_sq_;
  int64_t updates_ = 0;
  double norm_ = 0;
  double clip_coefficient_ = 1;
};

// What the schedule says before a step: lr falls in every group by a factor of its own, and at step
// 4 a group's betas change.
StepSettings SettingsOf(uint64_t step, const Reference& reference) {
  StepSettings settings{.scale = {.divisors = std::vector<double>(5, kDivisor)}};
  const std::vector<int> first_of_group = {0, 1, 2, 4, 6};
  for (int group = 0; group < 5; ++group) {
    if (step % 2 == 1) continue;
    const double lr = reference.Of(first_of_group[group]).lr;
    settings.overrides[group] = {.lr = lr * (1 - 0.1 * (group + 1))};
  }
  if (step == 4) {
    settings.overrides[1].beta1 = 0.6;
    settings.overrides[4].beta2 = 0.5;
  }
  return settings;
}

// Numbers of the steps whose gradients are large enough to be clipped, or hold a NaN.
constexpr uint64_t kClippedStep = 3;
constexpr uint64_t kSkippedStep = 5;

void TrainStep(OffloadedRun& run, Reference& reference, uint64_t step) {
  const JobSpec& spec = run.job().spec();
  const StepSettings settings = SettingsOf(step, reference);
  Backwards backwards(2, std::vector<Tensors>(kRanks));
  Tensors sum;
  for (uint64_t m = 0; m < 2; ++m) {
    for (uint64_t rank = 0; rank < kRanks; ++rank) {
      backwards[m][rank] =
          Gradients(spec, 100 * step + 10 * m + rank, step == kClippedStep ? 16.0f : 1.0f);
      if (step == kSkippedStep && m == 0 && rank == 1) {
        backwards[m][rank][3][7] = std::numeric_limits<float>::quiet_NaN();
      }
      AddTo(sum, backwards[m][rank]);
    }
  }
  run.SetMaxNorm(kMaxNorm);
  const auto outcome = run.Step(backwards, settings);
  ASSERT_TRUE(outcome.ok()) << outcome.status();
  for (const auto& [group, changes] : settings.overrides) reference.Override(group, changes);
  reference.Step(sum);

  const std::string when = "step " + std::to_string(step);
  EXPECT_EQ(outcome->decision.apply, step != kSkippedStep) << when;
  if (step == kSkippedStep) {
    EXPECT_NE(outcome->skip_reason.find("c.b is nan at element 7"), std::string::npos)
        << outcome->skip_reason;
  } else {
    EXPECT_EQ(outcome->decision.norm, reference.norm()) << when;
    EXPECT_EQ(outcome->decision.clip_coefficient, reference.clip_coefficient()) << when;
    EXPECT_EQ(outcome->decision.clip_coefficient < 1, step == kClippedStep) << when;
  }
  reference.ExpectStateOf(run, when);
}

class Pr7906Test : public testing::TestWithParam<std::tuple<Through, UpdateMode>> {
 protected:
  static Through through() { return std::get<Through>(GetParam()); }
  static JobSpec Groups(const std::string& name, int64_t chunk_elements = kBlockElements) {
    JobSpec spec = FiveGroups(name, chunk_elements);
    spec.update_mode = std::get<UpdateMode>(GetParam());
    return spec;
  }
};

INSTANTIATE_TEST_SUITE_P(
    Everywhere, Pr7906Test,
    testing::Combine(testing::Values(Through::kEngine, Through::kClient),
                     testing::Values(UpdateMode::kWait, UpdateMode::kSpeculate)),
    [](const auto& info) {
      return Name(std::get<Through>(info.param)) +
             (std::get<UpdateMode>(info.param) == UpdateMode::kWait ? "Waiting" : "Speculating");
    });

// Chunks of one block are smaller than most groups; a chunk of 1024 elements is larger than some
// groups and smaller than others; one of 2^18 is larger than any.
TEST_P(Pr7906Test, GroupsThatDifferInEverythingKeepTheirOwnForAnyChunkSize) {
  for (const int64_t chunk_elements : {kBlockElements, int64_t{1024}, kMaxChunkElements}) {
    const JobSpec spec = Groups("groups", chunk_elements);
    const auto run = OffloadedRun::Start(through(), spec, FirstWeights(spec));
    Reference reference(spec);
    for (uint64_t step = 1; step <= 7; ++step) TrainStep(*run, reference, step);
    EXPECT_EQ(run->job().Status().skipped_steps, 1u);
    // The frozen group has no state at all.
    EXPECT_EQ(run->job().layout().flat_elements(3), 0);
    EXPECT_EQ(run->update_count(4), 0);
  }
}

TEST_P(Pr7906Test, EveryStepIsRecordedWithTheSettingsThatItUsed) {
  const JobSpec spec = Groups("recorded");
  const auto run = OffloadedRun::Start(through(), spec, FirstWeights(spec));
  Reference reference(spec);
  for (uint64_t step = 1; step <= 6; ++step) {
    TrainStep(*run, reference, step);
    const auto records = run->job().Status().recent_steps;
    ASSERT_EQ(records.size(), step);
    const auto& used = records.back().hyper_parameters;
    ASSERT_EQ(used.size(), 5u);
    for (const int p : {0, 1, 2, 4, 6}) {
      EXPECT_EQ(used[spec.layout.parameters[p].group], reference.Of(p)) << "step " << step;
    }
  }
}

TEST_P(Pr7906Test, ASettingChangedByAnOperatorCountsForItsGroupAlone) {
  const JobSpec spec = Groups("operator");
  const auto run = OffloadedRun::Start(through(), spec, FirstWeights(spec));
  Reference reference(spec);
  TrainStep(*run, reference, 1);
  const std::vector<std::pair<int, HyperParameterOverrides>> changes = {
      {0, {.weight_decay = 0.2, .bias_correction = false}},
      {1, {.eps = 0.5, .decoupled_weight_decay = false}},
      {4, {.beta1 = 0.1, .maximize = false}}};
  for (const auto& [group, change] : changes) {
    ASSERT_TRUE(run->job().UpdateGroup(group, change).ok());
    reference.Override(group, change);
  }
  TrainStep(*run, reference, 2);
  TrainStep(*run, reference, 3);
}

// Moments, update counts and changed settings of every group are in the saved state.
TEST_P(Pr7906Test, SavedInMidRunAndLoadedTheRunGoesOnWithTheSameBits) {
  const JobSpec spec = Groups("saved");
  const auto folder = std::filesystem::path(testing::TempDir()) /
                      ("pr_7906_" + Name(through()) +
                       (spec.update_mode == UpdateMode::kWait ? "_wait_" : "_speculate_") +
                       std::to_string(getpid()));
  std::filesystem::remove_all(folder);
  std::filesystem::create_directories(folder);
  const std::string saved = (folder / "saved").string();
  Reference reference(spec);
  std::string undisturbed;
  {
    const auto run = OffloadedRun::Start(through(), spec, FirstWeights(spec));
    for (uint64_t step = 1; step <= 4; ++step) TrainStep(*run, reference, step);
    ASSERT_TRUE(run->job().Save(saved).ok());
    Reference onwards = reference;
    for (uint64_t step = 5; step <= 7; ++step) TrainStep(*run, onwards, step);
    undisturbed = run->job().StateHash();
  }
  Tensors other_weights = FirstWeights(spec);
  for (auto& [p, values] : other_weights) values.assign(values.size(), 0.25f);
  const auto run = OffloadedRun::Start(through(), spec, other_weights);
  run->Load(saved);
  reference.ExpectStateOf(*run, "loaded");
  for (uint64_t step = 5; step <= 7; ++step) TrainStep(*run, reference, step);
  EXPECT_EQ(run->job().StateHash(), undisturbed);
  std::filesystem::remove_all(folder);
}

// One backward a step, its gradients `size` times those of Gradients, with or without an infinity.
Backwards OneBackward(const JobSpec& spec, uint64_t step, float size, bool overflow) {
  Backwards backwards(1, std::vector<Tensors>(kRanks));
  for (uint64_t rank = 0; rank < kRanks; ++rank) {
    backwards[0][rank] = Gradients(spec, 100 * step + rank, size);
  }
  if (overflow) backwards[0][1][6][399] = std::numeric_limits<float>::infinity();
  return backwards;
}

// All chunks are updated before anybody seals, and then the step is sealed.
absl::StatusOr<StepOutcome> StepAheadOfTheSeal(OffloadedRun& run, const Backwards& backwards,
                                               const StepSettings& settings) {
  const int64_t chunks = static_cast<int64_t>(run.job().layout().chunks().size());
  const int64_t before = run.job().Status().speculation.speculated;
  run.Begin(settings);
  for (int rank = 0; rank < kRanks; ++rank) run.Send(rank, backwards[0], 0, 1, /*final=*/true);
  while (run.job().Status().speculation.speculated < before + chunks) std::this_thread::yield();
  for (int rank = 0; rank < kRanks; ++rank) {
    run.EndMicroStep(rank, 0, UsedIn(backwards[0][rank]));
  }
  return run.SealAll(1);
}

// The same job twice: one that speculates, and what it has to equal.
class Pr7906SpeculationTest : public testing::TestWithParam<Through> {
 protected:
  static JobSpec Spec(const std::string& name, UpdateMode mode) {
    JobSpec spec = FiveGroups(name, kBlockElements);
    spec.update_mode = mode;
    return spec;
  }
  static std::unique_ptr<OffloadedRun> Start(const JobSpec& spec) {
    std::unique_ptr<OffloadedRun> run = OffloadedRun::Start(GetParam(), spec, FirstWeights(spec));
    run->SetMaxNorm(1.0);
    return run;
  }

  const JobSpec spec_ = Spec("speculates", UpdateMode::kSpeculate);
  const StepSettings settings_ = {.scale = {.divisors = std::vector<double>(5, 1024.0)}};
  const std::unique_ptr<OffloadedRun> run_ = Start(spec_);
  const std::unique_ptr<OffloadedRun> waiting_ = Start(Spec("waits", UpdateMode::kWait));
};

INSTANTIATE_TEST_SUITE_P(Everywhere, Pr7906SpeculationTest,
                         testing::Values(Through::kEngine, Through::kClient),
                         [](const auto& info) { return Name(info.param); });

// Upstream, `if clip_grad` takes the synchronous path, and clipping is on by default.
TEST_P(Pr7906SpeculationTest, WithClippingOnAndNormsBelowItEveryChunkIsUpdatedAhead) {
  for (uint64_t step = 1; step <= 5; ++step) {
    const Backwards backwards = OneBackward(spec_, step, 1, false);
    const auto outcome = StepAheadOfTheSeal(*run_, backwards, settings_);
    ASSERT_TRUE(outcome.ok()) << outcome.status();
    EXPECT_GT(outcome->decision.norm, 0);
    EXPECT_LT(outcome->decision.norm, 1.0);
    const auto waited = waiting_->Step(backwards, settings_);
    EXPECT_EQ(waited->decision.norm, outcome->decision.norm);
    EXPECT_EQ(run_->job().StateHash(), waiting_->job().StateHash()) << "step " << step;
    EXPECT_EQ(run_->Weights(), waiting_->Weights()) << "step " << step;
  }
  const int64_t chunks = static_cast<int64_t>(run_->job().layout().chunks().size());
  EXPECT_EQ(run_->job().Status().speculation.published, 5 * chunks);
  EXPECT_EQ(run_->job().Status().speculation.redone, 0);
}

// Upstream, the rollback after a wrong speculation inverts Adam and loses bits, and happens only with
// clipping off.
TEST_P(Pr7906SpeculationTest, ForcedClippingAndOverflowLeaveTheBitsOfARunThatWaits) {
  for (uint64_t step = 1; step <= 40; ++step) {
    const bool clips = step % 5 == 2;
    const bool overflows = step % 7 == 3;
    const Backwards backwards = OneBackward(spec_, step, clips ? 4096.0f : 1.0f, overflows);
    const auto outcome = run_->Step(backwards, settings_);
    ASSERT_TRUE(outcome.ok()) << outcome.status();
    const auto waited = waiting_->Step(backwards, settings_);
    ASSERT_TRUE(waited.ok()) << waited.status();
    EXPECT_EQ(outcome->decision.apply, !overflows);
    EXPECT_EQ(outcome->decision.clip_coefficient < 1, clips && !overflows);
    EXPECT_EQ(outcome->decision.clip_coefficient, waited->decision.clip_coefficient);
    EXPECT_EQ(run_->job().StateHash(), waiting_->job().StateHash()) << "step " << step;
    EXPECT_EQ(run_->Weights(), waiting_->Weights()) << "step " << step;
  }
}

}  // namespace
}  // namespace ballast
