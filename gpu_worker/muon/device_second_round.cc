#include "gpu_worker/muon/device_second_round.h"

#include <algorithm>

#include "cpu_optimizer_service/common/status.h"

namespace ballast::worker {

absl::StatusOr<std::unique_ptr<DeviceSecondRound>> DeviceSecondRound::Create(
    Device& device, DeviceMatmul& matmul, DeviceCollective& collective, const TrainingJob& job) {
  auto made = std::unique_ptr<DeviceSecondRound>(new DeviceSecondRound(collective, job));
  BALLAST_RETURN_IF_ERROR(made->Init(device, matmul));
  return made;
}

absl::Status DeviceSecondRound::Init(Device& device, DeviceMatmul& matmul) {
  int64_t slot = 0;
  std::vector<MatrixShape> shapes;
  for (const MatrixTurn& turn : turns_) {
    slot = std::max(slot, turn.slot_elements);
    for (const int matrix : turn.matrices) shapes.push_back(ShapeOf(job_, matrix));
  }
  BALLAST_ASSIGN_OR_RETURN(memory_, device.AllocateHost(places_.size_bytes(), "directions"));
  BALLAST_ASSIGN_OR_RETURN(
      gathered_, device.Allocate(collective_.world_size() * slot * ChunkPlaces::kElementBytes,
                                 "matrices that ranks exchange"));
  BALLAST_ASSIGN_OR_RETURN(newton_schulz_, DeviceNewtonSchulz::Create(device, matmul, shapes));
  BALLAST_ASSIGN_OR_RETURN(done_, device.CreateEvent());
  return absl::OkStatus();
}

absl::Status DeviceSecondRound::Run(DeviceStream& stream, uint64_t step,
                                    absl::Span<const HyperParameters> values) {
  for (const MatrixTurn& turn : turns_) {
    BALLAST_RETURN_IF_ERROR(TakeTurn(stream, step, turn, values));
  }
  BALLAST_RETURN_IF_ERROR(stream.Record(*done_));
  // The collective first: where it was aborted, the event comes as well.
  BALLAST_RETURN_IF_ERROR(collective_.Finish());
  return done_->Synchronize();
}

absl::Status DeviceSecondRound::TakeTurn(DeviceStream& stream, uint64_t step,
                                         const MatrixTurn& turn,
                                         absl::Span<const HyperParameters> values) {
  const int rank = collective_.rank();
  for (const MatrixTurn::Piece& piece : turn.pieces_of_rank[rank]) {
    BALLAST_RETURN_IF_ERROR(stream.CopyToDevice(At(turn, rank, piece.slot_offset), On(piece)));
  }
  BALLAST_RETURN_IF_ERROR(Gather(stream, step, turn));
  if (!values.empty() && rank < static_cast<int>(turn.matrices.size())) {
    BALLAST_RETURN_IF_ERROR(Make(stream, turn, values));
  }
  BALLAST_RETURN_IF_ERROR(Gather(stream, step, turn));
  for (const MatrixTurn::Piece& piece : turn.pieces_of_rank[rank]) {
    BALLAST_RETURN_IF_ERROR(
        stream.CopyToHost(On(piece), At(turn, piece.turn_index, piece.matrix_offset)));
  }
  return absl::OkStatus();
}

absl::Status DeviceSecondRound::Gather(DeviceStream& stream, uint64_t step,
                                       const MatrixTurn& turn) {
  return collective_.AllGather(stream, At(turn, collective_.rank(), 0), gathered_->data(),
                               turn.slot_elements * ChunkPlaces::kElementBytes,
                               {.step = step, .bucket = -1});
}

absl::Status DeviceSecondRound::Make(DeviceStream& stream, const MatrixTurn& turn,
                                     absl::Span<const HyperParameters> values) {
  const int rank = collective_.rank();
  const int matrix = turn.matrices[rank];
  for (int from = 0; from < collective_.world_size(); ++from) {
    for (const MatrixTurn::Piece& piece : turn.pieces_of_rank[from]) {
      if (piece.turn_index != rank) continue;
      BALLAST_RETURN_IF_ERROR(stream.CopyOnDevice(newton_schulz_->direction() + piece.matrix_offset,
                                                  At(turn, from, piece.slot_offset),
                                                  piece.elements * ChunkPlaces::kElementBytes));
    }
  }
  const MatrixShape shape = ShapeOf(job_, matrix);
  BALLAST_ASSIGN_OR_RETURN(
      const BFloat16Bits* const orthogonal,
      newton_schulz_->Run(stream, shape, values[job_.layout.spec().parameters[matrix].group]));
  return stream.CopyOnDevice(At(turn, rank, 0), orthogonal,
                             shape.rows * shape.columns * ChunkPlaces::kElementBytes);
}

}  // namespace ballast::worker
