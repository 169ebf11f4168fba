// Layouts of parameters that are sharded over a mesh.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/layout.h"
#include "tests/support/messages.h"

namespace ballast {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

constexpr Placement kReplicate;
constexpr Placement kShard0 = {.shard_dim = 0};
constexpr Placement kShard1 = {.shard_dim = 1};

LayoutSpec Spec() {
  LayoutSpec spec;
  spec.world_size = 2;
  spec.group_count = 2;
  spec.mesh = {{"dp", 2}};
  spec.parameters = {{.name = "rows", .shape = {5, 3}, .placements = {kShard0}},
                     {.name = "whole", .shape = {4}, .placements = {kReplicate}},
                     {.name = "columns", .shape = {2, 6}, .placements = {kShard1}},
                     {.name = "frozen", .shape = {7}, .trainable = false},
                     {.name = "one", .shape = {1}, .group = 1, .placements = {kShard0}}};
  return spec;
}

void ExpectInvalid(const LayoutSpec& spec) {
  EXPECT_TRUE(Refused(Layout::Create(spec), absl::StatusCode::kInvalidArgument));
}

TEST(MeshLayout, ARankHasItsShardsInTheOrderOfDeclaration) {
  const Layout layout = Layout::Create(Spec()).value();
  ASSERT_EQ(layout.chunks().size(), 3u);
  // Rank 0: three rows at 0, "whole" at 32, three columns at 64; then group 1.
  EXPECT_EQ(layout.chunks()[0].elements, 96);
  EXPECT_EQ(layout.chunks()[1].elements, 32);
  EXPECT_EQ(layout.chunks()[1].group, 1);
  // Rank 1: two rows at 0, three columns at 32.
  EXPECT_EQ(layout.chunks()[2].elements, 64);
  EXPECT_EQ(layout.chunks()[2].rank, 1);
  EXPECT_THAT(layout.chunks_of_rank(0), ElementsAre(0, 1));
  EXPECT_THAT(layout.chunks_of_rank(1), ElementsAre(2));
  EXPECT_THAT(layout.ChunksOfParameter(0), ElementsAre(0, 2));
  EXPECT_THAT(layout.ChunksOfParameter(1), ElementsAre(0));
  EXPECT_THAT(layout.ChunksOfParameter(3), IsEmpty());
  EXPECT_EQ(layout.flat_elements(0), 96 + 64);

  const std::vector<ChunkPiece> pieces = layout.Pieces(2);
  ASSERT_EQ(pieces.size(), 3u);
  EXPECT_EQ(pieces[0].parameter, 0);
  EXPECT_EQ(pieces[0].parameter_offset, 9);
  EXPECT_EQ(pieces[0].elements, 6);
  EXPECT_EQ(pieces[1].parameter, 2);  // Of each row the right half.
  EXPECT_EQ(pieces[1].parameter_offset, 3);
  EXPECT_EQ(pieces[1].chunk_offset, 32);
  EXPECT_EQ(pieces[2].parameter_offset, 9);
  EXPECT_EQ(pieces[2].chunk_offset, 35);
  ASSERT_EQ(layout.padding_of(2).size(), 2u);
  EXPECT_EQ(layout.padding_of(2)[0].chunk_offset, 6);
  EXPECT_EQ(layout.padding_of(2)[0].elements, 26);
  EXPECT_EQ(layout.padding_of(2)[1].chunk_offset, 38);
}

TEST(MeshLayout, ShardsBeginAtMultiplesOf64BytesInEveryFormat) {
  const Layout layout = Layout::Create(Spec()).value();
  for (int chunk = 0; chunk < 3; ++chunk) {
    layout.VisitParts(chunk, [&](const ChunkPart& part) {
      EXPECT_EQ(part.chunk_offset * 2 % 64, 0);
      return true;
    });
  }
}

TEST(MeshLayout, RefusesWhatDoesNotFit) {
  LayoutSpec world = Spec();
  world.world_size = 3;
  ExpectInvalid(world);
  LayoutSpec both = Spec();
  both.partitions = {{.rank = 0, .group = 0, .begin = 0, .end = 256}};
  ExpectInvalid(both);
  LayoutSpec none = Spec();
  none.parameters[1].placements.clear();
  ExpectInvalid(none);
  LayoutSpec dim = Spec();
  dim.parameters[1].placements = {kShard1};
  ExpectInvalid(dim);
  LayoutSpec no_mesh = Spec();
  no_mesh.mesh.clear();
  ExpectInvalid(no_mesh);
  LayoutSpec dims = Spec();
  for (int i = 0; i < 64; ++i) dims.mesh.push_back({std::to_string(i), 1});
  ExpectInvalid(dims);
}

TEST(MeshLayout, CountsTheShardsOfItsOwnRanks) {
  LayoutSpec many = Spec();
  many.world_size = kMaxWorldSize;
  many.mesh[0].size = kMaxWorldSize;
  for (int i = 0; i < 300; ++i) {
    many.parameters.push_back(
        {.name = std::to_string(i), .shape = {1}, .placements = {kReplicate}});
  }
  ExpectInvalid(many);
  EXPECT_TRUE(Layout::CreateForRanks(many, {0, 7, kMaxWorldSize - 1}).ok());
}

// Each replica of two nodes owns about half, whichever parameters are large.
TEST(MeshLayout, ReplicasOwnAboutAsMuch) {
  LayoutSpec spec = {.world_size = 4, .mesh = {{"replicate", 2}, {"shard", 2}}};
  const auto add = [&](int64_t rows, std::vector<Placement> placements, bool trainable = true) {
    spec.parameters.push_back({.name = std::to_string(spec.parameters.size()),
                               .shape = {rows},
                               .trainable = trainable,
                               .placements = std::move(placements)});
  };
  add(100, {kReplicate, kShard0});
  add(1, {kReplicate, kShard0});
  add(900, {kReplicate, kShard0}, /*trainable=*/false);
  add(60, {kReplicate, kShard0});
  add(50, {kReplicate, kShard0});
  add(7, {kReplicate, kReplicate});  // These count only for each other.
  add(20, {kReplicate, kShard0});
  add(6, {kReplicate, kReplicate});
  add(11, {kShard0, kReplicate});
  EXPECT_THAT(*OwningReplicas(spec), ElementsAre(0, 1, 0, 1, 1, 0, 0, 1, 0));
  const Layout layout = Layout::Create(spec).value();
  EXPECT_THAT(layout.ChunksOfParameter(0), ElementsAre(0, 1));  // Of ranks 0 and 1.
  EXPECT_THAT(layout.ChunksOfParameter(3), ElementsAre(2, 3));
  EXPECT_THAT(layout.ChunksOfParameter(5), ElementsAre(0));
  EXPECT_THAT(layout.ChunksOfParameter(7), ElementsAre(1));
  // Whoever has a part of the layout finds the same owners.
  const Layout part = Layout::CreateForRanks(spec, {1, 2}).value();
  EXPECT_THAT(part.ChunksOfParameter(3), ElementsAre(1));
  EXPECT_THAT(part.ChunksOfParameter(7), ElementsAre(0));
}

// 2^16 ranks in 16 dimensions: some hundred parameters, each over dimensions of its own, have
// millions of replicas.
TEST(MeshLayout, HasAMostOfReplicas) {
  constexpr int kDims = 16;
  LayoutSpec spec = {.world_size = 1 << kDims};
  for (int m = 0; m < kDims; ++m) spec.mesh.push_back({std::to_string(m), 2});
  for (int a = 0; a < kDims; ++a) {
    for (int b = a + 1; b < kDims; ++b) {
      for (int c = b + 1; c < kDims; ++c) {
        std::vector<Placement> placements(kDims);
        placements[a] = placements[b] = placements[c] = kShard0;
        spec.parameters.push_back(
            {.name = absl::StrCat(a, ".", b, ".", c), .shape = {8}, .placements = placements});
      }
    }
  }
  EXPECT_TRUE(Refused(Layout::CreateForRanks(spec, {0}), absl::StatusCode::kInvalidArgument));
  spec.parameters.resize(500);
  EXPECT_TRUE(Layout::CreateForRanks(spec, {0}).ok());
}

TEST(MeshLayout, NamesTheFirstDifference) {
  EXPECT_EQ(FirstDifference(Spec(), Spec()), "");
  LayoutSpec mesh = Spec();
  mesh.mesh[0].name = "tp";
  EXPECT_TRUE(Says(FirstDifference(Spec(), mesh)));
  LayoutSpec placement = Spec();
  placement.parameters[2].placements = {kShard0};
  EXPECT_TRUE(Says(FirstDifference(Spec(), placement)));
  // A frozen parameter is nowhere.
  LayoutSpec frozen = Spec();
  frozen.parameters[3].placements = {kReplicate};
  EXPECT_EQ(FirstDifference(Spec(), frozen), "");
}

}  // namespace
}  // namespace ballast
