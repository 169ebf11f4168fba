#include "cpu_optimizer_service/arena.h"

#include <gtest/gtest.h>

#include <algorithm>

namespace ballast {
namespace {

TEST(Arena, IsZeroedAlignedAndWritable) {
  const auto factory = MakeAnonymousArenaFactory();
  for (const int64_t bytes : {int64_t{0}, int64_t{1}, int64_t{5000}, (int64_t{5} << 20) + 3}) {
    const auto arena = factory->Create(bytes, "test").value();
    EXPECT_EQ(arena->size_bytes(), bytes);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(arena->data()) % kArenaAlignment, 0u);
    EXPECT_TRUE(std::all_of(arena->data(), arena->data() + bytes,
                            [](std::byte b) { return b == std::byte{0}; }));
    std::fill_n(arena->data(), bytes, std::byte{1});
  }
}

TEST(Arena, ThatCannotBeMappedIsResourceExhausted) {
  const auto arena = MakeAnonymousArenaFactory()->Create(int64_t{1} << 60, "huge");
  EXPECT_EQ(arena.status().code(), absl::StatusCode::kResourceExhausted);
}

}  // namespace
}  // namespace ballast
