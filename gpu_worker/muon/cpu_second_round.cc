#include "gpu_worker/muon/cpu_second_round.h"

#include <algorithm>
#include <cstring>
#include <iterator>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/rounding.h"
#include "cpu_optimizer_service/common/rules/newton_schulz.h"
#include "cpu_optimizer_service/common/status.h"
#include "cpu_optimizer_service/common/system/parallel_for.h"
#include "cpu_optimizer_service/kernels/newton_schulz.h"

namespace ballast::worker {

CpuSecondRound::CpuSecondRound(const TrainingJob& job, Collective& collective)
    : job_(job),
      collective_(collective),
      turns_(TurnsOf(job)),
      places_(job, collective.rank()),
      memory_(places_.size_bytes()) {
  int64_t slot = 0;
  int64_t scratch = 0;
  for (const MatrixTurn& turn : turns_) {
    slot = std::max(slot, turn.slot_elements);
    for (const int matrix : turn.matrices) {
      const MatrixShape shape = ShapeOf(job_, matrix);
      scratch = std::max(scratch, NewtonSchulzScratch(shape.rows, shape.columns));
    }
  }
  gathered_.resize(collective.world_size() * slot * ChunkPlaces::kElementBytes);
  scratch_.resize(DivideUp(scratch, int64_t{std::size(Line{}.x)}));
}

absl::Status CpuSecondRound::Run(uint64_t step, absl::Span<const HyperParameters> values) {
  for (const MatrixTurn& turn : turns_) {
    BALLAST_RETURN_IF_ERROR(
        Annotate(TakeTurn(turn, values), absl::StrCat("step ", step, ": matrices")));
  }
  return absl::OkStatus();
}

absl::Status CpuSecondRound::TakeTurn(const MatrixTurn& turn,
                                      absl::Span<const HyperParameters> values) {
  const int rank = collective_.rank();
  const absl::Span<std::byte> memory = absl::MakeSpan(memory_);
  for (const MatrixTurn::Piece& piece : turn.pieces_of_rank[rank]) {
    const auto from = places_.In(memory, piece.chunk, piece.chunk_offset, piece.elements);
    std::ranges::copy(from, At(turn, rank, piece.slot_offset));
  }
  BALLAST_RETURN_IF_ERROR(Gather(turn));
  if (!values.empty() && rank < static_cast<int>(turn.matrices.size())) Make(turn, values);
  BALLAST_RETURN_IF_ERROR(Gather(turn));
  for (const MatrixTurn::Piece& piece : turn.pieces_of_rank[rank]) {
    const auto to = places_.In(memory, piece.chunk, piece.chunk_offset, piece.elements);
    std::memcpy(to.data(), At(turn, piece.turn_index, piece.matrix_offset), to.size());
  }
  return absl::OkStatus();
}

absl::Status CpuSecondRound::Gather(const MatrixTurn& turn) {
  const size_t slot = turn.slot_elements * ChunkPlaces::kElementBytes;
  const auto all = absl::MakeSpan(gathered_).subspan(0, slot * collective_.world_size());
  return collective_.AllGather(all.subspan(slot * collective_.rank(), slot), all);
}

void CpuSecondRound::Make(const MatrixTurn& turn, absl::Span<const HyperParameters> values) {
  const int rank = collective_.rank();
  const int matrix = turn.matrices[rank];
  const MatrixShape shape = ShapeOf(job_, matrix);
  const NewtonSchulz newton_schulz(shape.rows, shape.columns,
                                   values[job_.layout.spec().parameters[matrix].group],
                                   {scratch_.data()->x, scratch_.size() * std::size(Line{}.x)});
  for (int from = 0; from < collective_.world_size(); ++from) {
    for (const MatrixTurn::Piece& piece : turn.pieces_of_rank[from]) {
      if (piece.turn_index != rank) continue;
      std::memcpy(newton_schulz.direction().data() + piece.matrix_offset,
                  At(turn, from, piece.slot_offset), piece.elements * ChunkPlaces::kElementBytes);
    }
  }
  for (const Loop& loop : newton_schulz.loops()) ParallelFor(loop.count, loop.body);
  const absl::Span<const uint16_t> orthogonal = newton_schulz.orthogonal();
  std::memcpy(At(turn, rank, 0), orthogonal.data(), orthogonal.size() * sizeof(uint16_t));
}

}  // namespace ballast::worker
