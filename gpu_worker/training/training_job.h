// A model's training job on the service: two param groups or three, buckets, partitions. Every rank
// computes the same from the same flags.
#ifndef BALLAST_GPU_WORKER_TRAINING_TRAINING_JOB_H_
#define BALLAST_GPU_WORKER_TRAINING_TRAINING_JOB_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "cpu_optimizer_service/common/buckets.h"
#include "cpu_optimizer_service/common/hyper_parameters.h"
#include "cpu_optimizer_service/common/job_spec.h"
#include "cpu_optimizer_service/common/layout.h"
#include "gpu_worker/gpt/architecture.h"

namespace ballast::worker {

// Indices of param groups.
inline constexpr int kDecayGroup = 0;
inline constexpr int kNoDecayGroup = 1;
inline constexpr int kMatrixGroup = 2;  // With Muon alone: the matrices of the blocks.

struct TrainingJobOptions {
  std::string name = "gpt";
  int world_size = 1;
  // Of all groups. With Muon, which takes the blocks' matrices, the others have AdamW.
  Rule rule = Rule::kAdam;
  // Who makes Newton-Schulz of Muon's directions.
  Orthogonalizer newton_schulz = Orthogonalizer::kService;
  // How the service holds the decay group's state; that of the others is in fp32.
  StateFormat state = StateFormat::kFloat32;
  double lr = 1e-3;
  double weight_decay = 0.1;               // The decay group's, and the matrices'.
  uint32_t micro_steps = 1;                // The maximal number of a step; 0: any number.
  DType wire_dtype = DType::kBFloat16;     // Gradients to the service.
  DType weights_dtype = DType::kBFloat16;  // Weights from it, and in the passes.
  UpdateMode update_mode = UpdateMode::kSpeculate;
  UnusedPolicy unused_policy = UnusedPolicy::kError;
  bool keep_previous = false;  // The service can undo the last step.
  int64_t bucket_elements = int64_t{1} << 19;
  int64_t chunk_elements = kMaxChunkElements;
};

struct TrainingJob {
  JobSpec spec;
  Layout layout;
  std::vector<Bucket> buckets;
  // The memory of each group's flat space: up to the end of its last bucket's last shard, so that
  // collectives work in place.
  std::vector<int64_t> group_elements;
};

// INVALID_ARGUMENT as Layout::Create and Validate(JobSpec).
absl::StatusOr<TrainingJob> MakeTrainingJob(absl::Span<const ModelParameter> parameters,
                                            const TrainingJobOptions& options);

// Writes the first values of elements [offset, offset + values.size()) of a parameter.
using InitialValues = std::function<void(int parameter, int64_t offset, absl::Span<float> values)>;

// First values of a chunk, zeros in the padding.
void FillInitialValues(const InitialValues& initial_values, const Layout& layout, int chunk,
                       absl::Span<float> values);

}  // namespace ballast::worker

#endif  // BALLAST_GPU_WORKER_TRAINING_TRAINING_JOB_H_
