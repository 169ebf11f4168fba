// Bytes on a link of members that are wrong.
#include "cpu_optimizer_service/job/members/words_codec.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "cpu_optimizer_service/common/rule.h"
#include "tests/cpu_optimizer_service/job/job_driver.h"

namespace ballast {
namespace {

JobSpec Spec() { return MakeJobSpec({.group_sizes = {{1000, 24}, {700}}, .world_size = 4}); }

MemberWord Report() {
  StepReport report = {.micro_steps = 2,
                       .sums = {.groups = std::vector<ExactSum>(2),
                                .cut = {{.parameter = 1, .begin = 0, .values = {1, 2, 3}}}},
                       .uses = StepUses(3),
                       .non_finite = GradientElement{.parameter = 2, .element = 5, .rank = 1},
                       .before_reducing = NonFiniteReport{.rank = 3}};
  report.sums.groups[1].Add(2.5);
  EXPECT_TRUE(report.uses.Add(0, {.all = false, .parameters = {0, 2}}));
  EXPECT_TRUE(report.uses.Add(1, {.all = false, .parameters = {0, 2}}));
  EXPECT_TRUE(report.uses.Add(2, {.all = true}));
  return {MemberWord::Report{.number = 7,
                             .attempt = 1,
                             .report = report,
                             .vote = StepVote{.clipping = {.max_norm = 0.5}}}};
}

LeadWord Decided() {
  KeptDecision decision = {.coverage_complete = true};
  decision.outcome.decision.apply = true;
  decision.outcome.decision.multipliers = {1, 2};
  decision.hyper_parameters.resize(2);
  decision.update_counts = {1, 2, 3};
  decision.values_after.resize(2);
  decision.group_norms = {1, 2};
  return {LeadWord::Decided{.report = 7, .decision = decision}};
}

TEST(WordsCodec, KeepsEveryBitOfAReport) {
  const MemberWord word = Report();
  const std::string bytes = Encode(word);
  const MemberWord read = DecodeMemberWord(bytes, Spec()).value();
  EXPECT_EQ(Encode(read), bytes);
  const StepUses& uses = std::get<MemberWord::Report>(read.what).report.uses;
  EXPECT_EQ(uses.FirstUse(1, 0, 5), 2u);
  EXPECT_EQ(uses.FirstUse(2, 0, 5), 0u);
  EXPECT_TRUE(uses.used(1));
}

// Whatever comes is a word or refused; nothing is read or made that the bytes do not have.
TEST(WordsCodec, RefusesWhatIsNoWord) {
  std::mt19937 random(1);
  int refused = 0;
  const auto check = [&](const std::string& bytes) {
    const auto member = DecodeMemberWord(bytes, Spec());
    const auto lead = DecodeLeadWord(bytes, Spec());
    const auto follow = DecodeFollow(bytes);
    for (const absl::Status& status : {member.status(), lead.status(), follow.status()}) {
      if (status.ok()) continue;
      ++refused;
      EXPECT_TRUE(absl::IsInvalidArgument(status));
    }
  };
  const std::string report = Encode(Report());
  const std::string decided = Encode(Decided());
  const std::string follow =
      Encode(Follow{.uid = std::string(32, 'a'), .spec = Spec(), .member = 1, .is_new = true});
  for (const std::string& whole : {report, decided, follow}) {
    for (size_t size = 0; size < whole.size(); ++size) check(whole.substr(0, size));
    check(whole + '\0');
    for (int i = 0; i < 2000; ++i) {
      std::string bytes = whole;
      for (int changes = 1 + static_cast<int>(random() % 3); changes > 0; --changes) {
        bytes[random() % bytes.size()] = static_cast<char>(random());
      }
      check(bytes);
    }
  }
  EXPECT_GT(refused, 1000);
}

TEST(WordsCodec, RefusesAWordOfAnotherJob) {
  JobSpec other = MakeJobSpec({.group_sizes = {{1000}}, .world_size = 4});
  EXPECT_TRUE(absl::IsInvalidArgument(DecodeMemberWord(Encode(Report()), other).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(DecodeLeadWord(Encode(Decided()), other).status()));
}

TEST(WordsCodec, RefusesHyperParametersOfAnotherRule) {
  LeadWord word = Decided();
  KeptDecision& decision = std::get<LeadWord::Decided>(word.what).decision;
  EXPECT_TRUE(DecodeLeadWord(Encode(word), Spec()).ok());
  for (const HyperParameters& wrong : {DefaultsOf(Rule::kLion), HyperParameters{.amsgrad = true},
                                       HyperParameters{.rule = static_cast<Rule>(200)}}) {
    for (auto* values : {&decision.hyper_parameters, &decision.values_after}) {
      const HyperParameters right = std::exchange((*values)[1], wrong);
      for (const bool applies : {true, false}) {
        decision.outcome.decision.apply = applies;
        EXPECT_TRUE(absl::IsInvalidArgument(DecodeLeadWord(Encode(word), Spec()).status()));
      }
      (*values)[1] = right;
    }
  }
  Follow follow = {.uid = std::string(32, 'a'), .spec = Spec(), .member = 1};
  EXPECT_TRUE(DecodeFollow(Encode(follow)).ok());
  follow.spec.groups[0].hyper_parameters.rule = static_cast<Rule>(200);
  EXPECT_TRUE(absl::IsInvalidArgument(DecodeFollow(Encode(follow)).status()));
}

}  // namespace
}  // namespace ballast
