// The directory in which a service keeps the checkpoints of its jobs, each job's in a folder of its
// name (checkpoint_folder.h); what is known to be there; and when the service saves by itself.
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
  // How many of a job stay, as DeleteOlder has it: of those that the service saves by itself, and
  // of those that calls ask for.
  int keep = kDefaultKeptCheckpoints;
  std::optional<int> keep_asked = std::nullopt;  // None: all, until they are deleted by a call.

  bool saves() const { return every_steps > 0 || every_seconds > 0; }
  // Whether a save is due after `step`, if `last_step` was saved, or was the first, so long ago.
  bool IsDue(uint64_t step, uint64_t last_step, double seconds) const {
    if (step <= last_step) return false;
    return (every_steps > 0 && step / every_steps > last_step / every_steps) ||
           (every_seconds > 0 && seconds >= every_seconds);
  }
};

// Thread-safe. Only Open and ForgetMissing read the disk, so that a disk that hangs holds up nobody
// who asks.
class CheckpointDirectory {
 public:
  // Makes the directory if need be, and tries there all that a save does, so that it is known now
  // and not at the save. Looks which checkpoints there are. Errors are one line. `problem`: where
  // given, for jobs that live already, it takes what was found, OK or why none can be saved now, and
  // that is no error.
  static absl::StatusOr<std::unique_ptr<CheckpointDirectory>> Open(
      FileSystem& file_system, const std::string& given, const CheckpointPolicy& policy = {},
      absl::Status* problem = nullptr);

  const std::string& path() const { return path_; }  // Absolute.
  const CheckpointPolicy& policy() const { return policy_; }
  std::string PathOf(const std::string& job) const;
  // "gpt/step-1000.2" of a checkpoint in one of its folders; of another, its path.
  std::string NameOf(const std::string& directory) const;

  // Of each folder the newest that was there at the start, or has been saved since.
  std::vector<CheckpointFacts> All() const;
  // All that are known in the folder of a job, whichever job of that name they are of.
  struct Total {
    int64_t checkpoints = 0;
    int64_t bytes = 0;
  };
  Total TotalOf(const std::string& job) const;
  std::optional<CheckpointFacts> Find(const std::string& job) const;
  // Of the job with that uid, as All.
  std::optional<CheckpointFacts> NewestOf(const std::string& uid) const;
  // For a message on the job with that uid, which is lost: "; its last checkpoint is ...".
  std::string LastOf(const std::string& uid) const;
  // A save has ended; nothing, if it was to another place.
  void Saved(const std::string& folder, const CheckpointFacts& facts);
  // What is not there any more is not known any more. Reads the disk, without the lock.
  void ForgetMissing(FileSystem& file_system, const std::string& folder);

 private:
  CheckpointDirectory(std::string path, const CheckpointPolicy& policy)
      : path_(std::move(path)), policy_(policy) {}

  const std::string path_;
  const CheckpointPolicy policy_;
  mutable Mutex mutex_;
  // By folder's path: the newest first, those of the job (by uid) that saved last before all others;
  // at least one.
  std::map<std::string, std::vector<CheckpointFacts>> known_ ABSL_GUARDED_BY(mutex_);
};

// "job gpt at step 61 in /saved/gpt/step-61.1".
std::string ToString(const CheckpointFacts& facts);
// How a job goes on from the checkpoint of its name: "start its workers with --resume=gpt, ...".
std::string HowToResume(const std::string& job);

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_STATE_CHECKPOINT_DIRECTORY_H_
