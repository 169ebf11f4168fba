// save, load.
#include <nlohmann/json.hpp>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "client/cli/cli_command.h"
#include "client/cli/cli_json.h"
#include "client/cli/cli_service.h"
#include "client/cli/cli_text.h"
#include "cpu_optimizer_service/common/status.h"
#include "proto/convert.h"

namespace ballast::client::cli {
namespace {

constexpr double kTimeoutSeconds = 3600;

// The service's current directory is not the user's, so a relative path would be misunderstood.
absl::Status CheckDirectory(const std::string& directory) {
  if (absl::StartsWith(directory, "/")) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("'", directory, "' is not an absolute path; it is one on the service's host"));
}

absl::StatusOr<Action> PrepareSave(const Arguments& arguments) {
  BALLAST_RETURN_IF_ERROR(CheckDirectory(arguments.positional(1)));
  return [job = arguments.positional(0), directory = arguments.positional(1)](
             Service& service, bool json) -> absl::StatusOr<std::string> {
    v1::SaveJobRequest request;
    request.set_name(proto::JobName(job));
    request.set_directory(directory);
    const auto response = service.Call(service.state(), &v1::StateService::Stub::SaveJob, request);
    if (!response.ok()) return service.SuggestJob(response.status(), job);
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
  return {.spec = {.name = "save",
                   .positionals = {"JOB", "DIR"},
                   .summary = "saves all state, between steps, as safetensors",
                   .details = "DIR is an absolute path on the service's host. It appears whole or "
                              "not at all.",
                   .flags = {}},
          .timeout_seconds = kTimeoutSeconds,
          .prepare = PrepareSave};
}

Command LoadCommand() {
  return {.spec = {.name = "load",
                   .positionals = {"JOB", "DIR"},
                   .summary = "replaces the job's state by a saved one, by parameter name",
                   .details = absl::StrCat(
                       "DIR is an absolute path on the service's host. An undecided step "
                       "is cleared.\n\n",
                       kGenerationRises),
                   .flags = {}},
          .timeout_seconds = kTimeoutSeconds,
          .prepare = PrepareLoad};
}

}  // namespace ballast::client::cli
