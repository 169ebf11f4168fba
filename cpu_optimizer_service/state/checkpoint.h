// A checkpoint: a directory with one safetensors file per plane (master.safetensors,
// exp_avg.safetensors, exp_avg_sq.safetensors, and max_exp_avg_sq.safetensors if a group has
// amsgrad) and index.json, which holds the step, the groups' hyper-parameters, the parameters'
// shapes and update counts, the trainer's state, the record of the last step, and the size and
// SHA-256 of every file. Tensors are logical, by parameter name: they load onto any world size.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_STATE_CHECKPOINT_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_STATE_CHECKPOINT_H_

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "cpu_optimizer_service/common/hyper_parameters.h"
#include "cpu_optimizer_service/common/step_record.h"
#include "cpu_optimizer_service/host/file_system.h"
#include "cpu_optimizer_service/state/chunk_store.h"
#include "cpu_optimizer_service/state/safetensors.h"

namespace ballast {

struct CheckpointIndex {
  struct Group {
    std::string name;
    HyperParameters hyper_parameters;
  };
  struct Parameter {  // Trainable ones only; frozen ones have no state.
    std::string name;
    std::vector<int64_t> shape;
    std::string group;
    int64_t elements = 0;
    int64_t update_count = 0;
  };
  std::string job;
  std::string uid;
  uint64_t step = 0;
  std::string trainer_state;  // Any bytes.
  // Of `step`, without its multipliers and counts of speculation; hyper-parameters in the order of
  // `groups`. Absent before the first step, and, as the trainer's state, in older checkpoints.
  std::optional<StepRecord> last_step;
  std::vector<Group> groups;
  std::vector<Parameter> parameters;
};

// Fills elements [offset, offset + out.size()) of a plane of parameters[parameter].
using PlaneReader =
    absl::FunctionRef<void(int parameter, Plane plane, int64_t offset, absl::Span<float> out)>;

// Writes `directory` whole or not at all, replacing an older checkpoint there; FAILED_PRECONDITION
// if something else is there. Returns the bytes written.
absl::StatusOr<int64_t> WriteCheckpoint(FileSystem& file_system, const std::string& directory,
                                        const CheckpointIndex& index, PlaneReader read);

class Checkpoint {
 public:
  // Reads the index and checks every file against it. NOT_FOUND: no checkpoint there. DATA_LOSS:
  // damaged.
  static absl::StatusOr<Checkpoint> Open(FileSystem& file_system, const std::string& directory);

  const CheckpointIndex& index() const { return index_; }
  absl::Status Read(const std::string& parameter, Plane plane, int64_t offset,
                    absl::Span<float> out) const;

 private:
  CheckpointIndex index_;
  std::map<Plane, SafetensorsFile> files_;
};

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_STATE_CHECKPOINT_H_
