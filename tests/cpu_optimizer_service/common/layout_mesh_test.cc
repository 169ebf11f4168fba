// Layouts of parameters that are sharded over a mesh.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <random>
#include <string>
#include <utility>
#include <vector>

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

TEST(MeshLayout, EveryElementHasOnePlaceThatEveryQuestionAgreesOn) {
  std::mt19937 random(7);
  for (int turn = 0; turn < 200; ++turn) {
    LayoutSpec spec;
    spec.group_count = 2;
    spec.chunk_elements = 256;
    spec.world_size = 1;
    for (int m = 0; m < 1 + turn % 2; ++m) {
      spec.mesh.push_back({std::to_string(m), static_cast<int>(1 + random() % 3)});
      spec.world_size *= spec.mesh.back().size;
    }
    for (int p = 0; p < 6; ++p) {
      ParameterSpec parameter = {
          .name = std::to_string(p), .shape = {}, .group = static_cast<int>(random() % 2)};
      for (size_t d = 0; d < random() % 4; ++d) parameter.shape.push_back(random() % 20);
      for (size_t m = 0; m < spec.mesh.size(); ++m) {
        const int dims = static_cast<int>(parameter.shape.size());
        parameter.placements.push_back({.shard_dim = static_cast<int>(random() % (dims + 1)) - 1});
      }
      spec.parameters.push_back(parameter);
    }
    const Layout layout = Layout::Create(spec).value();
    std::map<std::pair<int, int64_t>, std::pair<int, int64_t>> places;  // In a chunk, by element.
    int64_t covered = 0;
    for (int chunk = 0; chunk < static_cast<int>(layout.chunks().size()); ++chunk) {
      int64_t next = 0;
      layout.VisitPieces(chunk, [&](const ChunkPiece& piece) {
        ASSERT_GE(piece.chunk_offset, next);
        next = piece.chunk_offset + piece.elements;
        for (int64_t i = 0; i < piece.elements; ++i) {
          ASSERT_TRUE(places
                          .emplace(std::pair(piece.parameter, piece.parameter_offset + i),
                                   std::pair(chunk, piece.chunk_offset + i))
                          .second);
        }
        covered += piece.elements;
        const int64_t middle = piece.elements / 2;
        const ChunkPiece at = layout.PieceAt(chunk, piece.chunk_offset + middle);
        ASSERT_EQ(at.parameter, piece.parameter);
        ASSERT_EQ(at.parameter_offset, piece.parameter_offset + middle);
      });
      ASSERT_LE(next, layout.chunks()[chunk].elements);
      for (const ChunkPiece& padding : layout.padding_of(chunk)) {
        covered += padding.elements;
        ASSERT_EQ(layout.PieceAt(chunk, padding.chunk_offset).parameter, -1);
      }
      ASSERT_EQ(layout.chunks()[chunk].elements % kShardAlignmentElements, 0);
      ASSERT_LE(layout.chunks()[chunk].elements, spec.chunk_elements);
    }
    ASSERT_EQ(covered, layout.total_flat_elements());
    int64_t elements = 0;
    for (int p = 0; p < 6; ++p) {
      const int64_t size = layout.place(p).elements;
      elements += size;
      for (int range = 0; range < 5; ++range) {
        const int64_t begin = range == 0 ? 0 : random() % (size + 1);
        const int64_t end = range == 0 ? size : begin + random() % (size - begin + 1);
        int64_t next = begin;
        layout.VisitRange(p, begin, end, [&](const ChunkPiece& piece) {
          ASSERT_EQ(piece.parameter_offset, next);
          ASSERT_GE(piece.elements, 1);
          for (int64_t i = 0; i < piece.elements; ++i, ++next) {
            ASSERT_EQ(places.at({p, next}), std::pair(piece.chunk, piece.chunk_offset + i));
          }
        });
        ASSERT_EQ(next, end);
      }
      std::vector<int> chunks;
      for (const auto& [element, place] : places) {
        if (element.first == p) chunks.push_back(place.first);
      }
      std::sort(chunks.begin(), chunks.end());
      chunks.erase(std::unique(chunks.begin(), chunks.end()), chunks.end());
      ASSERT_EQ(layout.ChunksOfParameter(p), chunks);
    }
    ASSERT_EQ(static_cast<int64_t>(places.size()), elements);
  }
}

TEST(MeshLayout, OfOneRankHasItsChunksAloneAsInTheWhole) {
  LayoutSpec spec = Spec();
  spec.world_size = 4;
  spec.mesh = {{"dp", 2}, {"tp", 2}};
  for (ParameterSpec& parameter : spec.parameters) {
    if (parameter.trainable) parameter.placements.push_back(kReplicate);
  }
  spec.parameters[0] = {.name = "rows", .shape = {101, 7}, .placements = {kShard0, kShard1}};
  spec.chunk_elements = 256;
  const Layout whole = Layout::Create(spec).value();
  for (int rank = 0; rank < 4; ++rank) {
    const Layout one = Layout::CreateForRank(spec, rank).value();
    const absl::Span<const int> chunks = whole.chunks_of_rank(rank);
    ASSERT_EQ(one.chunks().size(), chunks.size());
    for (int c = 0; c < static_cast<int>(chunks.size()); ++c) {
      EXPECT_EQ(one.chunks_of_rank(rank)[c], c);
      EXPECT_EQ(one.chunks()[c].begin, whole.chunks()[chunks[c]].begin);
      EXPECT_EQ(one.chunks()[c].elements, whole.chunks()[chunks[c]].elements);
      EXPECT_EQ(one.chunks()[c].rank, rank);
      const std::vector<ChunkPiece> pieces = one.Pieces(c);
      const std::vector<ChunkPiece> expected = whole.Pieces(chunks[c]);
      ASSERT_EQ(pieces.size(), expected.size());
      for (size_t i = 0; i < pieces.size(); ++i) {
        EXPECT_EQ(pieces[i].parameter, expected[i].parameter);
        EXPECT_EQ(pieces[i].parameter_offset, expected[i].parameter_offset);
        EXPECT_EQ(pieces[i].chunk_offset, expected[i].chunk_offset);
        EXPECT_EQ(pieces[i].elements, expected[i].elements);
        one.VisitRange(pieces[i].parameter, pieces[i].parameter_offset,
                       pieces[i].parameter_offset + pieces[i].elements,
                       [&](const ChunkPiece& piece) { EXPECT_EQ(piece.chunk, c); });
      }
    }
  }
  EXPECT_EQ(Layout::CreateForRank(spec, 4).status().code(), absl::StatusCode::kInvalidArgument);
  spec.mesh.clear();
  EXPECT_EQ(Layout::CreateForRank(spec, 0).status().code(), absl::StatusCode::kInvalidArgument);
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
  LayoutSpec many = Spec();
  many.world_size = kMaxWorldSize;
  many.mesh[0].size = kMaxWorldSize;
  for (int i = 0; i < 300; ++i) {
    many.parameters.push_back(
        {.name = std::to_string(i), .shape = {1}, .placements = {kReplicate}});
  }
  ExpectInvalid(many);
  LayoutSpec dims = Spec();
  for (int i = 0; i < 64; ++i) dims.mesh.push_back({std::to_string(i), 1});
  ExpectInvalid(dims);
}

TEST(MeshLayout, NamesTheFirstDifference) {
  const Layout layout = Layout::Create(Spec()).value();
  EXPECT_EQ(layout.FirstDifference(layout), "");
  LayoutSpec mesh = Spec();
  mesh.mesh[0].name = "tp";
  EXPECT_TRUE(Says(layout.FirstDifference(Layout::Create(mesh).value())));
  LayoutSpec placement = Spec();
  placement.parameters[2].placements = {kShard0};
  EXPECT_TRUE(Says(layout.FirstDifference(Layout::Create(placement).value())));
  // A frozen parameter is nowhere.
  LayoutSpec frozen = Spec();
  frozen.parameters[3].placements = {kReplicate};
  EXPECT_EQ(layout.FirstDifference(Layout::Create(frozen).value()), "");
}

}  // namespace
}  // namespace ballast
