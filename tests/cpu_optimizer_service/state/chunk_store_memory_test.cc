// Memory that runs out while chunks are pinned: nothing is pinned then, and nothing is lost.
#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <new>
#include <numeric>
#include <string>
#include <vector>

#include "cpu_optimizer_service/host/file_keeper.h"
#include "cpu_optimizer_service/host/named_memory.h"
#include "cpu_optimizer_service/state/chunk_store.h"
#include "tests/support/failing_memory.h"

namespace ballast {
namespace {

constexpr int kChunks = 12;

Layout ManyChunks() {
  LayoutSpec spec;
  spec.chunk_elements = 256;
  spec.parameters = {{.name = "a", .shape = {kChunks * 256}}};
  spec.partitions = {{.rank = 0, .group = 0, .begin = 0, .end = kChunks * 256}};
  return Layout::Create(spec).value();
}

// Every allocation of Pin fails once. `used_bytes` is what the budget has given while nothing is
// pinned, and while everything is.
void EveryAllocationOfAPinFails(ChunkStore& store, const MemoryBudget& budget) {
  std::vector<int> all(kChunks);
  std::iota(all.begin(), all.end(), 0);
  const int64_t free_bytes = budget.used_bytes();
  int64_t pinned_bytes = 0;
  {
    const std::vector<ChunkPin> pins = store.Pin(all).value();
    pinned_bytes = budget.used_bytes();
  }
  ASSERT_EQ(budget.used_bytes(), free_bytes);
  int failed = 0;
  for (int64_t index = 0;; ++index) {
    ASSERT_LT(index, 1000) << "a pin allocates without end";
    left_until_failure = index;
    try {
      const absl::StatusOr<std::vector<ChunkPin>> pins = store.Pin(all);
      const bool none_failed = left_until_failure.exchange(-1) >= 0;
      if (!pins.ok()) {
        ++failed;  // Only an arena could not be made.
      } else if (none_failed) {
        break;
      }
    } catch (const std::bad_alloc&) {
      ++failed;
    }
    left_until_failure = -1;
    EXPECT_EQ(budget.used_bytes(), free_bytes) << "allocation " << index;
    const std::vector<ChunkPin> pins = store.Pin(all).value();
    EXPECT_EQ(budget.used_bytes(), pinned_bytes) << "allocation " << index;
    for (int chunk = 0; chunk < kChunks; ++chunk) {  // Each has its spare.
      const auto write = store.BeginWrite(chunk, Destination::kInPlaceIfFree).value();
      EXPECT_FALSE(write.in_place);
      store.Drop(write);
    }
  }
  EXPECT_GT(failed, kChunks);
}

class Keeper : public FileKeeper {
 public:
  absl::Status Keep(const std::string&, int) override { return absl::OkStatus(); }
  void Drop(const std::string&) override {}
  std::map<std::string, FileDescriptor> TakeKept() override { return {}; }
};

TEST(ChunkStoreMemory, EveryAllocationOfAPinInNamedMemoryMayFail) {
  const Layout layout = ManyChunks();
  Keeper keeper;
  NamedMemory memory(keeper);
  NamedArenas arenas(memory, "uid", "test");
  MemoryBudget budget(int64_t{1} << 20);
  const auto store =
      ChunkStore::Create(
          layout, {.planes = {3}, .budget = &budget, .owner = "test", .named = &arenas}, arenas)
          .value();
  EveryAllocationOfAPinFails(*store, budget);
}

TEST(ChunkStoreMemory, EveryAllocationOfAPinMayFail) {
  const Layout layout = ManyChunks();
  const std::unique_ptr<ArenaFactory> arenas = MakeAnonymousArenaFactory();
  MemoryBudget budget(int64_t{1} << 20);
  for (const bool second_versions : {false, true}) {
    const auto store =
        ChunkStore::Create(
            layout,
            {.planes = {3}, .second_versions = second_versions, .budget = &budget, .owner = "test"},
            *arenas)
            .value();
    EveryAllocationOfAPinFails(*store, budget);
  }
}

}  // namespace
}  // namespace ballast
