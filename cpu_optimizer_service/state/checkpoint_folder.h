// A folder of checkpoints, such as DIR/JOB: each is a directory in it, of a name as
// common/text/checkpoint_name.h has them. None ever takes another's place.
//
//   DIR/gpt/step-1000.1/index.json, master.safetensors, ...
//   DIR/gpt/step-2000.1/
//   DIR/gpt/step-3000.1.partial-4a5b...   being written, or left by a process that was killed
//   DIR/gpt/latest                        "step-2000.1": a hint for people, which nothing here reads
//
// Before there were versions, DIR/JOB was itself a checkpoint; such a one counts as the oldest.
//
// Thread-safe, as the disk is: others may write and delete there meanwhile.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_STATE_CHECKPOINT_FOLDER_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_STATE_CHECKPOINT_FOLDER_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "cpu_optimizer_service/host/file_system.h"
#include "cpu_optimizer_service/state/checkpoint_index.h"
#include "cpu_optimizer_service/state/checkpoint_uses.h"

namespace ballast {

// VERSION.partial-RANDOM: a checkpoint that is being written or deleted.
inline constexpr char kPartialSuffix[] = ".partial-";
// An index that is larger is not looked at where no job says how large it may be. Files there are
// the operator's own.
inline constexpr int64_t kMostForeignIndexBytes = int64_t{256} << 20;

struct FoundCheckpoint {
  CheckpointFacts facts;  // Where there is a problem, only the directory may be known.
  absl::Status problem;   // Why it cannot be loaded, as far as the index tells.
};
// What is in the folder. First the job (by uid) that saved last; of a job the newest first, by
// generation and step; at the end those of which nothing is known. NOT_FOUND: no such folder.
absl::StatusOr<std::vector<FoundCheckpoint>> ListCheckpoints(FileSystem& file_system,
                                                             const std::string& folder);
// The same of `path`, which may also be one of the checkpoints in a folder, or FOLDER/step-STEP: all
// of that step. NOT_FOUND if there is none.
absl::StatusOr<std::vector<FoundCheckpoint>> FindCheckpoints(FileSystem& file_system,
                                                             const std::string& path);

// The highest saved_unix_ms there, but one less than there can be; 0: there is none.
int64_t LastSaved(FileSystem& file_system, const std::string& folder);

// Deletes the job's checkpoints but the newest `keep` of those that are `asked_for`, or of those
// that are not; and of the same step and generation all but the newest. Returns those. No error:
// what is read, or cannot be deleted, stays.
std::vector<CheckpointFacts> DeleteOlder(FileSystem& file_system, CheckpointUses& uses,
                                         const std::string& folder, const std::string& uid,
                                         bool asked_for, int keep);
// Deletes FOLDER/step-STEP.GENERATION, whatever is known against it; or of FOLDER/step-STEP those
// that were asked for. With a `uid` those of that job alone. Returns those. NOT_FOUND: there is
// none. INVALID_ARGUMENT: another path. FAILED_PRECONDITION, and nothing is deleted: one is read, or
// they are of several jobs.
absl::StatusOr<std::vector<FoundCheckpoint>> DeleteCheckpoints(FileSystem& file_system,
                                                               CheckpointUses& uses,
                                                               const std::string& path,
                                                               const std::string& uid);
// Removes what killed processes left half written or half deleted: of checkpoints, or of what is
// called `name`.
void RemoveLeftovers(FileSystem& file_system, const std::string& folder,
                     absl::string_view name = "");

// PATH.partial-RANDOM, which nobody else has.
std::string PartialPath(const std::string& path);
// The same, made and locked, so that nobody takes it for what a killed process left.
struct Partial {
  std::string path;
  std::shared_ptr<const void> lock;  // Null: nothing can be locked there, and nothing is removed.
};
absl::StatusOr<Partial> MakePartial(FileSystem& file_system, const std::string& path);

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_STATE_CHECKPOINT_FOLDER_H_
