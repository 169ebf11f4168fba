// The update of one chunk: runs of parameters with equal update counts, from one slot to another.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_JOB_STEP_CHUNK_UPDATE_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_JOB_STEP_CHUNK_UPDATE_H_

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/types/span.h"
#include "cpu_optimizer_service/common/adam.h"
#include "cpu_optimizer_service/common/dtype.h"
#include "cpu_optimizer_service/common/hyper_parameters.h"
#include "cpu_optimizer_service/common/layout.h"
#include "cpu_optimizer_service/common/state_bounds.h"
#include "cpu_optimizer_service/gradients/gradient_store.h"
#include "cpu_optimizer_service/kernels/adam_redo.h"
#include "cpu_optimizer_service/state/chunk_store.h"

namespace ballast {

// What the update of any chunk in a step needs, besides its gradient.
struct StepUpdate {
  uint64_t step = 0;
  std::vector<HyperParameters> hyper_parameters;  // By group.
  std::vector<float> multipliers;                 // By group.
  std::vector<int64_t> update_counts;  // By parameter, of this update; 0: it is left as it is.
};

struct ChunkUpdate {
  const Layout* layout = nullptr;
  int chunk = 0;
  GradientView gradient;
  Slot from;
  Slot to;
  const HyperParameters* hyper_parameters = nullptr;
  float multiplier = 1;
  void* shard = nullptr;  // chunk.elements elements of shard_dtype. Nullable: not wanted.
  DType shard_dtype = DType::kBFloat16;
  // Of an update in place: elements [0, done) are new already, and what follows is recorded here
  // (kernels/adam_redo.h). Null: nothing is recorded.
  RedoLane* redo = nullptr;
  int64_t done = 0;
};

// `update_count_of(parameter)` is the number of the update that the parameter gets now, from 1; 0
// leaves it as it is (it is only copied, and returned). Padding is never updated.
void UpdateChunk(const ChunkUpdate& update,
                 absl::FunctionRef<int64_t(int parameter)> update_count_of);

// What UpdateChunk would leave in the chunk. Nothing is written: `to` and `shard` are not looked at.
struct TrialUpdate {
  StateBounds largest;  // Of each plane, exactly, if all of it is finite.
  struct NonFinite {
    Plane plane = Plane::kMaster;
    int64_t element = 0;  // Of the chunk.
    float value = 0;
  };
  std::optional<NonFinite> non_finite;  // One in the first stretch of elements that has any.
};
TrialUpdate TryUpdateChunk(const ChunkUpdate& update,
                           absl::FunctionRef<int64_t(int parameter)> update_count_of);

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_JOB_STEP_CHUNK_UPDATE_H_
