#include "cpu_optimizer_service/common/system/atomic_file.h"

#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/status.h"

namespace ballast {
namespace {

// For a signal handler, which can take no lock and call no destructor. The path is written only
// while `unfinished` is 0.
char unfinished_path[PATH_MAX];
volatile sig_atomic_t unfinished = 0;

void SetUnfinished(const std::string& path) {
  // The system opens no file with so long a path, so there is nothing to remove.
  if (path.size() >= sizeof(unfinished_path)) return;
  unfinished_path[path.copy(unfinished_path, sizeof(unfinished_path) - 1)] = '\0';
  // This comes last: a signal may come between any two statements. The fence is for the compiler,
  // which may otherwise move the path's bytes behind it, since only the flag is volatile.
  std::atomic_signal_fence(std::memory_order_release);
  unfinished = 1;
}

}  // namespace

void RemoveUnfinishedFile() {
  if (unfinished != 0) unlink(unfinished_path);
}

absl::Status FileError(int error, absl::string_view doing, const std::string& path) {
  const std::string message = absl::StrCat("cannot ", doing, " ", path, ": ", std::strerror(error));
  switch (error) {
    case ENOSPC:
    case EDQUOT:
      return absl::ResourceExhaustedError(absl::StrCat(message, "; make room and try again"));
    case EMFILE:
    case ENFILE:
    case ENOMEM:
      return absl::ResourceExhaustedError(message);
    case ENOENT:
      return absl::NotFoundError(message);
    case EACCES:
    case EPERM:
    case EROFS:
      return absl::PermissionDeniedError(message);
    default:
      return absl::UnknownError(message);
  }
}

absl::Status WriteAll(int descriptor, const std::string& path, absl::string_view contents) {
  while (!contents.empty()) {
    // A signal, or a disk that becomes full, lets write take a part. Then the next call says why.
    const ssize_t written = write(descriptor, contents.data(), contents.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return FileError(errno, "write", path);
    contents.remove_prefix(static_cast<size_t>(written));
  }
  return absl::OkStatus();
}

AtomicFile::AtomicFile(std::string path, std::string temporary_path, bool remove_on_signal)
    : path_(std::move(path)),
      temporary_path_(std::move(temporary_path)),
      remove_on_signal_(remove_on_signal) {
  // This is before the file is made: a signal right after that finds its path.
  if (remove_on_signal_) SetUnfinished(temporary_path_);
}

AtomicFile::~AtomicFile() {
  // After Commit there is no file under the temporary name, and file_ is empty. The handler is told
  // only after the removal, so that no signal falls between the two.
  if (file_) unlink(temporary_path_.c_str());
  if (remove_on_signal_) unfinished = 0;
}

absl::StatusOr<std::unique_ptr<AtomicFile>> AtomicFile::Create(std::string path,
                                                               const Options& options) {
  struct stat status;
  // rename would put a regular file in the place of a device such as /dev/null.
  if (stat(path.c_str(), &status) == 0 && !S_ISREG(status.st_mode)) {
    return absl::InvalidArgumentError(
        absl::StrCat("cannot write ", path, ": it is not a regular file; name another one"));
  }
  std::string temporary_path = absl::StrCat(path, options.suffix);
  std::unique_ptr<AtomicFile> file(
      new AtomicFile(std::move(path), std::move(temporary_path), options.remove_on_signal));
  // A killed process may have left one. O_EXCL: no link of another user is followed.
  unlink(file->temporary_path_.c_str());
  file->file_ = FileDescriptor(
      open(file->temporary_path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644));
  if (file->file_) return file;
  const absl::Status error = FileError(errno, "create", file->path_);
  if (!absl::IsNotFound(error)) return error;
  return absl::NotFoundError(absl::StrCat(error.message(), "; make its directory first"));
}

absl::Status AtomicFile::Append(absl::string_view bytes) {
  return WriteAll(file_.number(), path_, bytes);
}

absl::Status AtomicFile::Flush() {
  return fsync(file_.number()) == 0 ? absl::OkStatus() : FileError(errno, "write", path_);
}

absl::Status AtomicFile::Commit() {
  // The bytes are on the device before the name leads to them: after a crash of the host the name
  // has the old file or the whole new one. The directory is not flushed, so it may be the old one.
  BALLAST_RETURN_IF_ERROR(Flush());
  if (rename(temporary_path_.c_str(), path_.c_str()) != 0) return FileError(errno, "write", path_);
  // The destructor then finds nothing to remove.
  file_ = FileDescriptor();
  return absl::OkStatus();
}

absl::Status WriteAtomically(absl::Span<const FileContents> files) {
  std::vector<std::unique_ptr<AtomicFile>> written;
  // All that may fail for lack of room comes before the first rename.
  for (const FileContents& file : files) {
    BALLAST_ASSIGN_OR_RETURN(std::unique_ptr<AtomicFile> temporary, AtomicFile::Create(file.path));
    BALLAST_RETURN_IF_ERROR(temporary->Append(file.contents));
    BALLAST_RETURN_IF_ERROR(temporary->Flush());
    written.push_back(std::move(temporary));
  }
  for (size_t i = 0; i < written.size(); ++i) {
    const absl::Status status = written[i]->Commit();
    if (status.ok()) continue;
    // A reader must not find some files of this run and none of the others. What they replaced is
    // gone.
    for (size_t committed = 0; committed < i; ++committed) {
      unlink(files[committed].path.c_str());
    }
    return status;
  }
  return absl::OkStatus();
}

}  // namespace ballast
