// The update of one chunk: runs of parameters with equal update counts, from one slot to another.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_JOB_STEP_CHUNK_UPDATE_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_JOB_STEP_CHUNK_UPDATE_H_

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/types/span.h"
#include "cpu_optimizer_service/common/dtype.h"
#include "cpu_optimizer_service/common/hyper_parameters.h"
#include "cpu_optimizer_service/common/layout.h"
#include "cpu_optimizer_service/common/packed/slot.h"
#include "cpu_optimizer_service/common/rule.h"
#include "cpu_optimizer_service/common/state_bounds.h"
#include "cpu_optimizer_service/gradients/gradient_store.h"
#include "cpu_optimizer_service/kernels/redo_lane.h"
#include "cpu_optimizer_service/state/chunk_store.h"

namespace ballast {

// The input of any chunk's update in a step, besides its gradient.
struct StepUpdate {
  uint64_t step = 0;
  std::vector<HyperParameters> hyper_parameters;  // By group.
  std::vector<float> multipliers;                 // By group.
  std::vector<int64_t> update_counts;             // By parameter, of this update; 0: no change.
  bool has_second_round = false;                  // It changes a parameter of a rule with two.
};

struct ChunkUpdate {
  const Layout* layout = nullptr;
  int chunk = 0;
  GradientView gradient;
  Slot from;
  Slot to;
  const HyperParameters* hyper_parameters = nullptr;
  float multiplier = 1;
  // In the second round the gradient is what became of the direction. The update is in place, and a
  // count of 0 leaves a matrix as it is.
  Round round = Round::kFirst;
  void* shard = nullptr;  // chunk.elements elements of shard_dtype. May be null.
  DType shard_dtype = DType::kBFloat16;
  // For an update in place: elements [0, done) are already new, and the rest is recorded here
  // (kernels/redo_lane.h). Null: no record.
  RedoLane* redo = nullptr;
  int64_t done = 0;
};

// `update_count_of(parameter)` is the number of the parameter's update now, from 1. 0: the
// parameter does not change (it is only copied, and returned). Padding is never updated.
void UpdateChunk(const ChunkUpdate& update,
                 absl::FunctionRef<int64_t(int parameter)> update_count_of);

// Of a rule of two rounds: the directions of the first round, in bf16, from its gradient and the state
// after it. Zeros for parameters with the count 0, and in the padding.
void MakeDirections(const ChunkUpdate& update,
                    absl::FunctionRef<int64_t(int parameter)> update_count_of,
                    absl::Span<uint16_t> directions);

// The planes that an update writes, in their order in its redo record.
std::vector<Plane> PlanesWritten(const HyperParameters& values, Round round);

// The chunk's state after UpdateChunk, without writing it: `to` and `shard` are ignored.
struct TrialUpdate {
  StateBounds largest;  // If there is no `non_finite`: of each plane, exactly in fp32.
  struct NonFinite {
    Plane plane = Plane::kMaster;
    int64_t element = 0;  // In the chunk.
    float value = 0;
  };
  std::optional<NonFinite> non_finite;  // One in the first run of elements with any.
};
TrialUpdate TryUpdateChunk(const ChunkUpdate& update,
                           absl::FunctionRef<int64_t(int parameter)> update_count_of);

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_JOB_STEP_CHUNK_UPDATE_H_
