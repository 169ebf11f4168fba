#include "cpu_optimizer_service/host/arena.h"

#include <gmock/gmock.h>
#include <sys/mman.h>
#include <sys/prctl.h>

#include <algorithm>
#include <vector>

#include "cpu_optimizer_service/host/huge_pages.h"
#include "tests/cpu_optimizer_service/host/topology_for_tests.h"

namespace ballast {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(Arena, IsZeroedAlignedAndWritable) {
  const auto factory = MakeAnonymousArenaFactory();
  for (const int64_t bytes : {int64_t{0}, int64_t{1}, int64_t{5000}, (int64_t{5} << 20) + 3}) {
    const auto touch = bytes % 2 == 0 ? ArenaFactory::Touch::kNow : ArenaFactory::Touch::kLater;
    const auto arena = factory->Create(bytes, "test", touch).value();
    if (bytes >= int64_t{2} << 20) {  // Only whole, aligned huge pages are backed by them.
      EXPECT_EQ(reinterpret_cast<uintptr_t>(arena->data()) % (2 << 20), 0u);
    }
    EXPECT_EQ(arena->size_bytes(), bytes);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(arena->data()) % kArenaAlignment, 0u);
    EXPECT_TRUE(std::all_of(arena->data(), arena->data() + bytes,
                            [](std::byte b) { return b == std::byte{0}; }));
    std::fill_n(arena->data(), bytes, std::byte{1});
  }
}

TEST(Arena, ThatCannotBeMappedIsResourceExhausted) {
  const auto arena =
      MakeAnonymousArenaFactory()->Create(int64_t{1} << 60, "huge", ArenaFactory::Touch::kLater);
  EXPECT_EQ(arena.status().code(), absl::StatusCode::kResourceExhausted);
}

TEST(Arena, TouchedByAPoolIsWhollyPresentAndZeroed) {
  TaskPool pool(4, SeveralNodesInOne(2));
  const auto factory = MakeAnonymousArenaFactory(&pool);
  for (const int64_t bytes : {int64_t{1}, int64_t{5000}, (int64_t{37} << 20) + 3}) {
    const auto arena = factory->Create(bytes, "test", ArenaFactory::Touch::kNow).value();
    std::vector<unsigned char> pages((bytes + 4095) / 4096);
    ASSERT_EQ(mincore(arena->data(), bytes, pages.data()), 0);
    EXPECT_TRUE(std::all_of(pages.begin(), pages.end(),
                            [](unsigned char state) { return (state & 1) != 0; }));
    EXPECT_TRUE(std::all_of(arena->data(), arena->data() + bytes,
                            [](std::byte b) { return b == std::byte{0}; }));
  }
}

TEST(Arena, SaysOnceThatLargeMemoryDidNotComeInHugePages) {
  std::vector<std::string> warnings;
  const auto factory = MakeAnonymousArenaFactory(
      nullptr, [&](const std::string& line) { warnings.push_back(line); });
  const auto create = [&](int64_t huge_pages, const char* label) {
    return factory->Create(huge_pages * kHugePageBytes, label, ArenaFactory::Touch::kNow).value();
  };
  ASSERT_EQ(prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0), 0);
  create(1, "small");
  create(64, "first");
  create(64, "second");
  ASSERT_EQ(prctl(PR_SET_THP_DISABLE, 0, 0, 0, 0), 0);
  EXPECT_THAT(warnings, ElementsAre(HasSubstr("first got 0%")));
}

}  // namespace
}  // namespace ballast
