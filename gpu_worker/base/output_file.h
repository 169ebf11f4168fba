// Writing the files of a run. Errors are UNAVAILABLE and name the file, the reason and the flag.
#ifndef BALLAST_GPU_WORKER_BASE_OUTPUT_FILE_H_
#define BALLAST_GPU_WORKER_BASE_OUTPUT_FILE_H_

#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace ballast::worker {

absl::Status CannotWrite(const std::string& path, int error);

// All of `contents`, whatever a single write takes; `path` is for the error.
absl::Status WriteAll(int descriptor, const std::string& path, absl::string_view contents);

struct OutputFile {
  std::string name;
  std::string contents;
};
// Writes all files beside their places, then renames all: they appear whole or, on an error such as
// a full disk, not at all.
absl::Status WriteFiles(const std::string& directory, absl::Span<const OutputFile> files);

}  // namespace ballast::worker

#endif  // BALLAST_GPU_WORKER_BASE_OUTPUT_FILE_H_
