// `ballast export`: the only command that reads checkpoints itself, where it is run, so that it needs
// no service. The code for that is the engine's (state/weights_export.h), and the program's main
// function gives it to this library.
#ifndef BALLAST_CLIENT_CLI_CLI_EXPORT_H_
#define BALLAST_CLIENT_CLI_CLI_EXPORT_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/cli/cli_command.h"
#include "cpu_optimizer_service/common/dtype.h"

namespace ballast::client::cli {

struct ExportOrder {
  std::string checkpoint;
  std::string directory;
  DType dtype = DType::kBFloat16;
  int64_t most_file_bytes = 0;
};

struct Exported {
  std::string checkpoint;
  std::string job;
  uint64_t step = 0;
  int64_t tensors = 0;
  int64_t bytes = 0;
  std::vector<std::string> files;
  std::vector<std::string> passed_over;  // Newer checkpoints that are damaged.
};

using Exporter = std::function<absl::StatusOr<Exported>(const ExportOrder&)>;
// Before the first command runs.
void SetExporter(Exporter exporter);

}  // namespace ballast::client::cli

#endif  // BALLAST_CLIENT_CLI_CLI_EXPORT_H_
