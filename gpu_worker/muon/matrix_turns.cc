#include "gpu_worker/muon/matrix_turns.h"

#include <algorithm>
#include <tuple>

#include "cpu_optimizer_service/common/rule.h"

namespace ballast::worker {
namespace {

// Newton-Schulz's products take this many multiplications, but for a factor.
double CostOf(const MatrixShape& shape) {
  const auto [shorter, longer] = std::minmax(shape.rows, shape.columns);
  return static_cast<double>(shorter) * shorter * longer;
}

MatrixTurn TurnOf(const TrainingJob& job, std::vector<int> matrices) {
  MatrixTurn turn{.matrices = std::move(matrices)};
  turn.pieces_of_rank.resize(job.layout.world_size());
  std::vector<int64_t> filled(job.layout.world_size(), 0);
  for (size_t i = 0; i < turn.matrices.size(); ++i) {
    const int64_t elements = job.layout.place(turn.matrices[i]).elements;
    turn.slot_elements = std::max(turn.slot_elements, elements);
    job.layout.VisitRange(turn.matrices[i], 0, elements, [&](const ChunkPiece& piece) {
      const int rank = job.layout.chunks()[piece.chunk].rank;
      turn.pieces_of_rank[rank].push_back({.turn_index = static_cast<int>(i),
                                           .chunk = piece.chunk,
                                           .chunk_offset = piece.chunk_offset,
                                           .matrix_offset = piece.parameter_offset,
                                           .slot_offset = filled[rank],
                                           .elements = piece.elements});
      filled[rank] += piece.elements;
    });
  }
  turn.slot_elements = std::max(turn.slot_elements, *std::ranges::max_element(filled));
  return turn;
}

}  // namespace

MatrixShape ShapeOf(const TrainingJob& job, int parameter) {
  const std::vector<int64_t>& shape = job.layout.spec().parameters[parameter].shape;
  return {.rows = shape[0], .columns = shape[1]};
}

std::vector<MatrixTurn> TurnsOf(const TrainingJob& job) {
  std::vector<int> matrices;
  for (int group = 0; group < job.layout.group_count(); ++group) {
    if (!HasTwoRounds(job.spec.groups[group].hyper_parameters.rule)) continue;
    for (const int p : job.layout.parameters_of_group(group)) matrices.push_back(p);
  }
  std::ranges::sort(matrices, {}, [&](int p) { return std::tuple(-CostOf(ShapeOf(job, p)), p); });
  std::vector<MatrixTurn> turns;
  const auto ranks = static_cast<size_t>(job.layout.world_size());
  for (size_t begin = 0; begin < matrices.size(); begin += ranks) {
    const size_t end = std::min(matrices.size(), begin + ranks);
    turns.push_back(TurnOf(job, {matrices.begin() + begin, matrices.begin() + end}));
  }
  return turns;
}

}  // namespace ballast::worker
