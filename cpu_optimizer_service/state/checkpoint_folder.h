// A folder of checkpoints, such as DIR/JOB: each is a directory in it, named as in
// common/text/checkpoint_name.h. A checkpoint never replaces another.
//
//   DIR/gpt/step-1000.1/index.json, master.safetensors, ...
//   DIR/gpt/step-2000.1/
//   DIR/gpt/step-3000.1.partial-4a5b...   being written, or left by a killed process
//   DIR/gpt/latest                        "step-2000.1": a hint for people; no code reads it
//
// Thread-safe, as the disk is: other processes may write and delete there meanwhile.
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
// If no job gives the limit, a larger index is not read. Files there are the operator's own.
inline constexpr int64_t kMostForeignIndexBytes = int64_t{256} << 20;

struct FoundCheckpoint {
  CheckpointFacts facts;  // With a problem, perhaps only the directory is known.
  absl::Status problem;   // Why it cannot be loaded, as far as the index shows.
};
// The checkpoints in the folder. The job (by uid) that saved last comes first; within a job the
// newest by generation and step; unknown ones last. NOT_FOUND: the folder is missing.
absl::StatusOr<std::vector<FoundCheckpoint>> ListCheckpoints(FileSystem& file_system,
                                                             const std::string& folder);
// The same for `path`. It may also be a checkpoint in a folder, a moved one, or FOLDER/step-STEP:
// all of that step. NOT_FOUND if there is none.
absl::StatusOr<std::vector<FoundCheckpoint>> FindCheckpoints(FileSystem& file_system,
                                                             const std::string& path);

// The highest saved_unix_ms there, below the maximal number; 0: there is none.
int64_t LastSaved(FileSystem& file_system, const std::string& folder);

// The highest epoch there, of any job; 0: there is no checkpoint.
uint64_t HighestEpoch(FileSystem& file_system, const std::string& folder);

// Deletes the job's checkpoints except the newest `keep` of those that are `asked_for`, or of those
// that are not. Of the same step and generation it keeps only the newest. Returns the deleted ones.
// Checkpoints in use, or that cannot be deleted, stay, without an error.
std::vector<CheckpointFacts> DeleteOlder(FileSystem& file_system, CheckpointUses& uses,
                                         const std::string& folder, const std::string& uid,
                                         bool asked_for, int keep);
// Deletes FOLDER/step-STEP.GENERATION, also if it is damaged; or the requested ones of
// FOLDER/step-STEP. With a `uid` only those of that job. Returns the deleted ones. NOT_FOUND: there
// is none. INVALID_ARGUMENT: another path. FAILED_PRECONDITION, and nothing is deleted: one is in
// use, or they belong to several jobs.
absl::StatusOr<std::vector<FoundCheckpoint>> DeleteCheckpoints(FileSystem& file_system,
                                                               CheckpointUses& uses,
                                                               const std::string& path,
                                                               const std::string& uid);
// Removes half written or half deleted directories of killed processes: of checkpoints, or with the
// given `name`.
void RemoveLeftovers(FileSystem& file_system, const std::string& folder,
                     absl::string_view name = "");

// PATH.partial-RANDOM, a unique name.
std::string PartialPath(const std::string& path);
// The same, created and locked, so that it is not mistaken for a killed process's.
struct Partial {
  std::string path;
  std::shared_ptr<const void> lock;  // Null: locks do not work there, and nothing is removed.
};
absl::StatusOr<Partial> MakePartial(FileSystem& file_system, const std::string& path);

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_STATE_CHECKPOINT_FOLDER_H_
