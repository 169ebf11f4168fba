// The directory in which a service keeps the checkpoints of its jobs, each under the job's name,
// and what is known to be there.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_STATE_CHECKPOINT_DIRECTORY_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_STATE_CHECKPOINT_DIRECTORY_H_

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

namespace ballast {

// Thread-safe. Only Open reads the disk, so that a disk that hangs holds up nobody who asks.
class CheckpointDirectory {
 public:
  // Makes the directory if need be, and tries there all that a save does, so that it is known now
  // and not at the save. Looks which checkpoints there are. Errors are one line.
  static absl::StatusOr<std::unique_ptr<CheckpointDirectory>> Open(FileSystem& file_system,
                                                                   const std::string& given);

  const std::string& path() const { return path_; }  // Absolute.
  std::string PathOf(const std::string& job) const;

  // What there was at the start, or has been saved since.
  std::vector<CheckpointFacts> All() const;
  std::optional<CheckpointFacts> Find(const std::string& job) const;
  // A save has ended; nothing, if it was to another directory.
  void Saved(const CheckpointFacts& facts);

 private:
  explicit CheckpointDirectory(std::string path) : path_(std::move(path)) {}

  const std::string path_;
  mutable Mutex mutex_;
  std::map<std::string, CheckpointFacts> known_ ABSL_GUARDED_BY(mutex_);  // By folder.
};

// "job gpt at step 61 in /saved/gpt".
std::string ToString(const CheckpointFacts& facts);
// How a job goes on from the checkpoint of its name: "start its workers with --resume=gpt, ...".
std::string HowToResume(const std::string& job);

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_STATE_CHECKPOINT_DIRECTORY_H_
