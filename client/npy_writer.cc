#include "client/npy_writer.h"

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
#include "cpu_optimizer_service/common/status.h"

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

void RemoveUnfinishedNpy() {
  if (unfinished != 0) unlink(unfinished_path);
}

std::string NpyHeader(absl::Span<const int64_t> shape) {
  std::string dictionary = "{'descr': '<f4', 'fortran_order': False, 'shape': (";
  for (size_t i = 0; i < shape.size(); ++i) {
    absl::StrAppend(&dictionary, i == 0 ? "" : " ", shape[i],
                    shape.size() == 1 || i + 1 < shape.size() ? "," : "");
  }
  absl::StrAppend(&dictionary, "), }");
  constexpr size_t kPrefixBytes = 10;
  const size_t unpadded = kPrefixBytes + dictionary.size() + 1;
  dictionary.append((64 - unpadded % 64) % 64, ' ');
  dictionary.push_back('\n');
  std::string header("\x93NUMPY\x01\x00", 8);
  header.push_back(static_cast<char>(dictionary.size() & 0xff));
  header.push_back(static_cast<char>(dictionary.size() >> 8));
  return header + dictionary;
}

absl::StatusOr<std::unique_ptr<NpyWriter>> NpyWriter::Create(std::string path,
                                                             absl::Span<const int64_t> shape) {
  int64_t data_bytes = sizeof(float);
  for (int64_t extent : shape) data_bytes *= extent;
  std::string temporary_path = absl::StrCat(path, ".tmp.", getpid());
  struct stat status;
  if (stat(path.c_str(), &status) == 0 && !S_ISREG(status.st_mode)) {
    return absl::InvalidArgumentError(
        absl::StrCat("cannot write ", path, ": it is not a regular file; name another one"));
  }
  if (temporary_path.size() < PATH_MAX) SetUnfinished(temporary_path);
  const int file = open(temporary_path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
  const int error = errno;
  std::unique_ptr<NpyWriter> writer(
      new NpyWriter(std::move(path), std::move(temporary_path), file, data_bytes));
  if (file < 0) return writer->Error("create", error);
  BALLAST_RETURN_IF_ERROR(writer->Write(NpyHeader(shape)));
  return writer;
}

NpyWriter::~NpyWriter() {
  if (file_ >= 0) {
    close(file_);
    unlink(temporary_path_.c_str());
  }
  unfinished = 0;
}

absl::Status NpyWriter::Error(const char* what, int error) const {
  const char* advice = error == ENOSPC || error == EDQUOT ? "free some space or name another disk"
                       : error == ENOENT                  ? "make its directory first"
                                                          : "name a file that can be written";
  return absl::Status(
      error == ENOSPC ? absl::StatusCode::kResourceExhausted : absl::StatusCode::kUnknown,
      absl::StrCat("cannot ", what, " ", path_, ": ", strerror(error), "; ", advice));
}

absl::Status NpyWriter::Write(std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t written = write(file_, bytes.data(), bytes.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return Error("write", errno);
    bytes.remove_prefix(static_cast<size_t>(written));
  }
  return absl::OkStatus();
}

absl::Status NpyWriter::Append(std::string_view bytes) {
  appended_bytes_ += static_cast<int64_t>(bytes.size());
  return Write(bytes);
}

absl::Status NpyWriter::Commit() {
  if (appended_bytes_ != data_bytes_) {
    return absl::DataLossError(absl::StrCat("got ", appended_bytes_, " bytes for ", path_,
                                            ", expected ", data_bytes_, "; nothing was written"));
  }
  // Some file systems report a full disk only here.
  if (fsync(file_) != 0) return Error("write", errno);
  if (rename(temporary_path_.c_str(), path_.c_str()) != 0) return Error("write", errno);
  close(file_);
  file_ = -1;
  return absl::OkStatus();
}

}  // namespace ballast::client::cli
