#include "cpu_optimizer_service/job/kept/lane_pool.h"

#include <setjmp.h>
#include <signal.h>
#include <sys/mman.h>

#include <vector>

#include "gtest/gtest.h"

namespace ballast {
namespace {

class LanePoolTest : public testing::Test {
 protected:
  // A process that takes over the lanes.
  struct Process {
    explicit Process(std::vector<RedoLane>& lanes) { pool.Use(absl::MakeSpan(lanes)); }
    bool has_left() const {
      return !pool.AllLeft([](const RedoLane&) { return false; });
    }
    LanePool pool{"taken", "free"};
  };

  std::vector<RedoLane> lanes_{2};
};

TEST_F(LanePoolTest, ALaneIsInUseForALaterProcessUntilItIsGivenBack) {
  Process process(lanes_);
  RedoLane* const lane = process.pool.Take(3, 7, /*may_wait=*/false);
  EXPECT_TRUE(Process(lanes_).pool.HasLeft(3, 7));
  EXPECT_FALSE(Process(lanes_).pool.HasLeft(3, 8));
  EXPECT_FALSE(Process(lanes_).pool.HasLeft(4, 7));
  process.pool.Give(lane);
  EXPECT_FALSE(Process(lanes_).has_left());
}

TEST_F(LanePoolTest, TheSameChangeGoesOnInTheLaneThatItLeft) {
  RedoLane* const left = Process(lanes_).pool.Take(3, 7, /*may_wait=*/false);
  RedoWriter(*left, 3, 0).Record(5);
  Process process(lanes_);
  EXPECT_NE(process.pool.Take(4, 7, /*may_wait=*/false), left);
  EXPECT_EQ(process.pool.Take(5, 7, /*may_wait=*/false), nullptr);
  EXPECT_EQ(process.pool.Take(3, 7, /*may_wait=*/false), left);
  EXPECT_EQ(RedoWord::Unpack(left->word).done, 5);
  EXPECT_FALSE(process.has_left());
}

TEST_F(LanePoolTest, WhatIsLeftAndNotWantedIsFree) {
  RedoLane* const unwanted = Process(lanes_).pool.Take(3, 7, /*may_wait=*/false);
  RedoLane* const wanted = Process(lanes_).pool.Take(4, 7, /*may_wait=*/false);
  Process process(lanes_);
  process.pool.KeepLeft([&](const RedoLane& lane) { return &lane == wanted; });
  EXPECT_TRUE(Process(lanes_).pool.HasLeft(4, 7));
  EXPECT_FALSE(Process(lanes_).pool.HasLeft(3, 7));
  EXPECT_EQ(process.pool.Take(5, 7, /*may_wait=*/false), unwanted);
  process.pool.FreeLeft();
  EXPECT_EQ(process.pool.Take(6, 7, /*may_wait=*/false), wanted);
}

sigjmp_buf store_failed;
void* failed_at = nullptr;

// With the word it would count as in use, with the tag of an earlier change.
TEST_F(LanePoolTest, ALanesTagIsStoredBeforeItsWord) {
  void* const memory =
      mmap(nullptr, sizeof(RedoLane), PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(memory, MAP_FAILED);
  auto* const lane = static_cast<RedoLane*>(memory);
  LanePool pool("taken", "free");
  pool.Use({lane, 1});
  struct sigaction fails = {}, before = {};
  fails.sa_flags = SA_SIGINFO;
  fails.sa_sigaction = [](int, siginfo_t* info, void*) {
    failed_at = info->si_addr;
    siglongjmp(store_failed, 1);
  };
  sigaction(SIGSEGV, &fails, &before);
  if (sigsetjmp(store_failed, 1) == 0) pool.Take(3, 7, /*may_wait=*/false);
  sigaction(SIGSEGV, &before, nullptr);
  EXPECT_EQ(failed_at, &lane->tag);
  munmap(memory, sizeof(RedoLane));
}

}  // namespace
}  // namespace ballast
