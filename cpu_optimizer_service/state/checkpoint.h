// A checkpoint: a directory with one safetensors file per plane (master.safetensors,
// exp_avg.safetensors, exp_avg_sq.safetensors, and max_exp_avg_sq.safetensors if a group has
// amsgrad) and index.json, which holds the step, the groups' hyper-parameters, the parameters'
// shapes and update counts, the trainer's state, the record of the last step, and the size and
// SHA-256 of every file. Tensors are logical, by parameter name: they load onto any world size.
//
// Here it is read; checkpoint_writer.h writes one.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_STATE_CHECKPOINT_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_STATE_CHECKPOINT_H_

#include <cstdint>
#include <map>
#include <string>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "cpu_optimizer_service/host/file_system.h"
#include "cpu_optimizer_service/state/checkpoint_index.h"
#include "cpu_optimizer_service/state/chunk_store.h"
#include "cpu_optimizer_service/state/safetensors.h"

namespace ballast {

class Checkpoint {
 public:
  // Reads the index and checks every file against it: checksums, and that all values are finite and
  // none of exp_avg_sq negative. `most_bytes`: of the index, and of each file's header
  // (MostIndexBytes). NOT_FOUND: no checkpoint there. DATA_LOSS: damaged. UNAVAILABLE: saves
  // replaced it while it was read, again and again.
  static absl::StatusOr<Checkpoint> Open(FileSystem& file_system, const std::string& directory,
                                         int64_t most_bytes);

  const CheckpointIndex& index() const { return index_; }
  absl::Status Read(const std::string& parameter, Plane plane, int64_t offset,
                    absl::Span<float> out) const;

 private:
  absl::Status Open(FileSystem& file_system, const std::string& directory, Plane plane,
                    int64_t most_bytes);

  CheckpointIndex index_;
  std::map<Plane, SafetensorsFile> files_;
};

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_STATE_CHECKPOINT_H_
