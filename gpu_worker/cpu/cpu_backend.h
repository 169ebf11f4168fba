// The CPU as a TrainingBackend: the model in this process, its buckets reduced over the host's
// collective on a thread of their own while backward goes on, and this rank's gradients staged in
// the wire dtype, in the optimizer's memory where it gives some.
//
//   CpuBackend backend({.accumulation = ..., .timeout = ...}, MakeCpuGpt(config), job, collective);
//
// Threads and errors: backend.h. The sink is called from the reducer's thread during MicroStep, and
// from the caller's at its end. Between the start and the end of MicroStep and of GatherWeights the
// collective belongs to the backend.
#ifndef BALLAST_GPU_WORKER_CPU_CPU_BACKEND_H_
#define BALLAST_GPU_WORKER_CPU_CPU_BACKEND_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "gpu_worker/base/timeline.h"
#include "gpu_worker/buckets/bucket_reducer.h"
#include "gpu_worker/buckets/gradient_staging.h"
#include "gpu_worker/collective/collective.h"
#include "gpu_worker/training/backend.h"
#include "gpu_worker/training/model.h"
#include "gpu_worker/training/training_job.h"

namespace ballast::worker {

struct CpuBackendOptions {
  Accumulation accumulation = Accumulation::kService;
  // Searches this rank's own gradients for non-finite elements before the reduction.
  bool check_gradients = false;
  // How long a gradient waits for the optimizer to release the previous one.
  absl::Duration timeout = absl::Minutes(10);
  Timeline* timeline = nullptr;  // Nullable.
};

class CpuBackend final : public TrainingBackend {
 public:
  // Places `model`. `job` and `collective` are borrowed until destruction. Outlives the optimizer
  // that its payloads are pushed to.
  CpuBackend(const CpuBackendOptions& options, std::unique_ptr<Model> model, const TrainingJob& job,
             Collective& collective);

  void Start(GradientSink& sink) override { sink_ = &sink; }
  absl::Status UseGradientMemory(
      const std::function<absl::Span<std::byte>(int chunk)>& memory) override;
  absl::Status MicroStep(const MicroStepInput& input) override;
  absl::StatusOr<FinishedStep> FinishStep() override;
  absl::Span<std::byte> weights(int chunk) override;
  absl::Status GatherWeights() override;
  SecondRound* second_round() override { return second_round_.get(); }
  absl::Status ReadWeights(int group, absl::Span<std::byte> to) override;

 private:
  void HandOver(const ReducedGradient& gradient);
  absl::Status PushChunks(const ReducedGradient& gradient);
  absl::Status EndMicroStep(uint32_t micro_step, ReducedMicroStep reduced);
  void NoteReduced(int bucket, double seconds);
  absl::Span<std::byte> WeightBytes(int group, int64_t begin, int64_t elements);

  const TrainingJob& job_;
  Collective& collective_;
  const std::unique_ptr<Model> model_;
  GradientStaging staging_;
  const std::unique_ptr<SecondRound> second_round_;  // Nullable.
  GradientSink* sink_ = nullptr;
  // The sink's first error, or that backward reached no parameter: kept for FinishStep, and the
  // sink is not called after it. Used by the reducer's thread during a micro-step, by the caller's
  // otherwise.
  absl::Status step_error_;
  absl::Status failure_;  // The collective's: permanent.
  FinishedStep step_;     // In progress.
  Timeline* const timeline_;
  uint64_t step_number_ = 0;  // For the timeline.
  BucketReducer reducer_;     // Last: its thread uses the others.
};

}  // namespace ballast::worker

#endif  // BALLAST_GPU_WORKER_CPU_CPU_BACKEND_H_
