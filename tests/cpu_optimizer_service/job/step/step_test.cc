#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cpu_optimizer_service/common/reason.h"
#include "cpu_optimizer_service/job/step/step_agreement.h"
#include "cpu_optimizer_service/job/step/step_part.h"
#include "tests/support/messages.h"

namespace ballast {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

StepTerms Terms(StepSettings settings = {}) {
  return {.step = 4, .settings = std::move(settings), .hyper_parameters = {{}}};
}

constexpr int kTwo[] = {0, 1};
constexpr int kThree[] = {0, 1, 2};

// Of three parameters and ten chunks.
StepPart Part(int ranks) { return {ranks, 3, 10}; }
absl::Status End(StepPart& part, int rank, uint32_t micro_step, const UsedParameters& used = {}) {
  return part.EndMicroStep(4, rank, /*is_live=*/true, micro_step, used);
}

TEST(StepAgreement, OnlyTheHighestAttemptOfAnyRankIsLive) {
  StepAgreement agreement(4, 3, kThree);
  agreement.SetTerms(Terms());
  for (const int rank : {0, 1, 2}) ASSERT_TRUE(agreement.Begin(rank, {}).ok());
  agreement.Seal(1, 1);
  EXPECT_THAT(agreement.Discard(0), ElementsAre(1));
  EXPECT_EQ(agreement.attempt(), 1u);
  EXPECT_EQ(agreement.live_since(), 0);
  EXPECT_FALSE(agreement.IsLive(1));
  EXPECT_FALSE(agreement.any_sealed());
  EXPECT_TRUE(agreement.lacks_terms());

  EXPECT_EQ(agreement.CheckAttempt(0, 1).value(), true);
  EXPECT_EQ(agreement.CheckAttempt(0, 0).value(), false);
  EXPECT_EQ(agreement.CheckAttempt(1, 1).status().code(), absl::StatusCode::kFailedPrecondition);
  // What a rank in a dead attempt says does not count, whatever it is.
  ASSERT_TRUE(agreement.Begin(1, {.scale = {.loss_scale = 7}}).ok());
  agreement.SetTerms(Terms({.scale = {.loss_scale = 2}}));
  EXPECT_THAT(agreement.Discard(1), IsEmpty());  // It catches up.
  EXPECT_EQ(agreement.attempt(), 1u);
  EXPECT_FALSE(agreement.lacks_terms());
  EXPECT_EQ(ReasonOf(agreement.Begin(1, {})), reason::kOtherSettings);
  EXPECT_TRUE(agreement.Begin(1, {.scale = {.loss_scale = 2}}).ok());
}

TEST(StepAgreement, ASealThatIsUndoneTakesSumsAndVotesWithIt) {
  StepAgreement agreement(4, 2, kTwo);
  agreement.SetTerms(Terms());
  for (const int rank : {0, 1}) {
    EXPECT_EQ(agreement.CheckMayContribute(rank).code(), absl::StatusCode::kFailedPrecondition);
    ASSERT_TRUE(agreement.Begin(rank, {}).ok());
    EXPECT_TRUE(agreement.CheckMayContribute(rank).ok());
  }
  agreement.Seal(1, 1);
  EXPECT_THAT(agreement.UnsealedRanks(), ElementsAre(0));
  EXPECT_EQ(agreement.CheckMayContribute(1).code(), absl::StatusCode::kFailedPrecondition);
  agreement.Seal(0, 2);
  EXPECT_EQ(agreement.RankThatDisagrees(0), 1);
  agreement.Seal(0, 1);
  EXPECT_EQ(agreement.RankThatDisagrees(0), -1);
  agreement.SetSummed();
  agreement.SetVote(0, StepVote());
  EXPECT_THAT(agreement.RanksWithoutVote(), ElementsAre(1));
  agreement.UnsealAll();
  EXPECT_THAT(agreement.UnsealedRanks(), ElementsAre(0, 1));
  EXPECT_THAT(agreement.RanksWithoutVote(), ElementsAre(0, 1));
  EXPECT_FALSE(agreement.is_summed());
}

TEST(StepAgreement, SettingsMustAgree) {
  const StepSettings settings = {.scale = {.divisors = {2}}, .overrides = {{0, {.lr = 0.1}}}};
  StepAgreement agreement(4, 2, kTwo);
  agreement.SetTerms(Terms(settings));
  EXPECT_TRUE(agreement.Begin(0, settings).ok());
  for (const StepSettings& other :
       {StepSettings{.scale = {.divisors = {3}}, .overrides = {{0, {.lr = 0.1}}}},
        StepSettings{.scale = {.divisors = {2}}, .overrides = {{0, {.lr = 0.2}}}},
        StepSettings{.scale = {.divisors = {2}}}, StepSettings{.overrides = {{0, {.lr = 0.1}}}},
        StepSettings{.scale = {.divisors = {2}}, .overrides = {{1, {.lr = 0.1}}}},
        StepSettings{
            .scale = {.divisors = {2}}, .overrides = {{0, {.lr = 0.1}}}, .trainer_state = "x"}}) {
    EXPECT_EQ(ReasonOf(agreement.Begin(1, other)), reason::kOtherSettings);
  }
}

TEST(StepPart, MicroStepsEndInOrder) {
  StepPart part = Part(2);
  EXPECT_EQ(End(part, 0, 1).code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_TRUE(End(part, 0, 0).ok());
  EXPECT_EQ(part.rank(0).micro_steps_ended, 1u);
}

TEST(StepPart, ForgetsWhatARankGaveAndWhatWasUsedInItsAttempt) {
  StepPart part = Part(2);
  for (const int rank : {0, 1}) ASSERT_TRUE(End(part, rank, 0).ok());
  for (const int chunk : {7, 8}) {
    part.RecordEmpty(chunk, 0, 1);
    part.ledger().Advance(chunk, 1);
  }
  part.Forget(0, std::vector<int>{7});
  EXPECT_THAT(part.empties(), ElementsAre(testing::Key(8)));  // Another rank's.
  EXPECT_EQ(part.ledger().next_micro_step(7), 0u);
  EXPECT_EQ(part.ledger().next_micro_step(8), 1u);
  EXPECT_EQ(part.rank(0).micro_steps_ended, 0u);
  EXPECT_EQ(part.rank(1).micro_steps_ended, 1u);
  part.ForgetLive();
  EXPECT_FALSE(part.uses().used(0));
  EXPECT_EQ(part.uses().FirstUse(0, 0, 1), std::nullopt);
  // Of a rank that is in a dead attempt.
  const UsedParameters used = {.non_finite = {{.parameter = 1, .value = INFINITY}}};
  ASSERT_TRUE(part.EndMicroStep(4, 1, /*is_live=*/false, 1, used).ok());
  EXPECT_EQ(part.rank(1).micro_steps_ended, 2u);
  EXPECT_FALSE(part.non_finite().has_value());
  EXPECT_FALSE(part.uses().used(1));
}

TEST(StepPart, UsedParametersAreUnitedOverRanksAndMicroSteps) {
  StepPart part = Part(2);
  ASSERT_TRUE(End(part, 0, 0, {.all = false, .parameters = {0}}).ok());
  ASSERT_TRUE(End(part, 1, 0, {.all = false, .parameters = {}}).ok());
  ASSERT_TRUE(End(part, 1, 1, {.all = false, .parameters = {2}}).ok());
  EXPECT_TRUE(part.uses().used(0));
  EXPECT_FALSE(part.uses().used(1));
  EXPECT_TRUE(part.uses().used(2));
}

TEST(StepPart, KnowsTheFirstUseOfAParameterInARangeOfMicroSteps) {
  StepPart part = Part(2);
  for (const uint32_t micro_step : {0, 1, 2}) {
    ASSERT_TRUE(End(part, 0, micro_step, {.all = false, .parameters = {0}}).ok());
  }
  ASSERT_TRUE(End(part, 1, 0, {.all = false, .parameters = {0}}).ok());
  ASSERT_TRUE(End(part, 1, 1, {.all = false, .parameters = {1, 0}}).ok());
  ASSERT_TRUE(End(part, 1, 2).ok());
  EXPECT_EQ(part.uses().FirstUse(0, 0, 3), 0u);
  EXPECT_EQ(part.uses().FirstUse(1, 0, 3), 1u);
  EXPECT_EQ(part.uses().FirstUse(1, 0, 1), std::nullopt);
  EXPECT_EQ(part.uses().FirstUse(2, 0, 2), std::nullopt);
  EXPECT_EQ(part.uses().FirstUse(2, 0, 3), 2u);
}

TEST(StepPart, UsesOfAMicroStepAreThoseOfAllRanks) {
  StepPart part = Part(2);
  ASSERT_TRUE(End(part, 0, 0, {.all = false, .parameters = {0}}).ok());
  ASSERT_TRUE(End(part, 1, 0, {.all = false, .parameters = {1}}).ok());
  EXPECT_EQ(part.uses().FirstUse(0, 0, 1), 0u);
  EXPECT_EQ(part.uses().FirstUse(1, 0, 1), 0u);
}

// Each set has a bit for every parameter: so many are admitted with the job, and no more.
TEST(StepPart, KeepsABoundedNumberOfDifferentSetsOfUsedParameters) {
  constexpr uint32_t kMost = kMaxUsedSets;
  StepPart part = Part(2);
  const auto end = [&](int rank, uint32_t micro_step, int parameter) {
    return End(part, rank, micro_step, {.all = false, .parameters = {parameter}});
  };
  uint32_t next = 0;
  for (; next < 3 * kMost; ++next) ASSERT_TRUE(end(0, next, 0).ok()) << "alike: one set";
  for (; next < 4 * kMost - 1; ++next) ASSERT_TRUE(end(0, next, 1 + next % 2).ok()) << next;
  EXPECT_TRUE(Refused(end(0, next, 1 + next % 2), absl::StatusCode::kResourceExhausted));
  EXPECT_EQ(part.rank(0).micro_steps_ended, next) << "it may still be ended otherwise";
  // The other rank frees one by using all in its micro-step.
  for (uint32_t micro_step = 0; micro_step < 4 * kMost - 1; ++micro_step) {
    ASSERT_TRUE(End(part, 1, micro_step).ok());
  }
  EXPECT_TRUE(end(0, next, 1 + next % 2).ok());
  EXPECT_EQ(part.uses().FirstUse(1 + next % 2, next, next + 1), next);
}

TEST(StepPart, RemembersTheFirstMicroStepOfEachRankThatReachedNothing) {
  StepPart part = Part(3);
  for (const uint32_t m : {0u, 1u, 2u}) {
    ASSERT_TRUE(End(part, 0, m).ok());
    ASSERT_TRUE(End(part, 1, m, {.all = false, .parameters = {}}).ok());
    const std::vector<int> used = m == 2 ? std::vector<int>{} : std::vector<int>{1};
    ASSERT_TRUE(End(part, 2, m, {.all = false, .parameters = used}).ok());
  }
  EXPECT_FALSE(part.rank(0).reached_nothing.has_value());
  EXPECT_EQ(part.rank(1).reached_nothing, 0u);
  EXPECT_EQ(part.rank(2).reached_nothing, 2u);
}

TEST(StepPart, KeepsTheNonFiniteReportOfTheLowestMicroStepAndRank) {
  StepPart part = Part(4);
  EXPECT_FALSE(part.non_finite().has_value());
  const auto end = [&](int rank, uint32_t micro_step, int64_t element) {
    ASSERT_TRUE(
        End(part, rank, micro_step, {.non_finite = {{.parameter = 1, .element = element}}}).ok());
  };
  ASSERT_TRUE(End(part, 0, 0).ok());
  end(0, 1, 10);
  EXPECT_EQ(part.non_finite()->found.element, 10);
  end(3, 0, 11);  // An earlier micro-step.
  EXPECT_EQ(part.non_finite()->found.element, 11);
  end(1, 0, 12);  // A lower rank.
  end(2, 0, 13);
  end(1, 1, 15);
  EXPECT_EQ(part.non_finite()->found.element, 12);
  EXPECT_EQ(part.non_finite()->rank, 1);
  EXPECT_EQ(part.non_finite()->micro_step, 0u);
}

}  // namespace
}  // namespace ballast
