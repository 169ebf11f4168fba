// Named memory as files in a directory on a file system in memory (tmpfs, hugetlbfs), where it
// outlives all processes of the service: for containers, whose restart ends them all.
//
//   superblock           format, boot, and which process has the directory: that locks this file
//   UID.LABEL.BYTES      memory "UID/LABEL", blanks as _, of so many bytes
//   UID.LABEL.BYTES.new  memory that a process was making when it died; goes at the next start
//
// Memory shared with other processes must be sealed, which a file here cannot be: that, sockets and
// the lock are the other keeper's, the parent's, if there is one.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_HOST_STATE_DIRECTORY_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_HOST_STATE_DIRECTORY_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "cpu_optimizer_service/common/system/file_descriptor.h"
#include "cpu_optimizer_service/common/system/mutex.h"
#include "cpu_optimizer_service/host/file_keeper.h"

namespace ballast {

struct StateDirectoryOptions {
  std::string path;
  FileKeeper* others = nullptr;  // Keeps what is no file here; borrowed. Null: no other does.
  double wait_seconds = 30;      // For a process that has the directory.
  // Says in a line why that takes long. Nullable.
  std::function<void(const std::string& line)> say;
  // What is known of the last checkpoint of the job with this uid; for messages. Nullable.
  std::function<std::string(const std::string& uid)> last_checkpoint;
};

// Thread-safe.
class StateDirectory final : public FileKeeper {
 public:
  // Looks only. INVALID_ARGUMENT, in one line that says what to do: memory cannot be kept there.
  static absl::Status Check(const std::string& path);
  // Looks only: whether a process that takes the place of one that holds `lock`, which is empty
  // where that has no directory, finds that one's jobs at `path`; empty: it has none. `others_hold_jobs`:
  // some lie elsewhere. INVALID_ARGUMENT, in one line.
  static absl::Status CheckSame(const FileDescriptor& lock, bool others_hold_jobs,
                                const std::string& path);
  // What the lock is called at `others`.
  static constexpr char kLockName[] = "lock of the state directory";
  // Makes the directory, mode 0700, if it is not there; its parent must be. All that is in it is
  // checked first, and nothing is changed where anything is refused. Errors, in one line:
  // INVALID_ARGUMENT as Check; UNAVAILABLE: another process has it; DATA_LOSS: a file is not as it
  // was left; FAILED_PRECONDITION: it is of another boot, or of a newer version.
  static absl::StatusOr<std::unique_ptr<StateDirectory>> Open(StateDirectoryOptions options);
  ~StateDirectory() override;

  absl::StatusOr<FileDescriptor> MakeFile(const std::string& name, int64_t bytes) override;
  absl::Status Keep(const std::string& name, int descriptor) override;
  void Drop(const std::string& name) override;
  std::map<std::string, FileDescriptor> TakeKept() override;
  bool keeps_sealed_files() const override { return false; }
  std::optional<Room> room() const override;
  // "the file /dev/shm/ballast/4f6c....table.4096"; of one that is not there "....table*".
  std::string WhatIs(const std::string& name) const override;

  // What an earlier process left has been taken over. Until then a drop is only remembered, so that
  // nothing is lost where taking over fails.
  void Settle();

  // "/dev/shm/ballast (tmpfs)".
  const std::string& description() const { return description_; }

 private:
  struct Superblock;
  struct Found;  // A file that is memory.

  explicit StateDirectory(StateDirectoryOptions options) : options_(std::move(options)) {}

  absl::Status OpenDirectory();
  absl::Status TakeLock();
  absl::Status LockOrWait(FileDescriptor& file);
  absl::Status CheckOrWriteSuperblock(bool is_new);
  absl::StatusOr<std::map<std::string, int64_t>> List() const;
  absl::Status OpenFiles(const std::map<std::string, int64_t>& files);
  absl::StatusOr<Found> OpenFile(const std::string& file, int64_t bytes) const;
  std::string LastCheckpoint(const std::string& uid) const;

  const StateDirectoryOptions options_;
  std::string description_;
  FileDescriptor directory_;
  FileDescriptor lock_;               // The superblock's.
  Superblock* superblock_ = nullptr;  // Mapped.
  int64_t page_bytes_ = 0;

  mutable Mutex mutex_;
  bool settled_ ABSL_GUARDED_BY(mutex_) = false;
  std::map<std::string, std::string> files_ ABSL_GUARDED_BY(mutex_);   // By name.
  std::map<std::string, std::string> making_ ABSL_GUARDED_BY(mutex_);  // Not kept yet, by name.
  std::set<std::string> dropped_ ABSL_GUARDED_BY(mutex_);  // Files, before it is settled.
  std::map<std::string, FileDescriptor> kept_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_HOST_STATE_DIRECTORY_H_
