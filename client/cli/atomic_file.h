// Writes a file whole or not at all: to a file beside it, which Commit renames and the destructor
// removes.
//
//   auto file = WholeFile::Create("a.json").value();
//   file->Append(bytes);  // As often as needed.
//   file->Commit();       // Now a.json is there.
#ifndef BALLAST_CLIENT_CLI_ATOMIC_FILE_H_
#define BALLAST_CLIENT_CLI_ATOMIC_FILE_H_

#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace ballast::client::cli {

// Removes the file that a WholeFile has not committed, if there is one: for a handler of a signal
// that ends the process.
void RemoveUnfinishedFile();

// One at a time.
class WholeFile {
 public:
  // One line that names the file and what is wrong with it, here and below.
  static absl::StatusOr<std::unique_ptr<WholeFile>> Create(std::string path);
  ~WholeFile();
  WholeFile(const WholeFile&) = delete;
  WholeFile& operator=(const WholeFile&) = delete;

  absl::Status Append(absl::string_view bytes);
  // Replaces a regular file that has the name.
  absl::Status Commit();

  const std::string& path() const { return path_; }

 private:
  WholeFile(std::string path, std::string temporary_path, int file)
      : path_(std::move(path)), temporary_path_(std::move(temporary_path)), file_(file) {}
  absl::Status Error(const char* what, int error) const;

  const std::string path_;
  const std::string temporary_path_;
  int file_;
};

}  // namespace ballast::client::cli

#endif  // BALLAST_CLIENT_CLI_ATOMIC_FILE_H_
