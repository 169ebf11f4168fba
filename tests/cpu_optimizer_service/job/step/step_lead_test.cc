#include "cpu_optimizer_service/job/step/step_lead.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "cpu_optimizer_service/common/reason.h"
#include "cpu_optimizer_service/job/step/state_trial.h"
#include "cpu_optimizer_service/job/step/step_decision.h"
#include "tests/cpu_optimizer_service/job/job_driver.h"
#include "tests/support/messages.h"

namespace ballast {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;

// Three members of two ranks each; two groups of two parameters.
class StepLeadTest : public testing::Test {
 protected:
  static constexpr int kMembers = 3;
  using Told = std::vector<ToMember>;

  StepLeadTest() { lead_.Begin(4); }

  Told Stand(int member, uint32_t attempt, std::optional<StepSettings> settings = StepSettings(),
             int by = 7) {
    Told told;
    lead_.Stand(member, attempt, by, settings, told);
    return told;
  }
  StepReport Report(double sum = 1, const UsedParameters& used = {}) const {
    StepReport report = {.micro_steps = 2, .sums = {}, .uses = StepUses(4)};
    report.sums.groups.resize(2);
    report.sums.groups[0].Add(sum);
    EXPECT_TRUE(report.uses.Add(0, used));
    return report;
  }
  Told Give(int member, StepReport report, std::optional<StepVote> vote = StepVote()) {
    Told told;
    lead_.Report(member, lead_.attempt(), std::move(report), std::move(vote), told);
    return told;
  }
  Told Check(int member, uint64_t round, std::optional<SealRefusal> refusal = std::nullopt) {
    Told told;
    lead_.Checked(member, round, std::move(refusal), told);
    return told;
  }
  Told Vote(int member, uint64_t round, StepVote vote = {}) {
    Told told;
    lead_.Vote(member, round, std::move(vote), told);
    return told;
  }
  void StandAll(uint32_t attempt = 0) {
    for (int member = 0; member < kMembers; ++member) Stand(member, attempt);
  }
  // Of those who are told the same.
  template <class What>
  static std::vector<int> Members(const Told& told) {
    std::vector<int> members;
    for (const ToMember& each : told) {
      if (std::holds_alternative<What>(each.what)) members.push_back(each.member);
    }
    return members;
  }

  JobSpec spec_ = MakeJobSpec({.group_sizes = {{10, 10}, {10, 0}}, .world_size = 6});
  Layout layout_ = Layout::Create(spec_.layout).value();
  StepLead lead_{spec_, layout_, {0, 2, 4}};
};

TEST_F(StepLeadTest, IsReadyOnceAllHaveReportedAndVoted) {
  StandAll();
  EXPECT_THAT(Give(2, Report(1)), IsEmpty());
  EXPECT_THAT(Give(0, Report(2)), IsEmpty());
  EXPECT_THAT(lead_.Unreported(), ElementsAre(1));
  EXPECT_EQ(lead_.summary(), nullptr);
  EXPECT_THAT(Give(1, Report(4)), IsEmpty());
  ASSERT_TRUE(lead_.is_ready());
  EXPECT_EQ(lead_.vote(), StepVote());
  EXPECT_EQ(lead_.summary()->micro_steps, 2u);
  EXPECT_THAT(lead_.summary()->group_sums, ElementsAre(7, 0));
  EXPECT_EQ(lead_.summary()->non_finite, "");
}

TEST_F(StepLeadTest, OnlyTheHighestAttemptIsLive) {
  StandAll();
  Give(0, Report());
  Give(1, Report());
  const Told told = Stand(2, 1, std::nullopt, /*by=*/5);
  EXPECT_THAT(Members<ToMember::Live>(told), ElementsAre(0, 1));
  EXPECT_EQ(std::get<ToMember::Live>(told[0].what).attempt, 1u);
  EXPECT_EQ(std::get<ToMember::Live>(told[0].what).by, 5);
  EXPECT_THAT(lead_.Unreported(), ElementsAre(0, 1, 2));
  // Whoever does not know it yet is told again, and its report does not count.
  EXPECT_THAT(Members<ToMember::Live>(Give(1, Report())), ElementsAre(1));
  EXPECT_THAT(Members<ToMember::Live>(Stand(0, 0)), ElementsAre(0));
  EXPECT_THAT(lead_.Unreported(), ElementsAre(0, 1, 2));
  StandAll(1);
  for (int member = 0; member < kMembers; ++member) EXPECT_THAT(Give(member, Report()), IsEmpty());
  EXPECT_TRUE(lead_.is_ready());
}

// It was on its way while the member's discard was granted.
TEST_F(StepLeadTest, AReportOfAnOlderAttemptDoesNotCount) {
  StandAll();
  Stand(2, 1, std::nullopt);
  Told told;
  lead_.Report(2, 0, Report(), StepVote(), told);
  EXPECT_THAT(Members<ToMember::Live>(told), ElementsAre(2));
  EXPECT_THAT(lead_.Unreported(), ElementsAre(0, 1, 2));
}

TEST_F(StepLeadTest, ReportsOfOtherSettingsAreVoid) {
  StandAll();
  Stand(1, 0, StepSettings{.scale = {.loss_scale = 2}});
  Give(0, Report());
  Give(1, Report());
  EXPECT_THAT(Members<ToMember::OtherSettings>(Give(2, Report())), ElementsAre(1));
  EXPECT_FALSE(lead_.is_ready());
  EXPECT_THAT(lead_.Unreported(), ElementsAre(1));
  Stand(1, 0);
  Give(1, Report());
  EXPECT_TRUE(lead_.is_ready());
}

TEST_F(StepLeadTest, AMemberWithOtherSettingsIsToldSo) {
  const StepSettings other = {.scale = {.loss_scale = 2}};
  EXPECT_THAT(Stand(1, 0), IsEmpty());
  const Told told = Stand(2, 0, other);
  ASSERT_THAT(Members<ToMember::OtherSettings>(told), ElementsAre(2));
  EXPECT_TRUE(Refused(std::get<ToMember::OtherSettings>(told[0].what).why,
                      absl::StatusCode::kFailedPrecondition, reason::kOtherSettings));
  // The lowest member's count.
  EXPECT_THAT(Members<ToMember::OtherSettings>(Stand(0, 0, other)), ElementsAre(1));
  // Settings of another attempt do not.
  EXPECT_THAT(Members<ToMember::OtherSettings>(Stand(2, 1)), IsEmpty());
}

TEST_F(StepLeadTest, RefusesReportsOfDifferentNumbersOfMicroSteps) {
  StandAll();
  StepReport three = Report();
  three.micro_steps = 3;
  Give(0, Report());
  Give(1, std::move(three));
  const Told told = Give(2, Report());
  ASSERT_THAT(Members<ToMember::Refused>(told), ElementsAre(0, 1, 2));
  EXPECT_TRUE(Refused(std::get<ToMember::Refused>(told[0].what).why.status,
                      absl::StatusCode::kFailedPrecondition, reason::kSendAndSealAgain));
  EXPECT_THAT(lead_.Unreported(), ElementsAre(0, 1, 2));
}

TEST_F(StepLeadTest, RefusesSumsThatDoNotFitTogether) {
  StandAll();
  StepReport half = Report();
  half.sums.cut = {{.parameter = 0, .begin = 3, .values = {1}}};
  Give(0, Report());
  Give(1, std::move(half));
  const Told told = Give(2, Report());
  ASSERT_THAT(Members<ToMember::Refused>(told), ElementsAre(0, 1, 2));
  EXPECT_TRUE(Refused(std::get<ToMember::Refused>(told[0].what).why.status,
                      absl::StatusCode::kInvalidArgument, reason::kAbortAndRedo));
}

TEST_F(StepLeadTest, MembersCheckTheUsesOfAllWhereSomethingIsUnusedOrEmpty) {
  const UsedParameters some = {.all = false, .parameters = {0}};
  StandAll();
  Give(0, Report(1, some));
  Give(1, Report(1, {.all = false, .parameters = {1}}));
  Told told = Give(2, Report(1, some));  // No rank has used parameter 2; 3 has no elements.
  ASSERT_THAT(Members<ToMember::CheckUses>(told), ElementsAre(0, 1, 2));
  const auto check = std::get<ToMember::CheckUses>(told[0].what);
  for (int p = 0; p < 4; ++p) EXPECT_EQ(check.uses.used(p), p < 2);
  EXPECT_FALSE(lead_.is_ready());
  Check(0, check.round);
  Check(1, check.round);
  // A member reports again. What the others have checked is void.
  EXPECT_THAT(Give(2, Report(1, {.all = false, .parameters = {2}})), IsEmpty());
  EXPECT_TRUE(lead_.is_ready()) << "all is used";
  StepReport empty = Report();
  empty.has_empties = true;
  told = Give(2, std::move(empty));
  ASSERT_THAT(Members<ToMember::CheckUses>(told), ElementsAre(0, 1, 2));
  const uint64_t round = std::get<ToMember::CheckUses>(told[0].what).round;
  for (int member = 0; member < kMembers; ++member) Check(member, check.round);
  EXPECT_FALSE(lead_.is_ready()) << "these answers are of an older round";
  Check(0, round);
  Check(1, round);
  EXPECT_FALSE(lead_.is_ready());
  Check(2, round);
  EXPECT_TRUE(lead_.is_ready());
  Give(2, Report(1, some));
  const SealRefusal refusal = {.status = absl::FailedPreconditionError("unused")};
  told = Check(1, lead_.round(), refusal);
  ASSERT_THAT(Members<ToMember::Refused>(told), ElementsAre(0, 1, 2));
  EXPECT_EQ(std::get<ToMember::Refused>(told[2].what).why.status, refusal.status);
  EXPECT_THAT(lead_.Unreported(), ElementsAre(0, 1, 2));
}

TEST_F(StepLeadTest, ASingleMemberHasCheckedUsesItself) {
  StepLead lead(spec_, layout_, {0});
  lead.Begin(4);
  Told told;
  lead.Stand(0, 0, 0, StepSettings(), told);
  lead.Report(0, 0, Report(1, {.all = false, .parameters = {0}}), StepVote(), told);
  EXPECT_THAT(told, IsEmpty());
  EXPECT_TRUE(lead.is_ready());
}

TEST_F(StepLeadTest, WhoHasNotVotedIsToldTheNorm) {
  StandAll();
  Give(0, Report(), std::nullopt);
  Give(1, Report());
  const Told told = Give(2, Report(), std::nullopt);
  ASSERT_THAT(Members<ToMember::Norm>(told), ElementsAre(0, 2));
  EXPECT_NE(lead_.summary(), nullptr);
  const uint64_t round = std::get<ToMember::Norm>(told[0].what).round;
  EXPECT_THAT(Vote(0, round), IsEmpty());
  EXPECT_THAT(lead_.Unvoted(), ElementsAre(2));
  EXPECT_THAT(Vote(2, round), IsEmpty());
  EXPECT_TRUE(lead_.is_ready());
}

TEST_F(StepLeadTest, VotesThatDifferAreCastAgain) {
  StandAll();
  Give(0, Report());
  Give(1, Report());
  const uint64_t before = lead_.round() + 1;
  const Told told = Give(2, Report(), StepVote{.apply = false});
  ASSERT_THAT(Members<ToMember::VoteAgain>(told), ElementsAre(0, 1, 2));
  const auto again = std::get<ToMember::VoteAgain>(told[0].what);
  EXPECT_TRUE(Refused(again.why, absl::StatusCode::kFailedPrecondition, reason::kVoteAgain));
  EXPECT_THAT(Vote(1, before), IsEmpty());  // It was on its way.
  EXPECT_THAT(lead_.Unvoted(), ElementsAre(0, 1, 2));
  for (int member = 0; member < kMembers; ++member) {
    EXPECT_FALSE(lead_.is_ready());
    EXPECT_THAT(Vote(member, again.round, {.apply = false}), IsEmpty());
  }
  ASSERT_TRUE(lead_.is_ready());
  EXPECT_FALSE(lead_.vote().apply);
}

TEST_F(StepLeadTest, AVoteThatWasRefusedIsSoInTheNextRound) {
  StandAll();
  Give(0, Report());
  Give(1, Report());
  Give(2, Report(), StepVote{.apply = false});  // All vote again.
  EXPECT_THAT(Members<ToMember::Norm>(Give(2, Report(), std::nullopt)), ElementsAre(0, 1, 2));
  for (int member = 0; member < kMembers; ++member) Vote(member, lead_.round());
  EXPECT_TRUE(lead_.is_ready());
}

TEST_F(StepLeadTest, AVoteIsOfItsRound) {
  StandAll();
  Give(0, Report(1), std::nullopt);
  Give(1, Report(1));
  Give(2, Report(1));
  const uint64_t first = lead_.round();
  lead_.Withdraw(2);
  EXPECT_EQ(lead_.summary(), nullptr);
  EXPECT_THAT(Vote(0, first, {.clipping = {.max_norm = 1}}), IsEmpty());
  // Its gradients are others now, so the vote was by another norm.
  EXPECT_THAT(Members<ToMember::Norm>(Give(2, Report(5))), ElementsAre(0));
  EXPECT_THAT(Vote(0, first, {.clipping = {.max_norm = 1}}), IsEmpty());
  EXPECT_FALSE(lead_.is_ready());
  EXPECT_THAT(Vote(0, lead_.round()), IsEmpty());
  EXPECT_TRUE(lead_.is_ready());
}

// The first non-finite element, and what a worker found, do not depend on who reports first.
TEST_F(StepLeadTest, NamesTheFirstNonFiniteElementOfAll) {
  const auto summary = [&](std::vector<StepReport> reports) {
    std::vector<const StepReport*> all;
    for (const StepReport& report : reports) all.push_back(&report);
    return Summarize(spec_, layout_, all).value().non_finite;
  };
  StepReport late = Report();
  late.non_finite = {.parameter = 2, .element = 1, .value = 1, .rank = 0};
  StepReport early = Report();
  early.non_finite = {.parameter = 1, .element = 9, .value = 1, .rank = 4};
  StepReport earlier = Report();
  earlier.non_finite = {.parameter = 1, .element = 8, .value = 1, .rank = 5};
  EXPECT_TRUE(Says(summary({late, early})));
  EXPECT_EQ(summary({late, early}), summary({early, late}));
  EXPECT_TRUE(Says(summary({late, early, earlier})));
  StepReport found = late;
  found.before_reducing = {.rank = 3, .micro_step = 1, .found = {.parameter = 0, .element = 2}};
  StepReport found_before = early;
  found_before.before_reducing = {.rank = 4, .micro_step = 0, .found = {.parameter = 2}};
  EXPECT_TRUE(Says(summary({found, early})));
  EXPECT_TRUE(Says(summary({found, found_before})));
  EXPECT_EQ(summary({found, found_before}), summary({found_before, found}));
  // What a worker found has been cut off since.
  StepReport nothing = found;
  nothing.non_finite.reset();
  EXPECT_EQ(summary({nothing, Report()}), "");
}

TEST_F(StepLeadTest, TrialsOfAllMembersSettleADraft) {
  const auto draft = [] {
    Draft made;
    made.outcome.decision = {.apply = true, .multipliers = {1, 0.5}};
    made.update.multipliers = {1, 0.5};
    made.bounds = {{.planes = {1, 1, 1, 0}}, {}};
    return made;
  };
  StateTrial first(2);
  first.Add(1, {.planes = {3, 2, 1, 0}});
  StateTrial second(2);
  second.Add(1, {.planes = {1, 4, 1, 0}});
  StateTrial both(2);
  both.Add(spec_, first);
  both.Add(spec_, second);
  Draft settled = draft();
  both.Settle(spec_, settled);
  EXPECT_TRUE(settled.outcome.decision.apply);
  EXPECT_EQ(settled.bounds[0].planes[0], 1) << "that group needed no trial";
  EXPECT_EQ(settled.bounds[1].planes[0], 3);
  EXPECT_EQ(settled.bounds[1].planes[1], 4);

  second.Add(spec_, {.plane = Plane::kExpAvg,
                     .value = 5,
                     .gradient = {.parameter = 2, .element = 7, .value = 6, .rank = 1}});
  first.Add(spec_, {.plane = Plane::kMaster,
                    .value = 8,
                    .gradient = {.parameter = 2, .element = 6, .value = 9, .rank = 0}});
  std::string said;
  for (const bool swapped : {false, true}) {
    StateTrial all = swapped ? second : first;
    all.Add(spec_, swapped ? first : second);
    Draft skipped = draft();
    all.Settle(spec_, skipped);
    EXPECT_FALSE(skipped.outcome.decision.apply);
    EXPECT_EQ(skipped.outcome.skip_cause, SkipCause::kState);
    EXPECT_THAT(skipped.outcome.decision.multipliers, IsEmpty());
    if (swapped) EXPECT_EQ(skipped.outcome.skip_reason, said);
    said = skipped.outcome.skip_reason;
  }
  EXPECT_TRUE(Says(said));
}

TEST(StepUses, OfSeveralMembersAreThoseOfAllTheirRanks) {
  std::mt19937 random(5);
  for (int turn = 0; turn < 200; ++turn) {
    StepUses all(5);
    std::vector<StepUses> of_members(3, StepUses(5));
    for (int rank = 0; rank < 6; ++rank) {
      const uint32_t micro_steps = 1 + random() % 4;
      for (uint32_t m = 0; m < micro_steps; ++m) {
        UsedParameters used = {.all = random() % 8 == 0, .parameters = {}};
        for (int p = 0; p < 5 && !used.all; ++p) {
          if (random() % 4 == 0) used.parameters.push_back(p);
        }
        ASSERT_TRUE(all.Add(m, used));
        ASSERT_TRUE(of_members[rank % 3].Add(m, used));
      }
    }
    StepUses merged = of_members[0];
    ASSERT_TRUE(merged.Merge(of_members[1]));
    ASSERT_TRUE(merged.Merge(of_members[2]));
    for (int p = 0; p < 5; ++p) {
      ASSERT_EQ(merged.used(p), all.used(p));
      for (uint32_t begin = 0; begin < 4; ++begin) {
        for (uint32_t end = begin; end <= 5; ++end) {
          ASSERT_EQ(merged.FirstUse(p, begin, end), all.FirstUse(p, begin, end));
        }
      }
    }
  }
}

// Two halves of them that all change: as many sets together as each has.
TEST(StepUses, OfSeveralMembersAreCountedOnce) {
  constexpr uint32_t kSets = kMaxUsedSets - 100;
  StepUses first(2 * kSets);
  StepUses second(2 * kSets);
  for (uint32_t m = 0; m < kSets; ++m) {
    ASSERT_TRUE(first.Add(m, {.all = false, .parameters = {static_cast<int>(2 * m)}}));
    ASSERT_TRUE(second.Add(m, {.all = false, .parameters = {static_cast<int>(2 * m + 1)}}));
  }
  StepUses both = first;
  ASSERT_TRUE(both.Merge(second));
  EXPECT_EQ(both.FirstUse(1, 0, kSets), 0u);
  EXPECT_EQ(first.FirstUse(1, 0, kSets), std::nullopt) << "it shares nothing with its copy";
}

TEST(StepUses, OfSeveralMembersAreBounded) {
  StepUses even(kMaxUsedSets * 4);
  StepUses odd(kMaxUsedSets * 4);
  for (int m = 0; m < static_cast<int>(kMaxUsedSets); ++m) {
    ASSERT_TRUE(even.Add(2 * m, {.all = false, .parameters = {2 * m}}));
    ASSERT_TRUE(odd.Add(2 * m + 1, {.all = false, .parameters = {2 * m + 1}}));
  }
  EXPECT_FALSE(even.Merge(odd));
}

}  // namespace
}  // namespace ballast
