#include "client/cli/cli_export.h"

#include <cmath>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/cli/cli_print.h"
#include "client/cli/cli_text.h"
#include "client/cli/terminal/progress_bar.h"
#include "cpu_optimizer_service/common/status.h"
#include "proto/message_json.h"

namespace ballast::client::cli {
namespace {

// The unit is 10^9 bytes. The engine's own default is the same (state/weights_export.h).
constexpr double kMostFileGb = 5;

Exporter& TheExporter() {
  // It is never destroyed, so it is there for as long as any code runs.
  static Exporter& exporter = *new Exporter;
  return exporter;
}

std::string ToText(const v1::ExportedWeights& exported) {
  std::string text;
  for (const std::string& damage : exported.passed_over()) {
    absl::StrAppend(&text, "passed over, because it is damaged: ", damage, "\n");
  }
  absl::StrAppend(&text, "exported job ", exported.job(), " at step ", exported.step(), " of ",
                  exported.checkpoint(), ": ", Counted(exported.tensors(), "tensor"), " in ",
                  Name(exported.dtype()), ", ", FormatBytes(exported.bytes()), ", as ",
                  exported.files(0));
  if (exported.files_size() > 1) {
    absl::StrAppend(&text, " and ", exported.files_size() - 1, " more, with their index");
  }
  return absl::StrCat(text, ", in ", exported.directory(), "\n");
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
      // The progress counts the whole: verifying the checkpoint, then reading and writing its weights.
      Activities activities;
      const auto progress = activities.Begin({.kind = ActivityKind::kExportingWeights});
      const CountsIn here(*progress);
      const ProgressBar bar([&] { return std::make_optional(activities.List().front()); });
      return TheExporter()(order);
    };
    BALLAST_ASSIGN_OR_RETURN(const v1::ExportedWeights exported, exports());
    return as_json ? proto::ToJson(exported) : ToText(exported);
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
                   "step-STEP.GENERATION, or a folder: then the newest undamaged one in it. "
                   "Checksums are verified. For a running job `ballast save` makes one first. DIR "
                   "is new or empty. It gets model.safetensors, or several files and "
                   "model.safetensors.index.json, all or nothing. Tensors have the parameters' "
                   "names and are rounded from fp32. Checkpoints have no frozen parameters.",
               .flags = {{"dtype", "DTYPE", "bf16 or fp32 (default bf16)"},
                         {"file-gb", "GB", "size limit of a file (default 5)"}}},
      .asks_service = false,
      .prepare = PrepareExport};
}

}  // namespace ballast::client::cli
