#include "client/cli/atomic_file.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <utility>

#include "absl/strings/str_cat.h"

namespace ballast::client::cli {
namespace {

// For a signal handler, which can take no lock and call no destructor. The path is written only
// while `unfinished` is 0.
char unfinished_path[PATH_MAX];
volatile sig_atomic_t unfinished = 0;

void SetUnfinished(const std::string& path) {
  unfinished_path[path.copy(unfinished_path, sizeof(unfinished_path) - 1)] = '\0';
  unfinished = 1;
}

}  // namespace

void RemoveUnfinishedFile() {
  if (unfinished != 0) unlink(unfinished_path);
}

absl::StatusOr<std::unique_ptr<WholeFile>> WholeFile::Create(std::string path) {
  std::string temporary_path = absl::StrCat(path, ".tmp.", getpid());
  struct stat status;
  if (stat(path.c_str(), &status) == 0 && !S_ISREG(status.st_mode)) {
    return absl::InvalidArgumentError(
        absl::StrCat("cannot write ", path, ": it is not a regular file; name another one"));
  }
  if (temporary_path.size() < PATH_MAX) SetUnfinished(temporary_path);
  const int file = open(temporary_path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
  const int error = errno;
  std::unique_ptr<WholeFile> whole(new WholeFile(std::move(path), std::move(temporary_path), file));
  if (file < 0) return whole->Error("create", error);
  return whole;
}

WholeFile::~WholeFile() {
  if (file_ >= 0) {
    close(file_);
    unlink(temporary_path_.c_str());
  }
  unfinished = 0;
}

absl::Status WholeFile::Error(const char* what, int error) const {
  const char* advice = error == ENOSPC || error == EDQUOT ? "free some space or name another disk"
                       : error == ENOENT                  ? "make its directory first"
                                                          : "name a file that can be written";
  return absl::Status(
      error == ENOSPC ? absl::StatusCode::kResourceExhausted : absl::StatusCode::kUnknown,
      absl::StrCat("cannot ", what, " ", path_, ": ", strerror(error), "; ", advice));
}

absl::Status WholeFile::Append(absl::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t written = write(file_, bytes.data(), bytes.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return Error("write", errno);
    bytes.remove_prefix(static_cast<size_t>(written));
  }
  return absl::OkStatus();
}

absl::Status WholeFile::Commit() {
  // Some file systems report a full disk only here.
  if (fsync(file_) != 0) return Error("write", errno);
  if (rename(temporary_path_.c_str(), path_.c_str()) != 0) return Error("write", errno);
  close(file_);
  file_ = -1;
  return absl::OkStatus();
}

}  // namespace ballast::client::cli
