// plan.
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/cli/cli_command.h"
#include "client/cli/support/plan.h"
#include "cpu_optimizer_service/common/layout.h"
#include "cpu_optimizer_service/common/status.h"
#include "cpu_optimizer_service/common/system/available_memory.h"
#include "cpu_optimizer_service/common/text/amounts.h"
#include "proto/message_json.h"

namespace ballast::client::cli {
namespace {

absl::StatusOr<Action> PreparePlan(const Arguments& arguments) {
  BALLAST_ASSIGN_OR_RETURN(const std::optional<double> ranks, arguments.Number("world-size"));
  // 0: none is given, and a file's own counts.
  const double world_size = ranks.value_or(0);
  if (ranks.has_value() && !(world_size >= 1 && world_size <= kMaxWorldSize &&
                             world_size == static_cast<int>(world_size))) {
    return absl::InvalidArgumentError(
        absl::StrCat("--world-size must be a whole number from 1 to ", kMaxWorldSize));
  }
  int64_t limit_bytes = DefaultMemoryLimitBytes();
  if (arguments.Has("memory")) {
    absl::StatusOr<int64_t> given = ParseBytes(arguments.Get("memory", ""));
    if (!given.ok()) return Annotate(given.status(), "--memory");
    limit_bytes = *given;
  }
  // All of the work is done before the action: an error in the description is wrong usage.
  BALLAST_ASSIGN_OR_RETURN(JobSpec spec,
                           ReadPlanSpec(arguments.positional(0), static_cast<int>(world_size)));
  BALLAST_ASSIGN_OR_RETURN(const v1::JobPlan plan, MakePlan(std::move(spec), limit_bytes));
  return [plan](Service&, bool json) -> absl::StatusOr<Answer> {
    BALLAST_ASSIGN_OR_RETURN(std::string text, json ? proto::ToJson(plan) : PlanText(plan));
    return Answer(std::move(text), FitsSomehow(plan));
  };
}

}  // namespace

Command PlanCommand() {
  return {.spec = {.name = "plan",
                   .positionals = {"SPEC"},
                   .summary = "whether a job will fit, and with which options; needs no service",
                   .details = "SPEC is a size, COUNT[:bf16|fp16|fp32][:amsgrad], such as 7B:bf16, "
                              "or a file with a job\nas CreateJob takes it (ballast.v1.Job in "
                              "JSON, partitions optional). A service of this version\nallocates by "
                              "these figures. The exit code is 1 if the job does not fit.",
                   .flags =
                       {{"memory", "SIZE",
                         "the service's --memory-limit (default: ballastd's default on this host)"},
                        {"world-size", "N", "ranks (default 1, or the file's)"}}},
          .asks_service = false,
          .prepare = PreparePlan};
}

}  // namespace ballast::client::cli
