#include "cpu_optimizer_service/host/memory_budget.h"

#include <gtest/gtest.h>

#include <string>
#include <utility>

#include "tests/support/messages.h"

namespace ballast {
namespace {

TEST(MemoryBudget, P9RefusesWhatDoesNotFitWithTheSizes) {
  MemoryBudget budget(100);
  auto first = budget.Reserve(60, "job a").value();
  EXPECT_TRUE(Refused(budget.Reserve(41, "job b"), absl::StatusCode::kResourceExhausted));
  EXPECT_TRUE(budget.Reserve(40, "job c").ok());
}

TEST(MemoryBudget, TakesWhatIsThereBeyondTheLimitAndGivesNothingMoreUntilItIsGone) {
  MemoryBudget budget(100);
  {
    const auto there = budget.Take(130);
    EXPECT_EQ(budget.used_bytes(), 130);
    EXPECT_FALSE(budget.Reserve(1, "job b").ok());
  }
  EXPECT_TRUE(budget.Reserve(100, "job b").ok());
}

TEST(MemoryBudget, ReservationsGiveBackOnce) {
  MemoryBudget budget(100);
  {
    auto first = budget.Reserve(60, "a").value();
    MemoryBudget::Reservation moved = std::move(first);
    EXPECT_EQ(budget.used_bytes(), 60);
    auto second = budget.Reserve(30, "b").value();
    moved = std::move(second);
    EXPECT_EQ(budget.used_bytes(), 30);
    EXPECT_EQ(moved.bytes(), 30);
  }
  EXPECT_EQ(budget.used_bytes(), 0);
}

}  // namespace
}  // namespace ballast
