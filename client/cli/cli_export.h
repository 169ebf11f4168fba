// `ballast export`: the only command that reads checkpoints itself, on its own host, so that it
// needs no service. The engine has the code (state/weights_export.h), and the program's main
// function passes it to this library.
#ifndef BALLAST_CLIENT_CLI_CLI_EXPORT_H_
#define BALLAST_CLIENT_CLI_CLI_EXPORT_H_

#include <cstdint>
#include <functional>
#include <string>

#include "absl/status/statusor.h"
#include "ballast/v1/tool.pb.h"
#include "client/cli/cli_command.h"
#include "cpu_optimizer_service/common/dtype.h"

namespace ballast::client::cli {

struct ExportOrder {
  std::string checkpoint;
  std::string directory;
  DType dtype = DType::kBFloat16;
  int64_t most_file_bytes = 0;
};

using Exporter = std::function<absl::StatusOr<v1::ExportedWeights>(const ExportOrder&)>;
// Before the first command runs.
void SetExporter(Exporter exporter);

}  // namespace ballast::client::cli

#endif  // BALLAST_CLIENT_CLI_CLI_EXPORT_H_
