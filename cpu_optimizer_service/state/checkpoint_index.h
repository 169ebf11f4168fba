// The index of a checkpoint: index.json, which says what the checkpoint is, and names the files of
// its planes with their checksums. It is written last, and has a checksum of its own.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_STATE_CHECKPOINT_INDEX_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_STATE_CHECKPOINT_INDEX_H_

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "cpu_optimizer_service/common/hyper_parameters.h"
#include "cpu_optimizer_service/common/job_spec.h"
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
  std::map<Plane, WrittenFile> files;
  std::string sha256;  // Of an index that was read, its own.
};

std::string IndexPath(const std::string& directory);
std::string PlanePath(const std::string& directory, Plane plane);

// The planes that a checkpoint has, and the parameters, by index, that have a plane.
std::vector<Plane> PlanesOf(const CheckpointIndex& index);
std::vector<int> ParametersWith(const CheckpointIndex& index, Plane plane);

// More than an index or a header of such a job's checkpoint takes. What is larger is of another job
// or damaged, and is not read: its text takes many times its size in memory.
int64_t MostIndexBytes(const JobSpec& spec);

// As it is written, with its checksum.
std::string ToText(const CheckpointIndex& index);

// NOT_FOUND: no checkpoint there. DATA_LOSS: damaged. FAILED_PRECONDITION: larger than `most_bytes`
// or of another format. Nothing but the index is looked at.
absl::StatusOr<CheckpointIndex> ReadIndex(FileSystem& file_system, const std::string& directory,
                                          int64_t most_bytes);

// What a checkpoint is, in short.
struct CheckpointFacts {
  std::string directory;
  std::string job;
  std::string uid;
  uint64_t step = 0;
};
// As ReadIndex, for less, and without the checksum.
absl::StatusOr<CheckpointFacts> ReadCheckpointFacts(FileSystem& file_system,
                                                    const std::string& directory,
                                                    int64_t most_bytes);

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_STATE_CHECKPOINT_INDEX_H_
