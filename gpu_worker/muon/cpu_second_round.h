// The second round on the CPU, by the kernels of the service, with the same bits.
#ifndef BALLAST_GPU_WORKER_MUON_CPU_SECOND_ROUND_H_
#define BALLAST_GPU_WORKER_MUON_CPU_SECOND_ROUND_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "gpu_worker/collective/collective.h"
#include "gpu_worker/muon/chunk_places.h"
#include "gpu_worker/muon/matrix_turns.h"
#include "gpu_worker/training/second_round.h"
#include "gpu_worker/training/training_job.h"

namespace ballast::worker {

class CpuSecondRound final : public SecondRound {
 public:
  // Both are borrowed until destruction.
  CpuSecondRound(const TrainingJob& job, Collective& collective);

  absl::Span<std::byte> chunk(int index) override {
    return places_.In(absl::MakeSpan(memory_), index);
  }
  absl::Status Run(uint64_t step, absl::Span<const HyperParameters> values) override;

 private:
  absl::Status TakeTurn(const MatrixTurn& turn, absl::Span<const HyperParameters> values);
  absl::Status Gather(const MatrixTurn& turn);
  void Make(const MatrixTurn& turn, absl::Span<const HyperParameters> values);
  // From `rank`'s slot of this turn.
  std::byte* At(const MatrixTurn& turn, int rank, int64_t offset) {
    return gathered_.data() + (rank * turn.slot_elements + offset) * ChunkPlaces::kElementBytes;
  }

  struct alignas(64) Line {
    float x[16];
  };

  const TrainingJob& job_;
  Collective& collective_;
  const std::vector<MatrixTurn> turns_;
  const ChunkPlaces places_;
  std::vector<std::byte> memory_;
  std::vector<std::byte> gathered_;  // All ranks' slots.
  std::vector<Line> scratch_;
};

}  // namespace ballast::worker

#endif  // BALLAST_GPU_WORKER_MUON_CPU_SECOND_ROUND_H_
