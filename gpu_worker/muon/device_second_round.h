// The second round on a device. Directions go there from the host, O comes back; between the ranks
// they travel by the device's collective.
#ifndef BALLAST_GPU_WORKER_MUON_DEVICE_SECOND_ROUND_H_
#define BALLAST_GPU_WORKER_MUON_DEVICE_SECOND_ROUND_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "cpu_optimizer_service/common/hyper_parameters.h"
#include "gpu_worker/device/device.h"
#include "gpu_worker/device/device_collective.h"
#include "gpu_worker/device/matmul.h"
#include "gpu_worker/muon/chunk_places.h"
#include "gpu_worker/muon/device_newton_schulz.h"
#include "gpu_worker/muon/matrix_turns.h"
#include "gpu_worker/training/training_job.h"

namespace ballast::worker {

class DeviceSecondRound {
 public:
  // Borrows until destruction. RESOURCE_EXHAUSTED with the sizes.
  static absl::StatusOr<std::unique_ptr<DeviceSecondRound>> Create(Device& device,
                                                                   DeviceMatmul& matmul,
                                                                   DeviceCollective& collective,
                                                                   const TrainingJob& job);

  // As in SecondRound.
  absl::Span<std::byte> chunk(int index) { return places_.In(memory_->bytes(), index); }
  // Gives the work to `stream` and waits for it.
  absl::Status Run(DeviceStream& stream, uint64_t step, absl::Span<const HyperParameters> values);

 private:
  DeviceSecondRound(DeviceCollective& collective, const TrainingJob& job)
      : collective_(collective), job_(job), turns_(TurnsOf(job)), places_(job, collective.rank()) {}
  absl::Status Init(Device& device, DeviceMatmul& matmul);
  absl::Status TakeTurn(DeviceStream& stream, uint64_t step, const MatrixTurn& turn,
                        absl::Span<const HyperParameters> values);
  absl::Status Gather(DeviceStream& stream, uint64_t step, const MatrixTurn& turn);
  absl::Status Make(DeviceStream& stream, const MatrixTurn& turn,
                    absl::Span<const HyperParameters> values);
  std::byte* At(const MatrixTurn& turn, int rank, int64_t offset) const {
    return gathered_->data() + (rank * turn.slot_elements + offset) * ChunkPlaces::kElementBytes;
  }
  absl::Span<std::byte> On(const MatrixTurn::Piece& piece) const {
    return places_.In(memory_->bytes(), piece.chunk, piece.chunk_offset, piece.elements);
  }

  DeviceCollective& collective_;
  const TrainingJob& job_;
  const std::vector<MatrixTurn> turns_;
  const ChunkPlaces places_;
  std::unique_ptr<HostMemory> memory_;
  std::unique_ptr<DeviceMemory> gathered_;  // All ranks' slots.
  std::unique_ptr<DeviceNewtonSchulz> newton_schulz_;
  std::unique_ptr<DeviceEvent> done_;
};

}  // namespace ballast::worker

#endif  // BALLAST_GPU_WORKER_MUON_DEVICE_SECOND_ROUND_H_
