#include "cpu_optimizer_service/state/slot_pool.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "cpu_optimizer_service/common/rule.h"
#include "cpu_optimizer_service/host/named_memory.h"
#include "tests/cpu_optimizer_service/host/keeper_for_two.h"

namespace ballast {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

constexpr int64_t kSlotBytes = 512 * 4 * 3;  // Of a whole chunk.

// Chunks 0, 1 and 3 have 512 elements, chunk 2 has 256.
class SlotPoolTest : public testing::Test {
 protected:
  SlotPoolTest() {
    LayoutSpec spec;
    spec.group_count = 2;
    spec.chunk_elements = 512;
    spec.parameters = {{.name = "a", .shape = {1280}, .group = 0},
                       {.name = "b", .shape = {512}, .group = 1}};
    spec.partitions = {{.rank = 0, .group = 0, .begin = 0, .end = 1280},
                       {.rank = 0, .group = 1, .begin = 0, .end = 512}};
    layout_ = std::make_unique<Layout>(Layout::Create(spec).value());
  }
  std::unique_ptr<SlotPool> Make(ChunkStore::Options options) {
    if (options.planes.empty()) options.planes.assign(2, PlanesOf(HyperParameters()));
    options.budget = &budget_;
    options.owner = "test";
    options_ = std::move(options);
    return SlotPool::Create(
               *layout_, options_,
               options_.named != nullptr ? static_cast<ArenaFactory&>(*options_.named) : *arenas_)
        .value();
  }
  void Retire(SlotPool& pool, ChunkVersion* version) {
    SlotPool::Freed freed;
    pool.Retire(version, freed);
  }

  MemoryBudget budget_{2 * kSlotBytes + 512};  // Two, and a header.
  std::unique_ptr<ArenaFactory> arenas_ = MakeAnonymousArenaFactory();
  std::unique_ptr<Layout> layout_;
  ChunkStore::Options options_;
};

TEST_F(SlotPoolTest, TakesTheFreeSlotThatIsNearestOfTheSameSize) {
  const auto pool = Make({.second_versions = true});
  EXPECT_EQ(pool->TakeFree(0), nullptr) << "none is free yet";
  for (const int chunk : {1, 2, 3}) Retire(*pool, pool->second(chunk));
  EXPECT_TRUE(pool->HasFree(0));
  EXPECT_EQ(pool->TakeFree(3), pool->second(3)) << "its own";
  EXPECT_EQ(pool->TakeFree(3), pool->second(1));
  EXPECT_FALSE(pool->HasFree(0)) << "that of chunk 2 is smaller";
  EXPECT_EQ(pool->TakeFree(0), nullptr);
  EXPECT_EQ(pool->TakeFree(2), pool->second(2));
}

TEST_F(SlotPoolTest, ASlotOfOtherPlanesIsNotTakenAlthoughItIsAsLarge) {
  const auto pool =
      Make({.planes = {PlanesOf(DefaultsOf(Rule::kLion)), PlanesOf(DefaultsOf(Rule::kAdagrad))},
            .second_versions = true});
  EXPECT_EQ(pool->first(0)->slot[Plane::kSum], nullptr);
  EXPECT_NE(pool->first(3)->slot[Plane::kSum], nullptr);
  Retire(*pool, pool->second(1));
  EXPECT_TRUE(pool->HasFree(0));
  EXPECT_FALSE(pool->HasFree(3));
  EXPECT_EQ(pool->TakeFree(3), nullptr);
  EXPECT_EQ(pool->TakeFree(0), pool->second(1));
}

TEST_F(SlotPoolTest, TakesMemoryFromTheBudgetWhereNoneIsFree) {
  const auto pool = Make({});
  ChunkVersion* const version = pool->TakeFresh(0).value();
  EXPECT_TRUE(version->is_extra());
  EXPECT_EQ(budget_.used_bytes(), kSlotBytes);
  version->spare = pool->TakeFresh(1).value();
  EXPECT_EQ(pool->TakeFresh(3).status().code(), absl::StatusCode::kResourceExhausted);
  Retire(*pool, version);
  EXPECT_EQ(budget_.used_bytes(), 0) << "with its spare";
}

TEST_F(SlotPoolTest, RetiresAllThatHoldNoVersion) {
  const auto pool = Make({.second_versions = true, .keep_previous = true});
  pool->first(0)->published = true;
  pool->third(0)->previous = true;
  for (const int chunk : {1, 2, 3}) {
    pool->first(chunk)->published = pool->second(chunk)->published = true;
    pool->third(chunk)->previous = true;
  }
  (void)pool->TakeFresh(1).value();
  SlotPool::Freed freed;
  pool->RetireUnused(freed);
  EXPECT_EQ(freed.size(), 1u);
  EXPECT_EQ(pool->TakeFree(0), pool->second(0));
  EXPECT_FALSE(pool->HasFree(0));
}

TEST_F(SlotPoolTest, OfNamedMemoryIsFoundAgainByNumber) {
  KeeperForTwo keeper;
  NamedMemory memory(keeper);
  NamedArenas arenas(memory, "uid", "test");
  const auto pool = Make({.named = &arenas});
  const std::vector<ChunkVersion*> batch = pool->TakeBatch({3, 0}).value();
  ASSERT_EQ(batch.size(), 2u);
  EXPECT_EQ(batch[0]->home, 3);
  batch[0]->slot[Plane::kExpAvg][511] = 7;
  pool->first(2)->slot[Plane::kMaster][255] = 9;
  std::set<uint32_t> numbers = {batch[0]->number, batch[1]->number};
  for (int chunk = 0; chunk < 4; ++chunk) numbers.insert(pool->first(chunk)->number);
  EXPECT_EQ(numbers.size(), 6u);

  MemoryBudget budget(int64_t{1} << 20);
  NamedMemory left(keeper);
  NamedArenas left_arenas(left, "uid", "test");
  ChunkStore::Options options = options_;
  options.budget = &budget;
  options.named = &left_arenas;
  const auto next = SlotPool::Create(*layout_, options, left_arenas).value();
  const auto versions = next->TakeOver().value();
  EXPECT_EQ(versions.size(), 6u);
  ChunkVersion* const found = versions.at(batch[0]->number);
  EXPECT_EQ(found->home, 3);
  EXPECT_EQ(found->slot[Plane::kExpAvg][511], 7);
  EXPECT_EQ(versions.at(pool->first(2)->number)->slot[Plane::kMaster][255], 9);
  EXPECT_GE(budget.used_bytes(), 2 * kSlotBytes);
  // What comes then has other numbers.
  EXPECT_FALSE(versions.contains(next->TakeBatch({1}).value()[0]->number));
}

}  // namespace
}  // namespace ballast
