#include "cpu_optimizer_service/job/step/step_decision.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "cpu_optimizer_service/common/reason.h"
#include "tests/cpu_optimizer_service/job/job_driver.h"

namespace ballast {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

// Two ranks, two groups of two parameters each: no engine, no memory, no gradients but their sums.
class StepDecisionTest : public testing::Test {
 protected:
  static SealedStep Sealed(const std::vector<StepVote>& votes, std::vector<double> group_sums,
                           const UsedParameters& used = {}) {
    OpenStep open({.step = 4,
                   .settings = {.scale = {.loss_scale = 2, .divisors = {1, 4}}},
                   .hyper_parameters = {{.lr = 0.1}, {.lr = 0.2}}},
                  2, 4);
    for (int rank = 0; rank < 2; ++rank) {
      EXPECT_TRUE(open.Begin(rank, open.terms().settings).ok());
      EXPECT_TRUE(open.EndMicroStep(rank, 0, used).ok());
      EXPECT_TRUE(open.Seal(rank, 1).ok());
      if (!votes.empty()) open.SetVote(rank, votes[rank]);
    }
    SealedStep sealed = std::move(open).Close();
    sealed.SetSums(std::move(group_sums));
    return sealed;
  }
  StepFacts Facts(const SealedStep& sealed) const {
    return {.spec = spec_,
            .layout = layout_,
            .step = sealed,
            .update_counts = counts_,
            .non_finite = non_finite_};
  }
  DecidedUpdate Decided(const StepVote& vote, std::vector<double> group_sums,
                        const UsedParameters& used = {}) const {
    return DecideStep(Facts(Sealed({vote, vote}, std::move(group_sums), used)));
  }

  JobSpec spec_ = MakeJobSpec({.group_sizes = {{10, 10}, {10, 0}}, .world_size = 2});
  Layout layout_ = Layout::Create(spec_.layout).value();
  std::vector<int64_t> counts_ = {7, 8, 9, 10};
  std::string non_finite_;
};

TEST_F(StepDecisionTest, TheNormIsToldInAllAndByGroup) {
  const StepNorm norm = NormOf(Facts(Sealed({}, {36, 64}, {.all = false, .parameters = {0, 2}})));
  EXPECT_EQ(norm.step, 4u);
  EXPECT_EQ(norm.norm, std::sqrt(36 / 4.0 + 64 / 64.0));
  EXPECT_THAT(norm.group_norms, ElementsAre(3, 1));
  EXPECT_THAT(norm.unused_parameters, ElementsAre("p1"));  // p3 has no elements.
  EXPECT_THAT(norm.non_finite, IsEmpty());
}

TEST_F(StepDecisionTest, TheDefaultVoteAppliesWhatTheStepBeganWith) {
  const DecidedUpdate decided = Decided({}, {36, 64});
  EXPECT_TRUE(decided.outcome.decision.apply);
  EXPECT_EQ(decided.outcome.decision.clip_coefficient, 1);
  EXPECT_THAT(decided.update.multipliers, ElementsAre(0.5f, 0.125f));
  EXPECT_THAT(decided.update.update_counts, ElementsAre(8, 9, 10, 11));
  EXPECT_EQ(decided.update.hyper_parameters[1].lr, 0.2);
}

TEST_F(StepDecisionTest, ClipsByTheNormOrByMultipliers) {
  const DecidedUpdate by_norm = Decided({.clipping = {.max_norm = 1}}, {36, 64});
  const double coefficient = 1 / (std::sqrt(10.0) + 1e-6);
  EXPECT_EQ(by_norm.outcome.decision.clip_coefficient, coefficient);
  EXPECT_THAT(by_norm.update.multipliers, ElementsAre(static_cast<float>(coefficient / 2),
                                                      static_cast<float>(coefficient / 8)));
  const DecidedUpdate by_group = Decided({.clipping = {.multipliers = {0.5, 3}}}, {36, 64});
  EXPECT_EQ(by_group.outcome.decision.clip_coefficient, 1);
  EXPECT_THAT(by_group.update.multipliers, ElementsAre(0.25f, 0.375f));
}

TEST_F(StepDecisionTest, HyperParametersAreThoseOfTheVote) {
  const DecidedUpdate decided = Decided({.overrides = {{1, {.lr = 0.7, .eps = 1e-3}}}}, {36, 64});
  EXPECT_EQ(decided.update.hyper_parameters[0].lr, 0.1);
  EXPECT_EQ(decided.update.hyper_parameters[1].lr, 0.7);
  EXPECT_EQ(decided.update.hyper_parameters[1].eps, 1e-3);
}

TEST_F(StepDecisionTest, ASkipSaysWhy) {
  const DecidedUpdate abandoned = Decided({.apply = false}, {36, 64});
  EXPECT_FALSE(abandoned.outcome.decision.apply);
  EXPECT_EQ(abandoned.outcome.decision.norm, std::sqrt(10.0));
  EXPECT_THAT(abandoned.outcome.decision.multipliers, IsEmpty());
  EXPECT_THAT(abandoned.outcome.skip_reason, HasSubstr("voted to abandon"));
  EXPECT_THAT(Decided({.clipping = {.multipliers = {1e-45, 1}}}, {36, 64}).outcome.skip_reason,
              HasSubstr("no fp32 multiplier"));
  non_finite_ = "gradient of p0 is nan";
  const double nan = std::numeric_limits<double>::quiet_NaN();
  EXPECT_EQ(Decided({}, {nan, 64}).outcome.skip_reason, non_finite_);
  // That the ranks abandon it is nearer.
  EXPECT_THAT(Decided({.apply = false}, {nan, 64}).outcome.skip_reason, HasSubstr("abandon"));
}

TEST_F(StepDecisionTest, WhatIsUnusedIsUpdatedAsThePolicySays) {
  const UsedParameters used = {.all = false, .parameters = {0, 2}};
  spec_.unused_policy = UnusedPolicy::kSkip;
  const DecidedUpdate skipped = Decided({}, {36, 64}, used);
  EXPECT_THAT(skipped.outcome.unused_parameters, ElementsAre("p1"));
  EXPECT_THAT(skipped.update.update_counts, ElementsAre(8, 0, 10, 11));
  spec_.unused_policy = UnusedPolicy::kZero;
  EXPECT_THAT(Decided({}, {36, 64}, used).update.update_counts, ElementsAre(8, 9, 10, 11));
}

TEST_F(StepDecisionTest, VotesThatDifferAreNamedWithTheRankAndTheFirstDifference) {
  const StepVote vote = {.clipping = {.multipliers = {1, 2}}, .trainer_state = "a"};
  const auto difference = [&](const auto& change) {
    StepVote other = vote;
    change(other);
    EXPECT_EQ(FirstDifference(vote, vote), "");
    EXPECT_FALSE(other == vote);
    const absl::Status status = CheckVotesAgree(4, Sealed({vote, other}, {1, 1}).ranks());
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_EQ(ReasonOf(status), reason::kVoteAgain);
    EXPECT_THAT(std::string(status.message()), HasSubstr("rank 1 votes on step 4: "));
    return std::string(status.message());
  };
  EXPECT_THAT(difference([](StepVote& v) { v.apply = false; }),
              HasSubstr("abandon where others have apply"));
  EXPECT_THAT(difference([](StepVote& v) { v.clipping = {.max_norm = 3}; }),
              HasSubstr("max_norm 3 where others have 0"));
  EXPECT_THAT(difference([](StepVote& v) { v.clipping.multipliers[1] = 2.0000001; }),
              HasSubstr("multiplier 2.0000000999"));
  EXPECT_THAT(difference([](StepVote& v) { v.overrides[1].lr = 1; }),
              HasSubstr("overrides for group 1 on some ranks only"));
  EXPECT_THAT(difference([](StepVote& v) { v.trainer_state = "b"; }),
              HasSubstr("trainer_state differs at byte 0"));
  EXPECT_THAT(difference([](StepVote& v) { v.trainer_state.reset(); }),
              HasSubstr("trainer_state on some ranks only"));
  EXPECT_TRUE(CheckVotesAgree(4, Sealed({vote, vote}, {1, 1}).ranks()).ok());
  EXPECT_TRUE(CheckVotesAgree(4, Sealed({}, {1, 1}).ranks()).ok());  // None has voted.
}

TEST_F(StepDecisionTest, VotesThatCanNeverBeAreRefused) {
  const StepTerms terms = {.step = 4, .settings = {}, .hyper_parameters = {{}, {}}};
  const auto refused = [&](const StepVote& vote) {
    const absl::Status status = CheckVote(spec_, terms, 1, vote);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()), HasSubstr("rank 1 votes on step 4"));
    return std::string(status.message());
  };
  const double nan = std::numeric_limits<double>::quiet_NaN();
  EXPECT_THAT(refused({.clipping = {.max_norm = -1}}), HasSubstr("max_norm is -1"));
  EXPECT_THAT(refused({.clipping = {.max_norm = nan}}), HasSubstr("max_norm is nan"));
  EXPECT_THAT(refused({.clipping = {.multipliers = {1, nan}}}),
              HasSubstr("multiplier of group 1 is nan"));
  EXPECT_THAT(refused({.clipping = {.multipliers = {0, 1}}}),
              HasSubstr("multiplier of group 0 is 0"));
  EXPECT_THAT(refused({.clipping = {.multipliers = {1}}}),
              HasSubstr("1 multipliers, for 2 groups"));
  EXPECT_THAT(refused({.clipping = {.max_norm = 1, .multipliers = {1, 1}}}),
              HasSubstr("give one of the two"));
  EXPECT_THAT(refused({.overrides = {{2, {.lr = 1}}}}), HasSubstr("group 2 of 2"));
  EXPECT_THAT(refused({.overrides = {{1, {.lr = -1}}}}), HasSubstr("group group1"));
  EXPECT_THAT(refused({.trainer_state = std::string(kMaxTrainerStateBytes + 1, 's')}),
              HasSubstr("4097 bytes"));
  EXPECT_TRUE(CheckVote(spec_, terms, 1, {.trainer_state = ""}).ok());
}

}  // namespace
}  // namespace ballast
