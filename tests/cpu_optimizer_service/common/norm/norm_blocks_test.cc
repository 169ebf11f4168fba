#include "cpu_optimizer_service/common/norm/norm_blocks.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "cpu_optimizer_service/common/buckets.h"

namespace ballast {
namespace {

LayoutSpec Spec(const std::vector<int64_t>& sizes, int world_size, int64_t bucket_elements,
                int64_t chunk_elements) {
  LayoutSpec spec;
  spec.world_size = world_size;
  spec.chunk_elements = chunk_elements;
  for (const int64_t size : sizes) {
    spec.parameters.push_back({.name = std::to_string(spec.parameters.size()), .shape = {size}});
  }
  const auto flat = FlatElements(spec);
  spec.partitions = PartitionsOf(MakeBuckets(flat, world_size, bucket_elements), world_size);
  return spec;
}

// Each block lies whole in one chunk or is cut.
void ExpectOnceEach(const Layout& layout) {
  const NormBlocks blocks(layout);
  std::vector<int> block_seen(blocks.blocks(), 0);
  for (int chunk = 0; chunk < static_cast<int>(layout.chunks().size()); ++chunk) {
    layout.VisitPieces(chunk, [&](const ChunkPiece& piece) {
      const NormBlocks::WholeBlocks whole = blocks.WholeIn(piece);
      int64_t at = whole.chunk_offset;
      for (int64_t block = whole.blocks.begin; block < whole.blocks.end; ++block) {
        ++block_seen[block];
        const NormBlocks::Place place = blocks.PlaceOfBlock(block);
        ASSERT_EQ(place.parameter, piece.parameter);
        ASSERT_EQ(at - piece.chunk_offset, place.begin - piece.parameter_offset);
        at += place.end - place.begin;
      }
      ASSERT_EQ(at, whole.chunk_offset + whole.elements);
      ASSERT_LE(at, piece.chunk_offset + piece.elements);
    });
  }
  for (const int64_t block : blocks.cut_blocks()) ++block_seen[block];
  EXPECT_EQ(std::count(block_seen.begin(), block_seen.end(), 1), blocks.blocks());
}

TEST(NormBlocks, LieWholeInOneChunkOrAreCutWhereverTheEdgesAre) {
  for (int64_t before = 0; before <= kBlockElements; ++before) {
    ExpectOnceEach(
        Layout::Create(Spec({before, 1000, 0, 1, 77, 512}, 3, 512, kBlockElements)).value());
  }
  for (const int64_t before : {0, 1, 256, 300}) {
    for (const int64_t chunk : {256, 1024, 12800}) {
      ExpectOnceEach(Layout::Create(Spec({before, 80077, 50000}, 2, 100000, chunk)).value());
    }
  }
}

TEST(NormBlocks, AreThoseOfEachParameterAlone) {
  const Layout layout = Layout::Create(Spec({300, 0, 1001}, 1, 1 << 20, 512)).value();
  const NormBlocks blocks(layout);
  EXPECT_EQ(blocks.blocks(), 2 + 0 + 4);
  EXPECT_EQ(blocks.BlocksOfParameter(1).begin, blocks.BlocksOfParameter(1).end);
  const NormBlocks::Place last = blocks.PlaceOfBlock(blocks.blocks() - 1);
  EXPECT_EQ(last.parameter, 2);
  EXPECT_EQ(last.begin, 768);
  EXPECT_EQ(last.end, 1001);
}

TEST(NormBlocks, OfFrozenParametersThereAreNone) {
  LayoutSpec spec = Spec({300, 300}, 1, 1 << 20, 512);
  spec.parameters.push_back({.name = "frozen", .shape = {1000}, .trainable = false});
  EXPECT_EQ(NormBlocks(Layout::Create(spec).value()).blocks(), 4);
}

}  // namespace
}  // namespace ballast
