#include "cpu_optimizer_service/common/rank_memory_layout.h"

#include <gtest/gtest.h>

#include <vector>

namespace ballast::rank_memory_layout_test {
namespace {

// Chunks of 512 elements; rank 1 owns the second half of group 0 and all of group 1.
LayoutSpec Spec() {
  LayoutSpec spec;
  spec.world_size = 3;
  spec.group_count = 2;
  spec.chunk_elements = 512;
  spec.parameters = {{.name = "a", .shape = {2048}}, {.name = "b", .shape = {700}, .group = 1}};
  spec.partitions = {{.rank = 0, .group = 0, .begin = 0, .end = 1024},
                     {.rank = 1, .group = 0, .begin = 1024, .end = 2048},
                     {.rank = 1, .group = 1, .begin = 0, .end = 768}};
  return spec;
}
std::vector<GroupSpec> Groups() {
  return {{.name = "a", .wire_dtype = DType::kBFloat16, .return_dtype = DType::kFloat32},
          {.name = "b", .wire_dtype = DType::kFloat32, .return_dtype = DType::kBFloat16}};
}

TEST(RankMemoryLayout, EveryChunkOfTheRankHasAlignedPlacesThatDoNotOverlap) {
  const Layout layout = Layout::Create(Spec()).value();
  const RankMemoryLayout places(layout, Groups(), 1);
  int64_t end = 0;
  for (const int chunk : layout.chunks_of_rank(1)) {
    EXPECT_EQ(places.gradient(chunk).offset_bytes % 64, 0);
    EXPECT_GE(places.gradient(chunk).offset_bytes, end);
    end = places.gradient(chunk).offset_bytes + places.gradient(chunk).bytes;
  }
  EXPECT_EQ(places.weights_offset_bytes(), 8192);  // 2 * 1024 + 2048 + 1024 bytes, in whole pages.
  EXPECT_LE(end, places.weights_offset_bytes());
  end = places.weights_offset_bytes();
  for (const int chunk : layout.chunks_of_rank(1)) {
    EXPECT_EQ(places.weights(chunk).offset_bytes % 64, 0);
    EXPECT_GE(places.weights(chunk).offset_bytes, end);
    end = places.weights(chunk).offset_bytes + places.weights(chunk).bytes;
  }
  EXPECT_LE(end, places.size_bytes());
  EXPECT_EQ(places.size_bytes() % 4096, 0);
}

TEST(RankMemoryLayout, SizesFollowTheGroupsDtypes) {
  const Layout layout = Layout::Create(Spec()).value();
  const RankMemoryLayout places(layout, Groups(), 1);
  const auto chunks = layout.chunks_of_rank(1);
  EXPECT_EQ(places.gradient(chunks[0]).bytes, 512 * 2);
  EXPECT_EQ(places.weights(chunks[0]).bytes, 512 * 4);
  EXPECT_EQ(places.gradient(chunks[2]).bytes, 512 * 4);
  EXPECT_EQ(places.weights(chunks[2]).bytes, 512 * 2);
  EXPECT_EQ(places.gradient(chunks[3]).bytes, 256 * 4);
}

TEST(RankMemoryLayout, ChunksOfOtherRanksHaveNoPlaceAndARankWithoutChunksNoMemory) {
  const Layout layout = Layout::Create(Spec()).value();
  const RankMemoryLayout first(layout, Groups(), 0);
  for (const int chunk : layout.chunks_of_rank(1)) {
    EXPECT_EQ(first.gradient(chunk).offset_bytes, -1);
    EXPECT_EQ(first.weights(chunk).offset_bytes, -1);
  }
  EXPECT_EQ(RankMemoryLayout(layout, Groups(), 2).size_bytes(), 0);
}

}  // namespace
}  // namespace ballast::rank_memory_layout_test
