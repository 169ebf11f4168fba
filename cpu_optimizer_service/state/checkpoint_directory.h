// A service's directory of checkpoints, with a folder for each job's name (checkpoint_folder.h);
// the known checkpoints in it; and the service's schedule of saves.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_STATE_CHECKPOINT_DIRECTORY_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_STATE_CHECKPOINT_DIRECTORY_H_

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "cpu_optimizer_service/common/system/mutex.h"
#include "cpu_optimizer_service/host/file_system.h"
#include "cpu_optimizer_service/state/checkpoint_index.h"
#include "cpu_optimizer_service/state/checkpoint_writer.h"

namespace ballast {

inline constexpr int kDefaultKeptCheckpoints = 3;

struct CheckpointPolicy {
  uint64_t every_steps = 0;  // 0: not by steps.
  double every_seconds = 0;  // 0: not by time.
  // How many of a job stay, as in DeleteOlder: of scheduled ones, and of requested ones.
  int keep = kDefaultKeptCheckpoints;
  std::optional<int> keep_asked = std::nullopt;  // Empty: all, until a call deletes them.

  bool saves() const { return every_steps > 0 || every_seconds > 0; }
  // Whether a save is due after `step`, if `last_step` was saved, or was the first, so many seconds
  // ago.
  bool IsDue(uint64_t step, uint64_t last_step, double seconds) const {
    if (step <= last_step) return false;
    return (every_steps > 0 && step / every_steps > last_step / every_steps) ||
           (every_seconds > 0 && seconds >= every_seconds);
  }
};

// Thread-safe. Only Open and ForgetMissing read the disk, so that a hanging disk delays no other
// caller.
class CheckpointDirectory {
 public:
  // Creates the directory if needed, and tries everything that a save does, so that errors show
  // now. Finds existing checkpoints. Errors are one line. `problem`: for jobs that already live; it
  // gets OK, or why jobs cannot be saved now, and then that is not an error.
  static absl::StatusOr<std::unique_ptr<CheckpointDirectory>> Open(
      FileSystem& file_system, const std::string& given, const CheckpointPolicy& policy = {},
      absl::Status* problem = nullptr);

  const std::string& path() const { return path_; }  // Absolute.
  const CheckpointPolicy& policy() const { return policy_; }
  std::string PathOf(const std::string& job) const;
  // "gpt/step-1000.2" for a checkpoint in one of its folders; the path for another.
  std::string NameOf(const std::string& directory) const;

  // The newest of each folder, from the start or saved since.
  std::vector<CheckpointFacts> All() const;
  // All known ones in the folder of a job's name, including other jobs of that name.
  struct Total {
    int64_t checkpoints = 0;
    int64_t bytes = 0;
  };
  Total TotalOf(const std::string& job) const;
  std::optional<CheckpointFacts> Find(const std::string& job) const;
  // For the job with that uid, as All.
  std::optional<CheckpointFacts> NewestOf(const std::string& uid) const;
  // For a message about the lost job with that uid: "; its last checkpoint is ...".
  std::string LastOf(const std::string& uid) const;
  // A save has ended; ignored if it was to another place.
  void Saved(const std::string& folder, const CheckpointFacts& facts);
  // Drops missing ones. Reads the disk, without the lock.
  void ForgetMissing(FileSystem& file_system, const std::string& folder);

 private:
  CheckpointDirectory(std::string path, const CheckpointPolicy& policy)
      : path_(std::move(path)), policy_(policy) {}

  const std::string path_;
  const CheckpointPolicy policy_;
  mutable Mutex mutex_;
  // By folder's path, at least one: those of the job (by uid) that saved last come first, and
  // within a job the newest.
  std::map<std::string, std::vector<CheckpointFacts>> known_ ABSL_GUARDED_BY(mutex_);
};

// "job gpt at step 61 in /saved/gpt/step-61.1".
std::string ToString(const CheckpointFacts& facts);
// How a job resumes from the checkpoint of its name: "start its workers with --resume=gpt, ...".
std::string HowToResume(const std::string& job);

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_STATE_CHECKPOINT_DIRECTORY_H_
