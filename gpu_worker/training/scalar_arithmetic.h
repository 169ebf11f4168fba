// The local optimizer's arithmetic with the scalar references, which the service, and a GPU, must
// equal bit for bit. It is simple, not fast.
#ifndef BALLAST_GPU_WORKER_TRAINING_SCALAR_ARITHMETIC_H_
#define BALLAST_GPU_WORKER_TRAINING_SCALAR_ARITHMETIC_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "cpu_optimizer_service/common/job_spec.h"
#include "cpu_optimizer_service/common/layout.h"
#include "gpu_worker/training/local_arithmetic.h"
#include "gpu_worker/training/optimizer.h"

namespace ballast::worker {

class ScalarArithmetic final : public LocalArithmetic {
 public:
  // Only the groups' dtypes are used. `layout` is borrowed until destruction.
  ScalarArithmetic(const std::vector<GroupSpec>& groups, const Layout& layout, WeightsAt weights);

  absl::Status SetFirstWeights(int chunk, absl::Span<const float> values) override;
  absl::Status AddGradients(std::vector<Addition> additions) override;
  absl::Status ZeroGradient(int chunk) override;
  absl::Status BlockSums(absl::Span<const BlocksInChunks> runs, absl::Span<double> sums) override;
  absl::Status ReadGradient(int chunk, int64_t begin, absl::Span<float> values) override;
  absl::Status Update(int chunk, int64_t begin, int64_t elements,
                      const AdamScalars& scalars) override;
  absl::Status TryUpdate(int chunk, int64_t begin, int64_t elements, const AdamScalars* scalars,
                         State& state) override;
  absl::Status Finish() override { return absl::OkStatus(); }

 private:
  struct DTypes {
    DType wire;
    DType weights;
  };
  struct ChunkState {
    std::vector<float> gradient;  // The sum of the step so far.
    std::vector<float> master;
    std::vector<float> exp_avg;
    std::vector<float> exp_avg_sq;
  };
  // Calls visit(chunk, first element in it, elements) for the parts of a run.
  template <typename Visit>
  void VisitRun(int chunk, int64_t begin, int64_t elements, Visit&& visit) const;
  void UpdateInChunk(int chunk, int64_t begin, int64_t elements, const AdamScalars& scalars);
  const DTypes& dtypes(int chunk) const { return dtypes_[layout_.chunks()[chunk].group]; }

  const Layout& layout_;
  const WeightsAt weights_;
  std::vector<DTypes> dtypes_;      // By group.
  std::vector<ChunkState> chunks_;  // By chunk; empty for those that were never given weights.
};

}  // namespace ballast::worker

#endif  // BALLAST_GPU_WORKER_TRAINING_SCALAR_ARITHMETIC_H_
