#include "cpu_optimizer_service/job/core/rank_table.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>

#include "tests/cpu_optimizer_service/job/job_driver.h"

namespace ballast {
namespace {

using testing::IsEmpty;
using testing::SizeIs;

class RankTableTest : public testing::Test {
 protected:
  Detached Take(int rank, const std::string& process_id) {
    Detached detached;
    ranks_.Take(rank, process_id, detached);
    return detached;
  }
  StreamKey Open(int rank) {
    return ranks_.OpenStream(rank, std::make_shared<RecordingListener>(), UpdateMode::kWait,
                             /*weights_in_place=*/false);
  }
  std::shared_ptr<const RankMemory> MakeMemory(int rank) {
    return std::make_shared<const HeapRankMemory>(layout_, spec_, rank);
  }

  JobSpec spec_ = MakeJobSpec({.world_size = 2});
  Layout layout_ = Layout::Create(spec_.layout).value();
  RankTable ranks_{2};
};

TEST_F(RankTableTest, AFreeRankIsTakenFromNoProcess) {
  EXPECT_FALSE(ranks_.IsTakenFrom(0, "a"));
  EXPECT_FALSE(ranks_.IsHeldBy(0, "a"));
  EXPECT_FALSE(ranks_.IsHeldBy(0, "")) << "no process has the empty name";
  Take(0, "a");
  EXPECT_TRUE(ranks_.IsHeldBy(0, "a"));
  EXPECT_FALSE(ranks_.IsTakenFrom(0, "a"));
  EXPECT_TRUE(ranks_.IsTakenFrom(0, "b"));
  EXPECT_FALSE(ranks_.IsTakenFrom(1, "b"));
}

TEST_F(RankTableTest, OnlyTheLastStreamIsCurrent) {
  Take(0, "a");
  const StreamKey first = Open(0);
  EXPECT_TRUE(ranks_.IsCurrent(first));
  Listeners listeners;
  ranks_.TakeListener(0, listeners);
  EXPECT_THAT(listeners, SizeIs(1));
  EXPECT_FALSE(ranks_.IsCurrent(first));
  const StreamKey second = Open(0);
  EXPECT_NE(first.stream, second.stream);
  EXPECT_TRUE(ranks_.IsCurrent(second));
  EXPECT_FALSE(ranks_.IsCurrent(first));
}

TEST_F(RankTableTest, ARankWhoseStreamEndsBetweenStepsIsFreeAtOnce) {
  Take(0, "a");
  Open(0);
  EXPECT_NE(ranks_.CloseStream(0, /*in_step=*/false), nullptr);
  EXPECT_TRUE(ranks_[0].process_id.empty());
  EXPECT_EQ(ranks_[0].last_process_id, "a");
}

TEST_F(RankTableTest, ARankWhoseStreamEndsInAStepIsFreeWhenTheStepIsOver) {
  Take(0, "a");
  Take(1, "b");
  Open(0);
  Open(1);
  ranks_.CloseStream(0, /*in_step=*/true);
  EXPECT_TRUE(ranks_.IsHeldBy(0, "a"));
  ranks_.FreeLeft();
  EXPECT_TRUE(ranks_[0].process_id.empty());
  EXPECT_TRUE(ranks_.IsHeldBy(1, "b"));
}

TEST_F(RankTableTest, AStreamThatIsOpenedAgainKeepsTheRank) {
  Take(0, "a");
  Open(0);
  ranks_.CloseStream(0, /*in_step=*/true);
  Open(0);
  ranks_.FreeLeft();
  EXPECT_TRUE(ranks_.IsHeldBy(0, "a"));
}

TEST_F(RankTableTest, MemoryGoesWithItsProcess) {
  Take(0, "a");
  const auto memory = MakeMemory(0);
  EXPECT_EQ(ranks_.GiveMemory(0, memory, 10), nullptr);
  EXPECT_THAT(Take(0, "a").memories, IsEmpty());
  EXPECT_THAT(Take(0, "b").memories, SizeIs(1));
  EXPECT_EQ(ranks_[0].memory, nullptr);
}

TEST_F(RankTableTest, OnlyTheRanksOwnMemoryIsDropped) {
  Take(0, "a");
  const auto first = MakeMemory(0);
  const auto second = MakeMemory(0);
  ranks_.GiveMemory(0, first, 10);
  EXPECT_EQ(ranks_.GiveMemory(0, second, 10), first);
  EXPECT_EQ(ranks_.DropMemory(0, first.get()), nullptr);
  EXPECT_EQ(ranks_.DropMemory(0, second.get()), second);
  EXPECT_EQ(ranks_[0].memory, nullptr);
}

TEST_F(RankTableTest, ALenderStaysUntilTheStepIsOver) {
  Take(0, "a");
  const auto memory = MakeMemory(0);
  ranks_.GiveMemory(0, memory, 10);
  ranks_.Lend(0);
  ranks_.DropMemory(0, memory.get());
  EXPECT_EQ(ranks_[0].lender, memory);
  const Detached detached = ranks_.FreeAll();
  EXPECT_EQ(ranks_[0].lender, memory) << "a step that is cleared is still read";
  EXPECT_THAT(ranks_.TakeLenders(), SizeIs(1));
  EXPECT_EQ(ranks_[0].lender, nullptr);
}

TEST_F(RankTableTest, WeightsLieInMemoryOnlyIfTheStreamAskedForIt) {
  Take(0, "a");
  ranks_.GiveMemory(0, MakeMemory(0), 10);
  Open(0);
  EXPECT_EQ(ranks_.WeightsMemories()[0], nullptr);
  ranks_.OpenStream(0, std::make_shared<RecordingListener>(), UpdateMode::kWait,
                    /*weights_in_place=*/true);
  EXPECT_EQ(ranks_.WeightsMemories()[0], ranks_[0].memory);
}

TEST_F(RankTableTest, ANewGenerationFreesAllRanks) {
  Take(0, "a");
  Take(1, "b");
  const StreamKey key = Open(0);
  const auto memory = MakeMemory(1);
  ranks_.GiveMemory(1, memory, 10);
  const Detached detached = ranks_.FreeAll();
  EXPECT_THAT(detached.listeners, SizeIs(1));
  EXPECT_FALSE(ranks_.IsCurrent(key));
  for (int rank = 0; rank < 2; ++rank) {
    EXPECT_TRUE(ranks_[rank].process_id.empty());
    EXPECT_EQ(ranks_[rank].memory, nullptr);
  }
  EXPECT_EQ(ranks_[1].last_process_id, "b");
}

}  // namespace
}  // namespace ballast
