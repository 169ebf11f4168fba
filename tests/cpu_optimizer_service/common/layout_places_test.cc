// Layouts of random parameters, cut into random partitions of flat spaces, or over random meshes.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "cpu_optimizer_service/common/layout.h"
#include "tests/support/random_layout.h"
#include "tests/support/sanitizers.h"

namespace ballast {
namespace {

constexpr int kParameters = kRandomParameters;

TEST(LayoutPlaces, EveryElementHasOneThatEveryQuestionAgreesOn) {
  std::mt19937 random(7);
  int packed_pieces = 0;
  for (int turn = 0; turn < Repeats(200); ++turn) {
    const LayoutSpec spec = RandomLayout(random, /*has_mesh=*/turn % 2 == 0);
    const Layout layout = Layout::Create(spec).value();
    std::map<std::pair<int, int64_t>, std::pair<int, int64_t>> places;  // In a chunk, by element.
    int64_t covered = 0;
    for (int chunk = 0; chunk < static_cast<int>(layout.chunks().size()); ++chunk) {
      int64_t next = 0;
      layout.VisitPieces(chunk, [&](const ChunkPiece& piece) {
        ASSERT_GE(piece.chunk_offset, next);
        next = piece.chunk_offset + piece.elements;
        ASSERT_EQ(layout.chunks()[chunk].format, layout.format(piece.parameter));
        if (layout.format(piece.parameter) != StateFormat::kFloat32) {
          ++packed_pieces;
          ASSERT_EQ(piece.parameter_offset % kPackedGroup, 0);
          ASSERT_EQ(piece.chunk_offset % kPackedGroup, 0);
          const int64_t end = piece.parameter_offset + piece.elements;
          ASSERT_TRUE(end % kPackedGroup == 0 || end == layout.place(piece.parameter).elements);
        }
        for (int64_t i = 0; i < piece.elements; ++i) {
          ASSERT_TRUE(places
                          .emplace(std::pair(piece.parameter, piece.parameter_offset + i),
                                   std::pair(chunk, piece.chunk_offset + i))
                          .second);
        }
        covered += piece.elements;
        if (!layout.has_mesh()) {
          const int64_t flat = layout.chunks()[chunk].begin + piece.chunk_offset;
          ASSERT_EQ(flat, layout.place(piece.parameter).offset + piece.parameter_offset);
          ASSERT_EQ(layout.ChunkAt(layout.chunks()[chunk].group, flat), chunk);
          ASSERT_EQ(layout.ParameterAt(layout.chunks()[chunk].group, flat), piece.parameter);
        }
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
    ASSERT_EQ(covered, layout.total_elements());
    int64_t elements = 0;
    for (int p = 0; p < kParameters; ++p) {
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
  EXPECT_GT(packed_pieces, Repeats(1000));
}

// A chunk of `part` has the place, owner and pieces of chunk `same` of `whole`.
void ExpectSame(const Layout& part, int chunk, const Layout& whole, int same) {
  const Chunk& of = part.chunks()[chunk];
  const Chunk& expected = whole.chunks()[same];
  ASSERT_EQ(std::tuple(of.rank, of.group, of.begin, of.elements),
            std::tuple(expected.rank, expected.group, expected.begin, expected.elements));
  const std::vector<ChunkPiece> pieces = part.Pieces(chunk);
  const std::vector<ChunkPiece> expected_pieces = whole.Pieces(same);
  ASSERT_EQ(pieces.size(), expected_pieces.size());
  for (size_t i = 0; i < pieces.size(); ++i) {
    ASSERT_EQ(pieces[i].chunk, chunk);
    ASSERT_EQ(std::tuple(pieces[i].parameter, pieces[i].parameter_offset, pieces[i].chunk_offset,
                         pieces[i].elements),
              std::tuple(expected_pieces[i].parameter, expected_pieces[i].parameter_offset,
                         expected_pieces[i].chunk_offset, expected_pieces[i].elements));
  }
  ASSERT_EQ(part.padding_of(chunk).size(), whole.padding_of(same).size());
}

TEST(LayoutPlaces, OfSomeRanksAreThoseInTheWhole) {
  std::mt19937 random(8);
  for (int turn = 0; turn < 200; ++turn) {
    const LayoutSpec spec = RandomLayout(random, /*has_mesh=*/turn % 2 == 0);
    const Layout whole = Layout::Create(spec).value();
    std::vector<int> ranks;
    for (int rank = 0; rank < spec.world_size; ++rank) {
      if (random() % 2 == 0) ranks.push_back(rank);
    }
    const Layout part = Layout::CreateForRanks(spec, ranks).value();
    ASSERT_EQ(part.ranks(), ranks);
    std::vector<int> in_part(whole.chunks().size(), -1);  // By chunk of the whole.
    int next = 0;
    for (int rank = 0; rank < spec.world_size; ++rank) {
      const bool here = std::ranges::count(ranks, rank) > 0;
      ASSERT_EQ(part.has_rank(rank), here);
      ASSERT_EQ(part.chunks_of_rank(rank).size(), here ? whole.chunks_of_rank(rank).size() : 0u);
      for (const int chunk : part.chunks_of_rank(rank)) {
        ASSERT_EQ(chunk, next++);
        const int same = whole.first_of_rank(rank) + chunk - part.first_of_rank(rank);
        in_part[same] = chunk;
        ExpectSame(part, chunk, whole, same);
      }
    }
    ASSERT_EQ(static_cast<int>(part.chunks().size()), next);
    for (int p = 0; p < kParameters; ++p) {
      std::vector<int> chunks;
      for (const int chunk : whole.ChunksOfParameter(p)) {
        if (in_part[chunk] >= 0) chunks.push_back(in_part[chunk]);
      }
      ASSERT_EQ(part.ChunksOfParameter(p), chunks);
      const int64_t size = whole.place(p).elements;
      ElementRange here = {size, 0};
      part.VisitRange(p, 0, size, [&](const ChunkPiece& piece) {
        here = {std::min(here.begin, piece.parameter_offset),
                std::max(here.end, piece.parameter_offset + piece.elements)};
      });
      if (here.end == 0) here = {};
      ASSERT_EQ(part.RangeOfParameter(p).begin, here.begin);
      ASSERT_EQ(part.RangeOfParameter(p).end, here.end);
      const int64_t begin = random() % (size + 1);
      const int64_t end = begin + random() % (size - begin + 1);
      using Place = std::tuple<int, int64_t, int64_t, int64_t>;
      std::vector<Place> expected;
      whole.VisitRange(p, begin, end, [&](const ChunkPiece& piece) {
        if (in_part[piece.chunk] < 0) return;
        expected.emplace_back(in_part[piece.chunk], piece.parameter_offset, piece.chunk_offset,
                              piece.elements);
      });
      std::vector<Place> visited;
      part.VisitRange(p, begin, end, [&](const ChunkPiece& piece) {
        visited.emplace_back(piece.chunk, piece.parameter_offset, piece.chunk_offset,
                             piece.elements);
      });
      ASSERT_EQ(visited, expected);
    }
  }
}

}  // namespace
}  // namespace ballast
