#include "gpu_worker/muon/matrix_turns.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "gpu_worker/gpt/architecture.h"

namespace ballast::worker {
namespace {

TrainingJob JobWithMatrices(int world_size) {
  const GptConfig model = {.layers = 3, .heads = 2, .width = 32, .context = 32};
  return MakeTrainingJob(GptParameters(model), {.world_size = world_size,
                                                .rule = Rule::kMuon,
                                                .bucket_elements = 4096,
                                                .chunk_elements = 1024})
      .value();
}

TEST(MatrixTurns, EachElementTravelsOnceAndEachMatrixIsMadeOnce) {
  for (const int world_size : {1, 2, 3, 8}) {
    const TrainingJob job = JobWithMatrices(world_size);
    std::multiset<int> made;
    for (const MatrixTurn& turn : TurnsOf(job)) {
      EXPECT_LE(turn.matrices.size(), static_cast<size_t>(world_size));
      made.insert(turn.matrices.begin(), turn.matrices.end());
      std::vector<std::vector<int>> times;
      for (const int matrix : turn.matrices) {
        times.emplace_back(job.layout.place(matrix).elements, 0);
        EXPECT_LE(static_cast<int64_t>(times.back().size()), turn.slot_elements);
      }
      for (int rank = 0; rank < world_size; ++rank) {
        int64_t end = 0;
        for (const MatrixTurn::Piece& piece : turn.pieces_of_rank[rank]) {
          const Chunk& chunk = job.layout.chunks()[piece.chunk];
          EXPECT_EQ(chunk.rank, rank);
          EXPECT_LE(piece.chunk_offset + piece.elements, chunk.elements);
          EXPECT_EQ(piece.slot_offset, end) << "pieces are adjacent in the slot";
          end += piece.elements;
          for (int64_t i = 0; i < piece.elements; ++i) {
            ++times[piece.turn_index].at(piece.matrix_offset + i);
            const int64_t in_chunk = piece.chunk_offset + i;
            const ChunkPiece there = job.layout.PieceAt(piece.chunk, in_chunk);
            EXPECT_EQ(there.parameter, turn.matrices[piece.turn_index]);
            EXPECT_EQ(there.parameter_offset, piece.matrix_offset + i);
          }
        }
        EXPECT_LE(end, turn.slot_elements);
      }
      for (const std::vector<int>& of_matrix : times) {
        EXPECT_EQ(std::ranges::count(of_matrix, 1), static_cast<int64_t>(of_matrix.size()));
      }
    }
    const absl::Span<const int> all = job.layout.parameters_of_group(kMatrixGroup);
    EXPECT_EQ(all.size(), 12u);
    EXPECT_TRUE(std::ranges::equal(made, std::multiset<int>(all.begin(), all.end())));
  }
}

TEST(MatrixTurns, RanksOfATurnHaveSimilarWork) {
  const TrainingJob job = JobWithMatrices(3);
  const std::vector<MatrixTurn> turns = TurnsOf(job);
  ASSERT_EQ(turns.size(), 4u);
  // Of each block the one of 32 x 32, that of 96 x 32, and two of 128 x 32.
  std::vector<std::multiset<int64_t>> elements;
  for (const MatrixTurn& turn : turns) {
    elements.emplace_back();
    for (const int matrix : turn.matrices) {
      elements.back().insert(job.layout.place(matrix).elements);
    }
  }
  for (const int64_t of_turn : {4096, 3072, 1024}) {
    EXPECT_EQ(std::ranges::count(elements, std::multiset<int64_t>{of_turn, of_turn, of_turn}),
              of_turn == 4096 ? 2 : 1);
  }
}

TEST(MatrixTurns, AJobWithoutMuonHasNone) {
  const GptConfig model = {.layers = 1, .heads = 2, .width = 32, .context = 32};
  EXPECT_TRUE(TurnsOf(MakeTrainingJob(GptParameters(model), {}).value()).empty());
}

}  // namespace
}  // namespace ballast::worker
