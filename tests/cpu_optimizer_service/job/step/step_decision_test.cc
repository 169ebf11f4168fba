#include "cpu_optimizer_service/job/step/step_decision.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cpu_optimizer_service/common/reason.h"
#include "tests/cpu_optimizer_service/job/job_driver.h"
#include "tests/support/messages.h"

namespace ballast {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;

// Two ranks, two groups of two parameters each: no engine, no memory, no gradients but their sums.
class StepDecisionTest : public testing::Test {
 protected:
  StepSummary Summary(std::vector<double> group_sums, const UsedParameters& used = {}) const {
    StepSummary summary = {.micro_steps = 1,
                           .group_sums = std::move(group_sums),
                           .uses = StepUses(4),
                           .non_finite = non_finite_};
    EXPECT_TRUE(summary.uses.Add(0, used));
    return summary;
  }
  StepFacts Facts(const StepSummary& summary) const {
    return {.spec = spec_,
            .layout = layout_,
            .terms = terms_,
            .attempt = 3,
            .summary = summary,
            .update_counts = counts_};
  }
  static std::vector<RankInStep> Votes(std::optional<StepVote> first,
                                       std::optional<StepVote> second) {
    return {{.vote = std::move(first)}, {.vote = std::move(second)}};
  }
  Draft Decided(const StepVote& vote, std::vector<double> group_sums,
                const UsedParameters& used = {}) const {
    return DecideStep(Facts(Summary(std::move(group_sums), used)), vote);
  }

  JobSpec spec_ = MakeJobSpec({.group_sizes = {{10, 10}, {10, 0}}, .world_size = 2});
  Layout layout_ = Layout::Create(spec_.layout).value();
  StepTerms terms_ = {.step = 4,
                      .settings = {.scale = {.loss_scale = 2, .divisors = {1, 4}}},
                      .hyper_parameters = {{.lr = 0.1}, {.lr = 0.2}}};
  std::vector<int64_t> counts_ = {7, 8, 9, 10};
  std::string non_finite_;
};

TEST_F(StepDecisionTest, TheNormIsToldInAllAndByGroup) {
  const StepNorm norm = NormOf(Facts(Summary({36, 64}, {.all = false, .parameters = {0, 2}})));
  EXPECT_EQ(norm.step, 4u);
  EXPECT_EQ(norm.attempt, 3u);
  EXPECT_EQ(norm.norm, std::sqrt(36 / 4.0 + 64 / 64.0));
  EXPECT_THAT(norm.group_norms, ElementsAre(3, 1));
  EXPECT_THAT(norm.unused_parameters, ElementsAre("p1"));  // p3 has no elements.
  EXPECT_THAT(norm.non_finite, IsEmpty());
}

TEST_F(StepDecisionTest, TheDefaultVoteAppliesWhatTheStepBeganWith) {
  const Draft decided = Decided({}, {36, 64});
  EXPECT_TRUE(decided.outcome.decision.apply);
  EXPECT_EQ(decided.outcome.decision.clip_coefficient, 1);
  EXPECT_THAT(decided.update.multipliers, ElementsAre(0.5f, 0.125f));
  EXPECT_THAT(decided.update.update_counts, ElementsAre(8, 9, 10, 11));
  EXPECT_EQ(decided.update.hyper_parameters[1].lr, 0.2);
}

TEST_F(StepDecisionTest, ClipsByTheNormOrByMultipliers) {
  const Draft by_norm = Decided({.clipping = {.max_norm = 1}}, {36, 64});
  const double coefficient = 1 / (std::sqrt(10.0) + 1e-6);
  EXPECT_EQ(by_norm.outcome.decision.clip_coefficient, coefficient);
  EXPECT_THAT(by_norm.update.multipliers, ElementsAre(static_cast<float>(coefficient / 2),
                                                      static_cast<float>(coefficient / 8)));
  const Draft by_group = Decided({.clipping = {.multipliers = {0.5, 3}}}, {36, 64});
  EXPECT_EQ(by_group.outcome.decision.clip_coefficient, 1);
  EXPECT_THAT(by_group.update.multipliers, ElementsAre(0.25f, 0.375f));
}

TEST_F(StepDecisionTest, HyperParametersAreThoseOfTheVote) {
  const Draft decided = Decided({.overrides = {{1, {.lr = 0.7, .eps = 1e-3}}}}, {36, 64});
  EXPECT_EQ(decided.update.hyper_parameters[0].lr, 0.1);
  EXPECT_EQ(decided.update.hyper_parameters[1].lr, 0.7);
  EXPECT_EQ(decided.update.hyper_parameters[1].eps, 1e-3);
}

TEST_F(StepDecisionTest, ASkipSaysWhy) {
  const Draft abandoned = Decided({.apply = false}, {36, 64});
  EXPECT_FALSE(abandoned.outcome.decision.apply);
  EXPECT_EQ(abandoned.outcome.decision.norm, std::sqrt(10.0));
  EXPECT_THAT(abandoned.outcome.decision.multipliers, IsEmpty());
  EXPECT_TRUE(Says(abandoned.outcome.skip_reason));
  EXPECT_TRUE(
      Says(Decided({.clipping = {.multipliers = {1e-45, 1}}}, {36, 64}).outcome.skip_reason));
  non_finite_ = "gradient of p0 is nan";
  const double nan = std::numeric_limits<double>::quiet_NaN();
  EXPECT_EQ(Decided({}, {nan, 64}).outcome.skip_reason, non_finite_);
  // That the ranks abandon it is nearer.
  EXPECT_TRUE(Says(Decided({.apply = false}, {nan, 64}).outcome.skip_reason));
}

TEST_F(StepDecisionTest, WhatIsUnusedIsUpdatedAsThePolicySays) {
  const UsedParameters used = {.all = false, .parameters = {0, 2}};
  spec_.unused_policy = UnusedPolicy::kSkip;
  const Draft skipped = Decided({}, {36, 64}, used);
  EXPECT_THAT(skipped.outcome.unused_parameters, ElementsAre("p1"));
  EXPECT_THAT(skipped.update.update_counts, ElementsAre(8, 0, 10, 11));
  spec_.unused_policy = UnusedPolicy::kZero;
  EXPECT_THAT(Decided({}, {36, 64}, used).update.update_counts, ElementsAre(8, 9, 10, 11));
}

TEST_F(StepDecisionTest, VotesThatDifferAreNamedWithTheRankAndTheFirstDifference) {
  const StepVote vote = {.clipping = {.multipliers = {1, 2}}, .trainer_state = "a"};
  const auto expect_refused = [&](const auto& change) {
    StepVote other = vote;
    change(other);
    EXPECT_EQ(FirstDifference(vote, vote), "");
    EXPECT_FALSE(other == vote);
    EXPECT_TRUE(Refused(CheckVotesAgree(4, Votes(vote, other)),
                        absl::StatusCode::kFailedPrecondition, reason::kVoteAgain));
  };
  expect_refused([](StepVote& v) { v.apply = false; });
  expect_refused([](StepVote& v) { v.clipping = {.max_norm = 3}; });
  expect_refused([](StepVote& v) { v.clipping.multipliers[1] = 2.0000001; });
  expect_refused([](StepVote& v) { v.overrides[1].lr = 1; });
  expect_refused([](StepVote& v) { v.trainer_state = "b"; });
  expect_refused([](StepVote& v) { v.trainer_state.reset(); });
  EXPECT_TRUE(CheckVotesAgree(4, Votes(vote, vote)).ok());
  EXPECT_TRUE(CheckVotesAgree(4, Votes(std::nullopt, std::nullopt)).ok());  // None has voted.
}

TEST_F(StepDecisionTest, VotesThatCanNeverBeAreRefused) {
  const StepTerms terms = {.step = 4, .settings = {}, .hyper_parameters = {{}, {}}};
  const auto expect_refused = [&](const StepVote& vote) {
    EXPECT_TRUE(Refused(CheckVote(spec_, terms, 1, vote), absl::StatusCode::kInvalidArgument));
  };
  const double nan = std::numeric_limits<double>::quiet_NaN();
  expect_refused({.clipping = {.max_norm = -1}});
  expect_refused({.clipping = {.max_norm = nan}});
  expect_refused({.clipping = {.multipliers = {1, nan}}});
  expect_refused({.clipping = {.multipliers = {0, 1}}});
  expect_refused({.clipping = {.multipliers = {1}}});
  expect_refused({.clipping = {.max_norm = 1, .multipliers = {1, 1}}});
  expect_refused({.overrides = {{2, {.lr = 1}}}});
  expect_refused({.overrides = {{1, {.lr = -1}}}});
  expect_refused({.trainer_state = std::string(kMaxTrainerStateBytes + 1, 's')});
  EXPECT_TRUE(CheckVote(spec_, terms, 1, {.trainer_state = ""}).ok());
}

}  // namespace
}  // namespace ballast
