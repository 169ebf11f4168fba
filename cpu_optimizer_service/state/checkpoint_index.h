// The index of a checkpoint: index.json, which describes the checkpoint and lists its files with
// their checksums. It is written last, and has its own checksum. Its version is a format of
// cpu_optimizer_service/README.md, "Formats".
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_STATE_CHECKPOINT_INDEX_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_STATE_CHECKPOINT_INDEX_H_

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "cpu_optimizer_service/common/hyper_parameters.h"
#include "cpu_optimizer_service/common/job_spec.h"
#include "cpu_optimizer_service/common/step_record.h"
#include "cpu_optimizer_service/host/file_system.h"
#include "cpu_optimizer_service/state/chunk_store.h"
#include "cpu_optimizer_service/state/element_runs.h"
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
    StateFormat format = StateFormat::kFloat32;
  };
  struct File {
    Plane plane = Plane::kMaster;  // Of those that are stored (packed/codes.h), as below.
    std::string name;              // In the checkpoint's directory.
    WrittenFile written;
    // By parameter: its elements in this file, if these are not all. The file has them, or their scales,
    // as a tensor of one dimension.
    std::map<std::string, ElementRuns> cut = {};
  };
  const Group* FindGroup(absl::string_view name) const;  // nullptr: it has none of that name.

  std::string job;
  std::string uid;
  uint64_t step = 0;
  uint64_t epoch = 1;  // The job's, and the count of its generation, at the save.
  uint64_t generation = 0;
  int64_t saved_unix_ms = 0;  // When the save began.
  bool asked_for = false;     // A user requested the save; false: a scheduled one.
  std::string trainer_state;  // Any bytes.
  // That of `step`, without its counts of speculation; hyper-parameters and multipliers in the
  // order of `groups`. Absent before the first step.
  std::optional<StepRecord> last_step;
  std::vector<Group> groups;
  std::vector<Parameter> parameters;
  std::vector<File> files;
  std::string sha256;  // An index that was read: its checksum.
};

std::string IndexPath(const std::string& directory);
// Whether a plane's file may have that name: master.safetensors, or master-....safetensors.
bool IsFileOf(Plane plane, absl::string_view name);

// A checkpoint's planes, and the indices of the parameters with a plane.
std::vector<Plane> PlanesOf(const CheckpointIndex& index);
std::vector<int> ParametersWith(const CheckpointIndex& index, Plane plane);
// The tensor of a plane of a parameter, whole.
TensorEntry TensorOf(const CheckpointIndex::Parameter& parameter, Plane plane);

// What one of several members holds of each parameter of an index.
struct CheckpointShare {
  int member = 0;
  std::vector<ElementRuns> held;

  bool HasAll(const CheckpointIndex& index, int parameter) const {
    return held[parameter].elements() == index.parameters[parameter].elements;
  }
};

// A file to be written: tensors of a plane, in order. A new one begins when one has `most_bytes`, so
// that several threads write about equally much. `share`: of a member; null: all of the index.
struct CheckpointPart {
  Plane plane = Plane::kMaster;
  // master.safetensors, or master-00001-of-00003.safetensors; a member's:
  // master-member-2-00001-of-00003.safetensors.
  std::string name;
  std::vector<int> parameters;
  int64_t bytes = 0;
};
inline constexpr int64_t kPartBytes = int64_t{1} << 30;
std::vector<CheckpointPart> PartsOf(const CheckpointIndex& index, int64_t most_bytes = kPartBytes,
                                    const CheckpointShare* share = nullptr);

// More than an index or a header of such a job's checkpoint needs. A larger one is another job's or
// damaged, and is not read: its text takes many times its size in memory.
int64_t MostIndexBytes(const JobSpec& spec);

// The written form, with its checksum.
std::string ToText(const CheckpointIndex& index);

// NOT_FOUND: no checkpoint there. DATA_LOSS: damaged. FAILED_PRECONDITION: larger than `most_bytes`
// or of another format. Reads only the index.
absl::StatusOr<CheckpointIndex> ReadIndex(FileSystem& file_system, const std::string& directory,
                                          int64_t most_bytes);

// A checkpoint's summary.
struct CheckpointFacts {
  std::string directory;
  std::string job;
  std::string uid;
  uint64_t step = 0;
  uint64_t epoch = 1;
  uint64_t generation = 0;
  int64_t saved_unix_ms = 0;
  int64_t size_bytes = 0;  // Of all files except the index.
  bool asked_for = false;
};
// As ReadIndex, but cheaper, and without the checksum.
absl::StatusOr<CheckpointFacts> ReadCheckpointFacts(FileSystem& file_system,
                                                    const std::string& directory,
                                                    int64_t most_bytes);

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_STATE_CHECKPOINT_INDEX_H_
