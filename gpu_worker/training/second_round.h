// A rank's part in the second round of Muon's steps, in a job whose workers make Newton-Schulz:
//
//   session.ReadDirections(...)        // into chunk(i)
//   round.Run(step, values);           // all ranks, together
//   session.GiveOrthogonal(...)        // from chunk(i)
//
// muon/cpu_second_round.h computes on the CPU, muon/device_second_round.h on a GPU.
#ifndef BALLAST_GPU_WORKER_TRAINING_SECOND_ROUND_H_
#define BALLAST_GPU_WORKER_TRAINING_SECOND_ROUND_H_

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "cpu_optimizer_service/common/hyper_parameters.h"

namespace ballast::worker {

class SecondRound {
 public:
  virtual ~SecondRound() = default;

  // One of this rank's chunks of matrices, in bf16, on the host: its direction, then its O.
  virtual absl::Span<std::byte> chunk(int index) = 0;
  // A collective; no passes are in progress. `values`: the step's, by group. Empty on a rank that
  // has no part in the round: it helps the others, and what it makes is void. An error is permanent.
  virtual absl::Status Run(uint64_t step, absl::Span<const HyperParameters> values) = 0;
};

}  // namespace ballast::worker

#endif  // BALLAST_GPU_WORKER_TRAINING_SECOND_ROUND_H_
