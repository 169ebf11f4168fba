// The index of a checkpoint: index.json, which says what the checkpoint is, and names its files with
// their checksums. It is written last, and has a checksum of its own.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_STATE_CHECKPOINT_INDEX_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_STATE_CHECKPOINT_INDEX_H_

#include <cstdint>
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
  struct File {
    Plane plane = Plane::kMaster;
    std::string name;  // In the checkpoint's directory.
    WrittenFile written;
  };
  std::string job;
  std::string uid;
  uint64_t step = 0;
  // Of the job when it was saved; 0 in older checkpoints, as the next two.
  uint64_t generation = 0;
  int64_t saved_unix_ms = 0;  // When the save began.
  bool asked_for = false;     // A user asked for the save; else the service made it by itself.
  std::string trainer_state;  // Any bytes.
  // Of `step`, without its counts of speculation; hyper-parameters and multipliers in the order of
  // `groups`. Absent before the first step, and, as the trainer's state, in older checkpoints; its
  // multipliers and what was voted are absent in some that have it.
  std::optional<StepRecord> last_step;
  std::vector<Group> groups;
  std::vector<Parameter> parameters;
  std::vector<File> files;
  std::string sha256;  // Of an index that was read, its own.
};

std::string IndexPath(const std::string& directory);

// The planes that a checkpoint has, and the parameters, by index, that have a plane.
std::vector<Plane> PlanesOf(const CheckpointIndex& index);
std::vector<int> ParametersWith(const CheckpointIndex& index, Plane plane);

// A file that is to be written: whole tensors of a plane, in order. A new one begins where one has
// `most_bytes`, so that several threads write and none has much more to do than the others.
struct CheckpointPart {
  Plane plane = Plane::kMaster;
  std::string name;  // master.safetensors, or master-00001-of-00003.safetensors.
  std::vector<int> parameters;
  int64_t bytes = 0;
};
inline constexpr int64_t kPartBytes = int64_t{1} << 30;
std::vector<CheckpointPart> PartsOf(const CheckpointIndex& index, int64_t most_bytes = kPartBytes);

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
  uint64_t generation = 0;
  int64_t saved_unix_ms = 0;
  int64_t size_bytes = 0;  // Of all files but the index; 0 in older checkpoints.
  bool asked_for = false;
};
// As ReadIndex, for less, and without the checksum.
absl::StatusOr<CheckpointFacts> ReadCheckpointFacts(FileSystem& file_system,
                                                    const std::string& directory,
                                                    int64_t most_bytes);

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_STATE_CHECKPOINT_INDEX_H_
