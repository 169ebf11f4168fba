#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <set>
#include <string>

#include "tests/histories/generate.h"
#include "tests/histories/machine/machine_histories.h"
#include "tests/histories/run.h"
#include "tests/histories/shrink.h"
#include "tests/support/sanitizers.h"

namespace ballast::histories {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kHistories = kSanitized ? 300 : 4000;

TEST(Histories, EndAsTheModelSays) {
  Engines engines;
  const std::string failure = RunHistories(engines, 1, kHistories);
  std::printf("%s\n", Describe(engines.tally()).c_str());
  ASSERT_EQ(failure, "");

  // That all of it still happens, often.
  const Tally& tally = engines.tally();
  EXPECT_GT(tally.committed, kHistories);
  for (const int64_t count :
       {tally.clipped, tally.skipped, tally.with_unused, tally.refused_seals, tally.repeats,
        tally.cuts, tally.discarded, tally.aborted, tally.replaced, tally.refused_calls,
        tally.snapshots, tally.speculated, tally.published, tally.in_place, tally.borrowed,
        tally.norms}) {
    EXPECT_GT(count, kHistories / 20);
  }
  for (const int64_t count :
       {tally.spoilt, tally.aborted_at_decision, tally.undone, tally.loaded, tally.redone,
        tally.written, tally.derived, tally.spikes, tally.abandoned, tally.refused_votes,
        tally.given_up, tally.not_last}) {
    EXPECT_GT(count, kHistories / 100);
  }
  EXPECT_GT(tally.over_members, kHistories / 10);
  EXPECT_GT(tally.link_cuts, kHistories / 20);
  if (!CanDie()) return;
  EXPECT_GT(tally.member_deaths, kHistories / 20);
  EXPECT_GT(tally.deaths, kHistories / 2);
  EXPECT_GT(tally.carried_out, kHistories / 10);
  if (kSanitized) return;  // Too few deaths to have them all.
  for (const char* store : {"a part of a record", "a record's half", "a record's flip",
                            "a chunk's first weights", "a ledger's word", "an entry of the log",
                            "the log's end", "a chunk's word", "a lane is taken", "a lane is free",
                            "a turn of a sum", "a sum's lane is taken", "a sum's lane is free"}) {
    EXPECT_GT(tally.died_at.contains(store) ? tally.died_at.at(store) : 0, 0) << store;
  }
}

TEST(MachineHistories, EndAsTheModelSays) {
  constexpr int64_t kShortOnes = kSanitized ? 2'000 : 40'000;
  MachineTally tally;
  ASSERT_EQ(RunMachineHistories(1, kShortOnes, tally), "");
  // That all of it happens, often.
  for (const int64_t count : {tally.refused, tally.refused_seals, tally.repeats, tally.discards,
                              tally.decided, tally.deaths}) {
    EXPECT_GT(count, kShortOnes / 4);
  }
  for (const int64_t count : {tally.reopened, tally.void_votes, tally.dropped}) {
    EXPECT_GT(count, kShortOnes / 100);
  }
}

TEST(Generate, MakesTheSameHistoryForTheSameSeedAndOthersForOthers) {
  std::set<std::string> texts;
  for (uint64_t seed = 1; seed <= 200; ++seed) {
    const std::string text = Describe(Generate(seed));
    EXPECT_EQ(Describe(Generate(seed)), text);
    EXPECT_TRUE(texts.insert(text).second);
  }
}

// A history that fails whenever it holds a certain event and a certain parameter.
TEST(Shrink, LeavesOnlyWhatFails) {
  const auto fails = [](const History& history) {
    bool has_cut = false;
    bool has_large = false;
    for (const Attempt& attempt : history.attempts) {
      for (const Event& event : attempt.events) has_cut |= event.kind == EventKind::kCut;
    }
    for (const ParameterPlan& parameter : history.job.parameters) {
      has_large |= parameter.elements >= 100;
    }
    return has_cut && has_large;
  };
  uint64_t seed = 1;
  while (!fails(Generate(seed)) || Generate(seed).attempts.size() < 4) ++seed;
  const History small = Shrink(Generate(seed), fails);
  EXPECT_TRUE(fails(small));
  ASSERT_EQ(small.attempts.size(), 1u);
  ASSERT_EQ(small.attempts[0].events.size(), 1u);
  EXPECT_EQ(small.attempts[0].events[0].kind, EventKind::kCut);
  EXPECT_EQ(small.attempts[0].micro_steps, 1u);
  EXPECT_EQ(small.attempts[0].end, End::kCommit);
  EXPECT_EQ(small.job.parameters.size(), 1u);
  EXPECT_LT(small.job.parameters[0].elements, 200);
  EXPECT_EQ(small.job.world_size, 1);
  EXPECT_THAT(Describe(small), HasSubstr("loses its stream"));
}

}  // namespace
}  // namespace ballast::histories
