// The file of --out.
#ifndef BALLAST_CLIENT_CLI_OUTPUT_FILE_H_
#define BALLAST_CLIENT_CLI_OUTPUT_FILE_H_

#include <unistd.h>

#include <memory>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/system/atomic_file.h"

namespace ballast::client::cli {

// One at a time. A signal that ends the command removes the file (ballast_main.cc). The process id
// separates two commands that write to the same path.
inline absl::StatusOr<std::unique_ptr<AtomicFile>> CreateOutputFile(std::string path) {
  return AtomicFile::Create(
      std::move(path), {.suffix = absl::StrCat(".partial.", getpid()), .remove_on_signal = true});
}

}  // namespace ballast::client::cli

#endif  // BALLAST_CLIENT_CLI_OUTPUT_FILE_H_
