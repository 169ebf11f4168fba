#include "server/call_pool.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <latch>
#include <string>
#include <vector>

#include "tests/support/messages.h"

namespace ballast::server {
namespace {

TEST(CallPool, AdmitsSoManyCallsAndNamesTheBoundToTheOthers) {
  CallWatch watch;
  CallPool pool("calls that test", /*threads=*/1, /*most_calls=*/2, watch);
  std::vector<CallPool::Place> places;
  for (int i = 0; i < 2; ++i) places.push_back(pool.Enter().value());
  const absl::StatusOr<CallPool::Place> refused = pool.Enter();
  EXPECT_TRUE(Refused(refused.status(), absl::StatusCode::kResourceExhausted));
  places.pop_back();
  EXPECT_TRUE(pool.Enter().ok());
}

TEST(CallPools, BusyPoolsDoNotDelayTheOthers) {
  std::latch release(1);
  std::latch done(1);
  CallPools pools;  // Ends before what its tasks use.
  for (CallPool* busy : {&pools.creation, &pools.traces, &pools.readers}) {
    for (size_t i = 0; i < 2 * kMaxTraces; ++i) busy->Run([&] { release.wait(); });
  }
  pools.control.Run([&] { done.count_down(); });
  done.wait();
  release.count_down();
}

TEST(CallPool, AnswersThatWaitNeedNoPlaceUntilThereAreManyBytesOfThem) {
  CallWatch watch;
  CallPool pool("calls that test", /*threads=*/1, /*most_calls=*/1, watch);
  ASSERT_TRUE(pool.AnswerWaits(kMaxUnreadBytes - 1));
  EXPECT_FALSE(pool.AnswerWaits(2));
  EXPECT_TRUE(pool.AnswerWaits(1));
  EXPECT_TRUE(pool.AnswerWaits(0));
  pool.AnswerIsOver(kMaxUnreadBytes - 1);
  EXPECT_TRUE(pool.AnswerWaits(2));
}

}  // namespace
}  // namespace ballast::server
