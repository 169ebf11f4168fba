#include "cpu_optimizer_service/arena.h"

#include <gtest/gtest.h>

#include <algorithm>

namespace ballast {
namespace {

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

}  // namespace
}  // namespace ballast
