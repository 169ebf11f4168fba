#include "gpu_worker/base/output_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/status.h"

namespace ballast::worker {
namespace {

absl::Status WriteFile(const std::string& path, absl::string_view contents) {
  const int descriptor = open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (descriptor < 0) return CannotWrite(path, errno);
  absl::Status status = WriteAll(descriptor, path, contents);
  if (status.ok() && fsync(descriptor) != 0) status = CannotWrite(path, errno);
  if (close(descriptor) != 0 && status.ok()) status = CannotWrite(path, errno);
  return status;
}

}  // namespace

absl::Status CannotWrite(const std::string& path, int error) {
  return absl::UnavailableError(absl::StrCat("cannot write ", path, " (", std::strerror(error),
                                             "); free space or choose another --out"));
}

absl::Status WriteAll(int descriptor, const std::string& path, absl::string_view contents) {
  while (!contents.empty()) {
    const ssize_t written = write(descriptor, contents.data(), contents.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return CannotWrite(path, errno);
    contents.remove_prefix(written);
  }
  return absl::OkStatus();
}

absl::Status WriteFiles(const std::string& directory, absl::Span<const OutputFile> files) {
  const auto path = [&](const OutputFile& file) { return absl::StrCat(directory, "/", file.name); };
  const auto partial = [&](const OutputFile& file) { return absl::StrCat(path(file), ".partial"); };
  absl::Status status;
  for (const OutputFile& file : files) {
    if (status.ok()) status = WriteFile(partial(file), file.contents);
  }
  size_t in_place = 0;
  for (; status.ok() && in_place < files.size(); ++in_place) {
    const OutputFile& file = files[in_place];
    if (rename(partial(file).c_str(), path(file).c_str()) != 0) {
      status = CannotWrite(path(file), errno);
      break;
    }
  }
  if (!status.ok()) {
    for (const OutputFile& file : files.subspan(0, in_place)) unlink(path(file).c_str());
    for (const OutputFile& file : files) unlink(partial(file).c_str());
  }
  return status;
}

}  // namespace ballast::worker
