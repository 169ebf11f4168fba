// A .tar.gz in memory, for files of a few megabytes.
#ifndef BALLAST_CLIENT_CLI_SUPPORT_ARCHIVE_H_
#define BALLAST_CLIENT_CLI_SUPPORT_ARCHIVE_H_

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace ballast::client::cli {

class Archive {
 public:
  // `folder`: in which all files lie, such as "ballast-doctor-gpt2".
  explicit Archive(std::string folder) : folder_(std::move(folder)) {}

  // Precondition: `name` with the folder has less than 100 bytes.
  void Add(absl::string_view name, absl::string_view contents);
  // INTERNAL: zlib has no memory.
  absl::StatusOr<std::string> Compressed() const;

 private:
  const std::string folder_;
  std::string tar_;
};

}  // namespace ballast::client::cli

#endif  // BALLAST_CLIENT_CLI_SUPPORT_ARCHIVE_H_
