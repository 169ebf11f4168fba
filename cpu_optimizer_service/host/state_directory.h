// Named memory as files in a directory on a file system in memory (tmpfs, hugetlbfs). There it
// outlives all processes of the service: for containers, whose restart ends them all.
//
//   superblock           format, boot, and the process that has the directory: it locks this file
//   UID.LABEL.BYTES      memory "UID/LABEL", with _ for blanks, of so many bytes
//   UID.LABEL.BYTES.new  memory that a crashed process was making; removed at the next start
//
// Memory shared with other processes must be sealed, which a file here cannot be. So that, sockets
// and the lock are kept by the other keeper, the parent, if there is one.
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
  FileKeeper* others = nullptr;  // Keeps everything except files here; borrowed. May be null.
  double wait_seconds = 30;      // For another process that has the directory.
  // Gets a line that says why that takes long. May be null.
  std::function<void(const std::string& line)> say;
  // What is known of the last checkpoint of the job with this uid, for messages. May be null.
  std::function<std::string(const std::string& uid)> last_checkpoint;
};

// Thread-safe.
class StateDirectory final : public FileKeeper {
 public:
  // Changes nothing. INVALID_ARGUMENT, in one line that says what to do: memory cannot be kept
  // there.
  static absl::Status Check(const std::string& path);
  // Changes nothing. Checks that a process that replaces the holder of `lock` finds the holder's
  // jobs at `path`. Empty `lock` or `path`: no directory. `others_hold_jobs`: some jobs are
  // elsewhere. INVALID_ARGUMENT, in one line.
  static absl::Status CheckSame(const FileDescriptor& lock, bool others_hold_jobs,
                                const std::string& path);
  // The lock's name at `others`.
  static constexpr char kLockName[] = "lock of the state directory";
  // Creates the directory, mode 0700, if needed; its parent must exist. All contents are checked
  // first; if anything is refused, nothing is changed. Errors, in one line: INVALID_ARGUMENT as
  // Check; UNAVAILABLE: another process has it; DATA_LOSS: a file has changed; FAILED_PRECONDITION:
  // another boot, or a newer version.
  static absl::StatusOr<std::unique_ptr<StateDirectory>> Open(StateDirectoryOptions options);
  ~StateDirectory() override;

  absl::StatusOr<FileDescriptor> MakeFile(const std::string& name, int64_t bytes) override;
  absl::Status Keep(const std::string& name, int descriptor) override;
  void Drop(const std::string& name) override;
  std::map<std::string, FileDescriptor> TakeKept() override;
  bool keeps_sealed_files() const override { return false; }
  std::optional<Room> room() const override;
  // "the file /dev/shm/ballast/4f6c....table.4096"; for a missing one "....table*".
  std::string WhatIs(const std::string& name) const override;

  // An earlier process's memory has been taken over. Until then drops are only remembered, so that
  // a failed takeover loses nothing.
  void Settle();

  // "/dev/shm/ballast (tmpfs)".
  const std::string& description() const { return description_; }

 private:
  struct Superblock;
  struct Found;  // A file with memory.

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
