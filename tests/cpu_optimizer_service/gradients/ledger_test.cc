#include "cpu_optimizer_service/gradients/ledger.h"

#include <gtest/gtest.h>

#include <utility>

#include "tests/support/messages.h"

namespace ballast {
namespace {

TEST(Ledger, AddsWhatFollowsOnOnceAndKnowsRepeats) {
  Ledger ledger(2);
  EXPECT_EQ(ledger.Check(0, 0, 1).value(), Ledger::Verdict::kNew);
  ledger.Advance(0, 1);
  EXPECT_EQ(ledger.Check(0, 0, 1).value(), Ledger::Verdict::kRepeat);
  EXPECT_EQ(ledger.Check(0, 1, 4).value(), Ledger::Verdict::kNew);
  ledger.Advance(0, 4);
  EXPECT_EQ(ledger.Check(0, 1, 4).value(), Ledger::Verdict::kRepeat);
  EXPECT_EQ(ledger.Check(0, 2, 3).value(), Ledger::Verdict::kRepeat);
  EXPECT_EQ(ledger.next_micro_step(0), 4u);
  EXPECT_EQ(ledger.next_micro_step(1), 0u);
}

TEST(Ledger, RefusesGapsPartialRepeatsAndEmptyRanges) {
  Ledger ledger(1);
  ledger.Advance(0, 2);
  EXPECT_EQ(ledger.Check(0, 3, 4).status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(ledger.Check(0, 1, 3).status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(ledger.Check(0, 2, 2).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(ledger.Check(0, 3, 2).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(Ledger, AFinalContributionClosesItsChunkToAllButRepeats) {
  Ledger ledger(2);
  ledger.Advance(0, 1);
  ledger.Advance(0, 3, /*final=*/true);
  EXPECT_EQ(ledger.Check(0, 1, 3).value(), Ledger::Verdict::kRepeat);
  EXPECT_EQ(ledger.Check(0, 0, 1).value(), Ledger::Verdict::kRepeat);
  for (const auto& [begin, end] : {std::pair(3u, 4u), std::pair(2u, 4u), std::pair(5u, 6u)}) {
    EXPECT_TRUE(Refused(ledger.Check(0, begin, end), absl::StatusCode::kFailedPrecondition));
  }
  EXPECT_EQ(ledger.Check(1, 0, 1).value(), Ledger::Verdict::kNew);
}

TEST(Ledger, IsWholeWhenEveryChunkStandsThere) {
  Ledger ledger(3);
  ledger.Advance(0, 2);
  ledger.Advance(1, 2, /*final=*/true);
  EXPECT_FALSE(ledger.IsWhole(2));
  ledger.Advance(2, 3);
  EXPECT_FALSE(ledger.IsWhole(2));
  EXPECT_FALSE(ledger.IsWhole(3));
  ledger.Clear();
  ledger.Advance(0, 2);
  ledger.Advance(1, 2);
  ledger.Advance(2, 2);
  EXPECT_TRUE(ledger.IsWhole(2));
  EXPECT_TRUE(Ledger(0).IsWhole(1));  // A job without a trainable element.
}

TEST(Ledger, ClearStartsOver) {
  Ledger ledger(1);
  ledger.Advance(0, 2, /*final=*/true);
  ledger.Clear();
  EXPECT_EQ(ledger.Check(0, 0, 1).value(), Ledger::Verdict::kNew);
  ledger.Advance(0, 1);
  EXPECT_EQ(ledger.Check(0, 1, 2).value(), Ledger::Verdict::kNew);
}

}  // namespace
}  // namespace ballast
