// save, load.
#include <nlohmann/json.hpp>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "client/cli/cli_command.h"
#include "client/cli/cli_json.h"
#include "client/cli/cli_service.h"
#include "client/cli/cli_text.h"
#include "cpu_optimizer_service/common/job_spec.h"
#include "cpu_optimizer_service/common/status.h"
#include "proto/convert.h"

namespace ballast::client::cli {
namespace {

constexpr double kTimeoutSeconds = 3600;

constexpr char kDirectory[] =
    "DIR is a name under the service's --checkpoint-dir, or, where the service takes paths from "
    "you (over a unix socket of its own user, or with ballastd --allow-paths), an absolute path on "
    "its host. ";

// The service's current directory is not the user's, so a relative path would be misunderstood.
absl::Status CheckDirectory(const std::string& directory) {
  if (absl::StartsWith(directory, "/") || IsJobName(directory)) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("'", directory,
                   "' is neither a name under the service's --checkpoint-dir nor an "
                   "absolute path on its host"));
}

// What becomes of a save whose answer does not come.
absl::Status ExplainSave(const absl::Status& status, const std::string& job) {
  if (!absl::IsUnavailable(status) && !absl::IsDeadlineExceeded(status)) return status;
  return Annotate(status,
                  absl::StrCat("whether the save has ended is not known: the service goes on "
                               "with it by itself, and `ballast job ",
                               job, "` shows it while it does"));
}

absl::StatusOr<Action> PrepareSave(const Arguments& arguments) {
  BALLAST_RETURN_IF_ERROR(CheckDirectory(arguments.positional(1)));
  return [job = arguments.positional(0), directory = arguments.positional(1),
          force = arguments.Has("force")](Service& service,
                                          bool json) -> absl::StatusOr<std::string> {
    // Whether a service answers at all is known then.
    BALLAST_RETURN_IF_ERROR(service.GetJob(job, /*with_parameters=*/false).status());
    v1::SaveJobRequest request;
    request.set_name(proto::JobName(job));
    request.set_directory(directory);
    request.set_replace_any(force);
    const auto response = service.Call(service.state(), &v1::StateService::Stub::SaveJob, request);
    if (!response.ok()) return ExplainSave(service.SuggestJob(response.status(), job), job);
    if (json) {
      return Dump({{"job", job},
                   {"directory", response->directory()},
                   {"step", response->step()},
                   {"bytes", response->bytes()}});
    }
    return absl::StrCat("saved job ", job, " at step ", response->step(), ", ",
                        FormatBytes(response->bytes()), ", in ", response->directory(), "\n");
  };
}

absl::StatusOr<Action> PrepareLoad(const Arguments& arguments) {
  BALLAST_RETURN_IF_ERROR(CheckDirectory(arguments.positional(1)));
  return [job = arguments.positional(0), directory = arguments.positional(1)](
             Service& service, bool json) -> absl::StatusOr<std::string> {
    v1::LoadJobRequest request;
    request.set_name(proto::JobName(job));
    request.set_directory(directory);
    const auto response = service.Call(service.state(), &v1::StateService::Stub::LoadJob, request);
    if (!response.ok()) return service.SuggestJob(response.status(), job);
    if (json) {
      return Dump({{"job", job},
                   {"directory", directory},
                   {"step", response->step()},
                   {"generation", response->generation()}});
    }
    return absl::StrCat("job ", job, " is at step ", response->step(), " of ", directory,
                        ", generation ", response->generation(), "; ", kRanksMustReturn);
  };
}

}  // namespace

Command SaveCommand() {
  return {
      .spec = {.name = "save",
               .positionals = {"JOB", "DIR"},
               .summary = "saves all state as safetensors, while training goes on",
               .details = absl::StrCat(kDirectory,
                                       "It appears whole or not at all. An older checkpoint of "
                                       "the job there is replaced."),
               .flags = {{"force", "",
                          "replace whatever checkpoint is there, also another job's or one of a "
                          "later step"}}},
      .timeout_seconds = kTimeoutSeconds,
      .prepare = PrepareSave};
}

Command LoadCommand() {
  return {.spec = {.name = "load",
                   .positionals = {"JOB", "DIR"},
                   .summary = "replaces the job's state by a saved one, by parameter name",
                   .details = absl::StrCat(kDirectory, "An undecided step is cleared.\n\n",
                                           kGenerationRises),
                   .flags = {}},
          .timeout_seconds = kTimeoutSeconds,
          .prepare = PrepareLoad};
}

}  // namespace ballast::client::cli
