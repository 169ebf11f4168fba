#include "cpu_optimizer_service/job/step/step.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace ballast {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

// The moves that must not exist.
static_assert(!std::is_constructible_v<SealedStep, OpenStep>);
static_assert(!std::is_constructible_v<DecidedStep, SealedStep, StepOutcome>);
static_assert(!std::is_constructible_v<OpenStep, DecidedStep>);
static_assert(!std::is_constructible_v<SealedStep, DecidedStep>);
// A move needs a state to give up: an lvalue does not do.
template <typename T>
concept ClosesAnLvalue = requires(T& step) {
  step.Close();
};
static_assert(!ClosesAnLvalue<OpenStep>);
template <typename T>
concept Decides = requires(T step) {
  std::move(step).Decide(StepOutcome());
};
static_assert(Decides<SealedStep> && !Decides<OpenStep> && !Decides<DecidedStep>);

OpenStep Open(int ranks) { return OpenStep({.step = 4, .hyper_parameters = {{}}}, ranks, 3); }

TEST(OpenStep, RanksBeginThenEndMicroStepsInOrder) {
  OpenStep step = Open(2);
  EXPECT_EQ(step.EndMicroStep(0, 0, {}).code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(step.CheckMayContribute(0).code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_TRUE(step.Begin(0, {}).ok());
  EXPECT_TRUE(step.CheckMayContribute(0).ok());
  EXPECT_EQ(step.EndMicroStep(0, 1, {}).code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_TRUE(step.EndMicroStep(0, 0, {}).ok());
  EXPECT_TRUE(step.EndMicroStep(0, 0, {}).ok());
  EXPECT_EQ(step.ranks()[0].micro_steps_ended, 1u);
}

TEST(OpenStep, OnlyTheHighestAttemptOfAnyRankIsLive) {
  OpenStep step = Open(3);
  for (const int rank : {0, 1, 2}) {
    ASSERT_TRUE(step.Begin(rank, {}).ok());
    ASSERT_TRUE(step.EndMicroStep(rank, 0, {}).ok());
  }
  ASSERT_TRUE(step.Seal(1, 1).ok());
  step.RecordEmpty(7, 0, 1);
  step.RecordEmpty(8, 0, 1);
  EXPECT_THAT(step.Discard(0, std::vector<int>{7}), ElementsAre(1));
  EXPECT_EQ(step.attempt(), 1u);
  EXPECT_EQ(step.LiveRank(), 0);
  EXPECT_FALSE(step.IsLive(1));
  EXPECT_FALSE(step.used(0));  // Of the attempt that nobody can decide any more.
  EXPECT_EQ(step.FirstUse(0, 0, 1), std::nullopt);
  EXPECT_EQ(step.empties().size(), 1u);
  EXPECT_EQ(step.empties().count(8), 1u);  // Another rank's.
  EXPECT_FALSE(step.ranks()[1].sealed.has_value());
  EXPECT_EQ(step.SecondsSinceFirstSeal(), std::nullopt);
  EXPECT_EQ(step.ranks()[0].micro_steps_ended, 0u);
  EXPECT_EQ(step.ranks()[1].micro_steps_ended, 1u);
  EXPECT_TRUE(step.lacks_terms());

  EXPECT_EQ(step.CheckAttempt(0, 1).value(), true);
  EXPECT_EQ(step.CheckAttempt(0, 0).value(), false);
  EXPECT_EQ(step.CheckAttempt(1, 1).status().code(), absl::StatusCode::kFailedPrecondition);
  // What a rank in a dead attempt says does not count, whatever it is.
  ASSERT_TRUE(step.Begin(1, {.scale = {.loss_scale = 7}}).ok());
  ASSERT_TRUE(step.EndMicroStep(1, 1, {.non_finite = {{.parameter = 1, .value = INFINITY}}}).ok());
  EXPECT_FALSE(step.non_finite().has_value());
  EXPECT_FALSE(step.used(1));
  step.SetTerms({.step = 4, .settings = {.scale = {.loss_scale = 2}}, .hyper_parameters = {{}}});
  EXPECT_THAT(step.Discard(1, {}), IsEmpty());  // It catches up.
  EXPECT_EQ(step.attempt(), 1u);
  EXPECT_FALSE(step.lacks_terms());
  EXPECT_EQ(step.Begin(1, {}).code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_TRUE(step.Begin(1, {.scale = {.loss_scale = 2}}).ok());
}

TEST(OpenStep, UsedParametersAreUnitedOverRanksAndMicroSteps) {
  OpenStep step = Open(2);
  ASSERT_TRUE(step.Begin(0, {}).ok());
  ASSERT_TRUE(step.Begin(1, {}).ok());
  ASSERT_TRUE(step.EndMicroStep(0, 0, {.all = false, .parameters = {0}}).ok());
  ASSERT_TRUE(step.EndMicroStep(1, 0, {.all = false, .parameters = {}}).ok());
  ASSERT_TRUE(step.EndMicroStep(1, 1, {.all = false, .parameters = {2}}).ok());
  EXPECT_TRUE(step.used(0));
  EXPECT_FALSE(step.used(1));
  EXPECT_TRUE(step.used(2));
}

TEST(OpenStep, KnowsTheFirstUseOfAParameterInARangeOfMicroSteps) {
  OpenStep step = Open(2);
  ASSERT_TRUE(step.Begin(0, {}).ok());
  ASSERT_TRUE(step.Begin(1, {}).ok());
  for (const uint32_t micro_step : {0, 1, 2}) {
    ASSERT_TRUE(step.EndMicroStep(0, micro_step, {.all = false, .parameters = {0}}).ok());
  }
  ASSERT_TRUE(step.EndMicroStep(1, 0, {.all = false, .parameters = {0}}).ok());
  ASSERT_TRUE(step.EndMicroStep(1, 1, {.all = false, .parameters = {1, 0}}).ok());
  ASSERT_TRUE(step.EndMicroStep(1, 2, {}).ok());
  EXPECT_EQ(step.FirstUse(0, 0, 3), 0u);
  EXPECT_EQ(step.FirstUse(1, 0, 3), 1u);
  EXPECT_EQ(step.FirstUse(1, 0, 1), std::nullopt);
  EXPECT_EQ(step.FirstUse(2, 0, 2), std::nullopt);
  EXPECT_EQ(step.FirstUse(2, 0, 3), 2u);
}

// Each set has a bit for every parameter: so many are admitted with the job, and no more.
TEST(OpenStep, KeepsABoundedNumberOfDifferentSetsOfUsedParameters) {
  constexpr uint32_t kMost = kMaxUsedSets;
  OpenStep step({.step = 4, .hyper_parameters = {{}}}, 2, 3);
  ASSERT_TRUE(step.Begin(0, {}).ok());
  ASSERT_TRUE(step.Begin(1, {}).ok());
  const auto end = [&](int rank, uint32_t micro_step, int parameter) {
    return step.EndMicroStep(rank, micro_step, {.all = false, .parameters = {parameter}});
  };
  uint32_t next = 0;
  for (; next < 3 * kMost; ++next) ASSERT_TRUE(end(0, next, 0).ok()) << "alike: one set";
  for (; next < 4 * kMost - 1; ++next) ASSERT_TRUE(end(0, next, 1 + next % 2).ok()) << next;
  const absl::Status refused = end(0, next, 1 + next % 2);
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("all_used"));
  EXPECT_EQ(step.ranks()[0].micro_steps_ended, next) << "it may still be ended otherwise";
  // The other rank frees one by using all in its micro-step.
  for (uint32_t micro_step = 0; micro_step < 4 * kMost - 1; ++micro_step) {
    ASSERT_TRUE(step.EndMicroStep(1, micro_step, {}).ok());
  }
  EXPECT_TRUE(end(0, next, 1 + next % 2).ok());
  EXPECT_EQ(step.FirstUse(1 + next % 2, next, next + 1), next);
}

TEST(OpenStep, RemembersTheFirstMicroStepOfEachRankThatReachedNothing) {
  OpenStep step = Open(3);
  for (const int rank : {0, 1, 2}) ASSERT_TRUE(step.Begin(rank, {}).ok());
  for (const uint32_t m : {0u, 1u, 2u}) {
    ASSERT_TRUE(step.EndMicroStep(0, m, {}).ok());
    ASSERT_TRUE(step.EndMicroStep(1, m, {.all = false, .parameters = {}}).ok());
    const bool last = m == 2;
    ASSERT_TRUE(
        step.EndMicroStep(
                2, m, {.all = false, .parameters = last ? std::vector<int>{} : std::vector<int>{1}})
            .ok());
  }
  EXPECT_FALSE(step.ranks()[0].reached_nothing.has_value());
  EXPECT_EQ(step.ranks()[1].reached_nothing, 0u);
  EXPECT_EQ(step.ranks()[2].reached_nothing, 2u);
}

TEST(OpenStep, KeepsTheNonFiniteReportOfTheLowestMicroStepAndRank) {
  OpenStep step = Open(4);
  for (const int rank : {0, 1, 2, 3}) ASSERT_TRUE(step.Begin(rank, {}).ok());
  EXPECT_FALSE(step.non_finite().has_value());
  const auto end = [&](int rank, uint32_t micro_step, int64_t element) {
    const UsedParameters used = {.non_finite = {{.parameter = 1, .element = element}}};
    ASSERT_TRUE(step.EndMicroStep(rank, micro_step, used).ok());
  };
  ASSERT_TRUE(step.EndMicroStep(0, 0, {}).ok());
  end(0, 1, 10);
  EXPECT_EQ(step.non_finite()->found.element, 10);
  end(3, 0, 11);  // An earlier micro-step.
  EXPECT_EQ(step.non_finite()->found.element, 11);
  end(1, 0, 12);  // A lower rank.
  end(2, 0, 13);
  end(1, 0, 14);  // A repeat.
  end(1, 1, 15);
  EXPECT_EQ(step.non_finite()->found.element, 12);
  EXPECT_EQ(step.non_finite()->rank, 1);
  EXPECT_EQ(step.non_finite()->micro_step, 0u);
}

TEST(OpenStep, SettingsMustAgree) {
  OpenStep step({.step = 1,
                 .settings = {.scale = {.divisors = {2}}, .overrides = {{0, {.lr = 0.1}}}},
                 .hyper_parameters = {{}}},
                2, 1);
  EXPECT_TRUE(step.Begin(0, {.scale = {.divisors = {2}}, .overrides = {{0, {.lr = 0.1}}}}).ok());
  for (const StepSettings& other :
       {StepSettings{.scale = {.divisors = {3}}, .overrides = {{0, {.lr = 0.1}}}},
        StepSettings{.scale = {.divisors = {2}}, .overrides = {{0, {.lr = 0.2}}}},
        StepSettings{.scale = {.divisors = {2}}}, StepSettings{.overrides = {{0, {.lr = 0.1}}}},
        StepSettings{.scale = {.divisors = {2}}, .overrides = {{1, {.lr = 0.1}}}},
        StepSettings{
            .scale = {.divisors = {2}}, .overrides = {{0, {.lr = 0.1}}}, .trainer_state = "x"}}) {
    EXPECT_EQ(step.Begin(1, other).code(), absl::StatusCode::kFailedPrecondition);
  }
}

TEST(Step, IsDecidedWhenAllHaveSealed) {
  OpenStep open = Open(2);
  for (const int rank : {0, 1}) {
    ASSERT_TRUE(open.Begin(rank, {}).ok());
    EXPECT_EQ(open.Seal(rank, 1).code(), absl::StatusCode::kFailedPrecondition);
    ASSERT_TRUE(open.EndMicroStep(rank, 0, {}).ok());
  }
  EXPECT_FALSE(open.SecondsSinceFirstSeal().has_value());
  ASSERT_TRUE(open.Seal(1, 1).ok());
  EXPECT_TRUE(open.SecondsSinceFirstSeal().has_value());
  EXPECT_THAT(open.UnsealedRanks(), ElementsAre(0));
  EXPECT_EQ(open.CheckMayContribute(1).code(), absl::StatusCode::kFailedPrecondition);
  ASSERT_TRUE(open.Seal(0, 1).ok());
  EXPECT_EQ(open.RankThatDisagrees(0), -1);
  open.UnsealAll();
  EXPECT_THAT(open.UnsealedRanks(), ElementsAre(0, 1));
  EXPECT_FALSE(open.SecondsSinceFirstSeal().has_value());
  EXPECT_TRUE(open.CheckMayContribute(1).ok());
  ASSERT_TRUE(open.Seal(0, 1).ok());
  ASSERT_TRUE(open.Seal(1, 1).ok());
  EXPECT_THAT(open.UnsealedRanks(), IsEmpty());
  SealedStep sealed = std::move(open).Close();
  EXPECT_EQ(sealed.micro_steps(), 1u);
  const DecidedStep decided = std::move(sealed).Decide({.step = 4, .skip_reason = "why"});
  EXPECT_EQ(decided.outcome().skip_reason, "why");
  EXPECT_EQ(decided.terms().step, 4u);
}

}  // namespace
}  // namespace ballast
