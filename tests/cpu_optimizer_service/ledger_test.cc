#include "cpu_optimizer_service/ledger.h"

#include <gtest/gtest.h>

namespace ballast {
namespace {

TEST(Ledger, AddsWhatFollowsOnOnceAndKnowsRepeats) {
  Ledger ledger(2);
  EXPECT_EQ(ledger.Judge(0, 0, 1).value(), Ledger::Verdict::kNew);
  ledger.Advance(0, 1);
  EXPECT_EQ(ledger.Judge(0, 0, 1).value(), Ledger::Verdict::kRepeat);
  EXPECT_EQ(ledger.Judge(0, 1, 4).value(), Ledger::Verdict::kNew);
  ledger.Advance(0, 4);
  EXPECT_EQ(ledger.Judge(0, 1, 4).value(), Ledger::Verdict::kRepeat);
  EXPECT_EQ(ledger.Judge(0, 2, 3).value(), Ledger::Verdict::kRepeat);
  EXPECT_EQ(ledger.next_micro_step(0), 4u);
  EXPECT_EQ(ledger.next_micro_step(1), 0u);
}

TEST(Ledger, RefusesGapsPartialRepeatsAndEmptyRanges) {
  Ledger ledger(1);
  ledger.Advance(0, 2);
  EXPECT_EQ(ledger.Judge(0, 3, 4).status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(ledger.Judge(0, 1, 3).status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(ledger.Judge(0, 2, 2).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(ledger.Judge(0, 3, 2).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(Ledger, ClearStartsOver) {
  Ledger ledger(1);
  ledger.Advance(0, 2);
  ledger.Clear();
  EXPECT_EQ(ledger.Judge(0, 0, 1).value(), Ledger::Verdict::kNew);
}

}  // namespace
}  // namespace ballast
