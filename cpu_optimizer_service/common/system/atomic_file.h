// Writes files whole or not at all: to a temporary file in the same directory, which Commit renames
// and the destructor removes.
//
//   auto file = AtomicFile::Create("a.json").value();
//   file->Append(bytes);  // As often as needed.
//   file->Commit();       // Now a.json exists.
//
// Errors are one line that names the file and the system's reason: RESOURCE_EXHAUSTED for a full
// disk, NOT_FOUND, PERMISSION_DENIED, otherwise UNKNOWN. Thread-compatible.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_SYSTEM_ATOMIC_FILE_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_SYSTEM_ATOMIC_FILE_H_

#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "cpu_optimizer_service/common/system/file_descriptor.h"

namespace ballast {

// "cannot DOING PATH: REASON", for an errno.
absl::Status FileError(int error, absl::string_view doing, const std::string& path);

// Writes all of `contents`, also if single writes are short; `path` is for the error.
absl::Status WriteAll(int descriptor, const std::string& path, absl::string_view contents);

class AtomicFile {
 public:
  struct Options {
    // The temporary file's name is the path plus this. It replaces an earlier process's file of
    // this name. So if two processes may write the same path at once, they need two suffixes.
    std::string suffix = ".partial";
    // RemoveUnfinishedFile removes the file. At most one such file at a time in the process.
    bool remove_on_signal = false;
  };

  // INVALID_ARGUMENT if `path` exists and is not a regular file.
  static absl::StatusOr<std::unique_ptr<AtomicFile>> Create(std::string path,
                                                            const Options& options);
  static absl::StatusOr<std::unique_ptr<AtomicFile>> Create(std::string path) {
    return Create(std::move(path), Options());
  }
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  absl::Status Append(absl::string_view bytes);
  // Flushes to the device: some file systems report a full disk only here.
  absl::Status Flush();
  // Flushes, and replaces a regular file of the final name.
  absl::Status Commit();

  const std::string& path() const { return path_; }

 private:
  AtomicFile(std::string path, std::string temporary_path, bool remove_on_signal);

  const std::string path_;
  const std::string temporary_path_;
  const bool remove_on_signal_;
  FileDescriptor file_;
};

// Removes the uncommitted file with `remove_on_signal`, if any. For a handler of a signal that ends
// the process.
void RemoveUnfinishedFile();

struct FileContents {
  std::string path;
  std::string contents;
};
// Writes all files or, after an error, none: the first is renamed when the last is on the device.
absl::Status WriteAtomically(absl::Span<const FileContents> files);

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_SYSTEM_ATOMIC_FILE_H_
