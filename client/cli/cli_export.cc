#include "client/cli/cli_export.h"

#include <cmath>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/cli/cli_json.h"
#include "client/cli/cli_text.h"
#include "client/cli/terminal/progress_bar.h"
#include "cpu_optimizer_service/common/status.h"

namespace ballast::client::cli {
namespace {

using json = nlohmann::ordered_json;

// The unit is 10^9 bytes. The engine's own default is the same (state/weights_export.h).
constexpr double kMostFileGb = 5;

Exporter& TheExporter() {
  // It is never destroyed, so it is there for as long as any code runs.
  static Exporter& exporter = *new Exporter;
  return exporter;
}

std::string ToText(const Exported& exported, const ExportOrder& order) {
  std::string text;
  for (const std::string& damage : exported.passed_over) {
    absl::StrAppend(&text, "passed over, because it is damaged: ", damage, "\n");
  }
  absl::StrAppend(&text, "exported job ", exported.job, " at step ", exported.step, " of ",
                  exported.checkpoint, ": ", Counted(exported.tensors, "tensor"), " in ",
                  Name(order.dtype), ", ", FormatBytes(exported.bytes), ", as ",
                  exported.files.front());
  if (exported.files.size() > 1) {
    absl::StrAppend(&text, " and ", exported.files.size() - 1, " more, with their index");
  }
  return absl::StrCat(text, ", in ", order.directory, "\n");
}

absl::StatusOr<Action> PrepareExport(const Arguments& arguments) {
  ExportOrder order = {.checkpoint = arguments.positional(0), .directory = arguments.positional(1)};
  const std::string dtype = arguments.Get("dtype", "bf16");
  if (dtype != "bf16" && dtype != "fp32") {
    return absl::InvalidArgumentError(
        absl::StrCat("--dtype is '", dtype, "'; expected bf16 or fp32"));
  }
  order.dtype = dtype == "bf16" ? DType::kBFloat16 : DType::kFloat32;
  BALLAST_ASSIGN_OR_RETURN(const std::optional<double> gigabytes, arguments.Number("file-gb"));
  const double most = gigabytes.value_or(kMostFileGb);
  // Written so that NaN is refused.
  if (!(most > 0 && most < 1e6)) {
    return absl::InvalidArgumentError("--file-gb must be positive, and less than a million");
  }
  // Rounded up: a tiny size would become 0 bytes otherwise.
  order.most_file_bytes = static_cast<int64_t>(std::ceil(most * 1e9));
  return [order](Service& /*service*/, bool as_json) -> absl::StatusOr<std::string> {
    // Only ballast_main.cc gives one. The library itself does not link the engine.
    if (!TheExporter()) return absl::UnimplementedError("this program cannot export");
    const auto exports = [&] {
      // Of the whole: the checkpoint is verified, and then its weights are read and written.
      Activities activities;
      const auto progress = activities.Begin({.kind = ActivityKind::kExportingWeights});
      const CountsIn here(*progress);
      const ProgressBar bar([&] { return std::make_optional(activities.List().front()); });
      return TheExporter()(order);
    };
    BALLAST_ASSIGN_OR_RETURN(const Exported exported, exports());
    if (!as_json) return ToText(exported, order);
    return Dump({{"job", exported.job},
                 {"checkpoint", exported.checkpoint},
                 {"passed_over", exported.passed_over},
                 {"step", exported.step},
                 {"directory", order.directory},
                 {"dtype", Name(order.dtype)},
                 {"tensors", exported.tensors},
                 {"bytes", exported.bytes},
                 {"files", exported.files}});
  };
}

}  // namespace

void SetExporter(Exporter exporter) { TheExporter() = std::move(exporter); }

Command ExportCommand() {
  return {
      .spec = {.name = "export",
               .positionals = {"CHECKPOINT", "DIR"},
               .summary = "writes a checkpoint's weights as Hugging Face's safetensors",
               .details =
                   "Works without a service, on files of this host. CHECKPOINT is a checkpoint, "
                   "step-STEP.GENERATION, or a folder of them, of which the newest that is "
                   "not damaged is taken; checksums are verified. Of a job that runs, "
                   "`ballast save` makes one. DIR is new or empty, and gets model.safetensors, "
                   "or several files and model.safetensors.index.json, whole or not at all. "
                   "Tensors have the parameters' names and are rounded from fp32; frozen "
                   "parameters are in no checkpoint.",
               .flags = {{"dtype", "DTYPE", "bf16 or fp32 (default bf16)"},
                         {"file-gb", "GB", "begin another file before one has more (default 5)"}}},
      .asks_service = false,
      .prepare = PrepareExport};
}

}  // namespace ballast::client::cli
