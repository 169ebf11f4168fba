// The file operations of checkpoints, as an interface, so that a test can make each fail.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_HOST_FILE_SYSTEM_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_HOST_FILE_SYSTEM_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace ballast {

// Errors name the path and the system's reason; a full disk is RESOURCE_EXHAUSTED, a missing file
// NOT_FOUND.
class WritableFile {
 public:
  virtual ~WritableFile() = default;
  virtual absl::Status Append(absl::Span<const std::byte> bytes) = 0;
  // Flushes to the device and closes. Without it the contents may be lost.
  virtual absl::Status Close() = 0;
};

class ReadableFile {
 public:
  virtual ~ReadableFile() = default;
  virtual int64_t size_bytes() const = 0;
  // Fills `out` from `offset` on; DATA_LOSS if the file ends before. Thread-safe.
  virtual absl::Status Read(int64_t offset, absl::Span<std::byte> out) const = 0;
};

class FileSystem {
 public:
  virtual ~FileSystem() = default;
  virtual absl::StatusOr<std::unique_ptr<WritableFile>> Create(const std::string& path) = 0;
  // INVALID_ARGUMENT, without waiting, unless it is a regular file; a symbolic link is not.
  virtual absl::StatusOr<std::unique_ptr<ReadableFile>> Open(const std::string& path) = 0;
  virtual bool Exists(const std::string& path) = 0;
  // With its parents.
  virtual absl::Status CreateDirectory(const std::string& path) = 0;
  // False also for a missing file, or if the system has no symbolic links.
  virtual bool IsSymbolicLink(const std::string& path) { return false; }
  // Whether a file system is mounted on the directory, so that it cannot be replaced. False as
  // above.
  virtual bool IsMountPoint(const std::string& path) { return false; }
  // Durably, in one move. A file replaces a file. ALREADY_EXISTS if `to` is a directory with
  // contents: a directory never replaces contents.
  virtual absl::Status Rename(const std::string& from, const std::string& to) = 0;
  virtual absl::Status RemoveAll(const std::string& path) = 0;
  // The names in a directory, unordered. NOT_FOUND if it is missing.
  virtual absl::StatusOr<std::vector<std::string>> List(const std::string& directory) = 0;
  // Marks a directory as in use, by a lock on its file LockPath, until it is released or the
  // process ends. Null if it is in use, or if the file system does not support locks.
  virtual std::shared_ptr<const void> TryLock(const std::string& directory) = 0;
};

std::string LockPath(const std::string& directory);

FileSystem& PosixFileSystem();

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_HOST_FILE_SYSTEM_H_
