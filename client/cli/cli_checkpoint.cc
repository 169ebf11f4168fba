// save, load, import, checkpoints, verify, delete-checkpoint.
#include <nlohmann/json.hpp>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "client/cli/cli_command.h"
#include "client/cli/cli_json.h"
#include "client/cli/cli_service.h"
#include "client/cli/cli_text.h"
#include "client/cli/terminal/progress_bar.h"
#include "cpu_optimizer_service/common/status.h"
#include "cpu_optimizer_service/common/text/checkpoint_name.h"
#include "proto/convert.h"

namespace ballast::client::cli {
namespace {

using json = nlohmann::ordered_json;

// The answer to a save, a load or a verification comes when all state is written or read.
constexpr double kTimeoutSeconds = 3600;

constexpr char kDirectory[] =
    "DIR is a name under the service's --checkpoint-dir, or, where the service takes paths from "
    "you (over a unix socket of its own user, or with ballastd --allow-paths), an absolute path on "
    "its host. ";
constexpr char kDefault[] = "Without DIR it is the job's name. ";
constexpr char kOneOfThem[] =
    "DIR/step-STEP is its newest checkpoint of that step, and DIR/step-STEP.GENERATION one of them "
    "(`ballast checkpoints` lists them). ";

// The service's current directory is not the user's, so a relative path would be misunderstood.
absl::Status CheckDirectory(const std::string& directory) {
  if (directory.empty() || absl::StartsWith(directory, "/") || IsCheckpointName(directory)) {
    return absl::OkStatus();
  }
  // A name with this part in it was meant as a checkpoint, and is mistyped.
  if (const size_t step = directory.find("/step-"); step != std::string::npos) {
    const std::string name = directory.substr(0, step);
    return absl::InvalidArgumentError(absl::StrCat(
        "'", directory, "' is no checkpoint; expected ", name, " or ", name, "/step-STEP or ", name,
        "/step-STEP.GENERATION; `ballast checkpoints ", name, "` lists them"));
  }
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
          background = arguments.Has("background")](Service& service,
                                                    bool as_json) -> absl::StatusOr<std::string> {
    // Whether a service answers at all is known then.
    BALLAST_RETURN_IF_ERROR(service.GetJob(job, /*with_parameters=*/false).status());
    v1::SaveJobRequest request;
    request.set_name(proto::JobName(job));
    request.set_directory(directory);
    request.set_background(background);
    // Call, and not Read, here and for a load: a save that is made twice leaves two checkpoints,
    // and a second load raises the generation again.
    const auto response = [&] {
      const ProgressBar bar(
          WorkOf(service.channel(), job,
                 {ActivityKind::kMakingSecondVersions, ActivityKind::kWritingCheckpoint}));
      return service.Call(service.state(), &v1::StateService::Stub::SaveJob, request);
    }();
    if (!response.ok()) return ExplainSave(service.SuggestJob(response.status(), job), job);
    if (as_json) {
      return Dump({{"job", job},
                   {"directory", response->directory()},
                   {"step", response->step()},
                   {"bytes", response->bytes()}});
    }
    if (background) {
      return absl::StrCat("saving job ", job, " at step ", response->step(), " in ",
                          response->directory(), "; `ballast checkpoints ", directory,
                          directory.empty() ? job : "", "` shows it once it is complete\n");
    }
    return absl::StrCat("saved job ", job, " at step ", response->step(), ", ",
                        FormatBytes(response->bytes()), ", in ", response->directory(), "\n");
  };
}

absl::StatusOr<std::string> Load(Service& service, const v1::LoadJobRequest& request,
                                 const std::string& job, bool as_json) {
  const auto response = [&] {
    const ProgressBar bar(
        WorkOf(service.channel(), job,
               {ActivityKind::kVerifyingCheckpoint, ActivityKind::kLoadingCheckpoint}));
    return service.Call(service.state(), &v1::StateService::Stub::LoadJob, request);
  }();
  if (!response.ok()) return service.SuggestJob(response.status(), job);
  if (as_json) {
    return Dump({{"job", job},
                 {"directory", response->directory()},
                 {"passed_over", std::vector<std::string>(response->passed_over().begin(),
                                                          response->passed_over().end())},
                 {"step", response->step()},
                 {"generation", ToString(proto::FromProto(response->generation()))}});
  }
  std::string text;
  for (const std::string& damage : response->passed_over()) {
    absl::StrAppend(&text, "passed over, because it is damaged: ", damage, "\n");
  }
  absl::StrAppend(&text, "job ", job, " is at step ", response->step(), " of ",
                  response->directory(), ", generation ",
                  ToString(proto::FromProto(response->generation())), "; ", kRanksMustReturn);
  return text;
}

absl::StatusOr<Action> PrepareLoad(const Arguments& arguments) {
  BALLAST_RETURN_IF_ERROR(CheckDirectory(arguments.positional(1)));
  v1::LoadJobRequest request;
  request.set_name(proto::JobName(arguments.positional(0)));
  request.set_directory(arguments.positional(1));
  return [job = arguments.positional(0), request](Service& service, bool as_json) {
    return Load(service, request, job, as_json);
  };
}

absl::StatusOr<Action> PrepareImport(const Arguments& arguments) {
  BALLAST_RETURN_IF_ERROR(CheckDirectory(arguments.positional(1)));
  v1::LoadJobRequest request;
  request.set_name(proto::JobName(arguments.positional(0)));
  request.set_directory(arguments.positional(1));
  request.set_weights_only(true);
  return [job = arguments.positional(0), request](Service& service, bool as_json) {
    return Load(service, request, job, as_json);
  };
}

json CheckpointToJson(const v1::Checkpoint& checkpoint) {
  return {{"name", checkpoint.name()},
          {"directory", checkpoint.directory()},
          {"job", checkpoint.job()},
          {"uid", checkpoint.uid()},
          {"step", checkpoint.step()},
          {"generation", checkpoint.generation()},
          {"bytes", checkpoint.size_bytes()},
          {"saved_unix_ms", checkpoint.saved_unix_ms()},
          {"asked_for", checkpoint.asked_for()},
          {"problem", checkpoint.problem()}};
}

std::string ToTable(const v1::ListCheckpointsResponse& response, bool verified) {
  Table table({{"checkpoint"},
               {"step", kRight},
               {"generation", kRight},
               {"uid"},
               {"size", kRight},
               {"saved (UTC)"},
               {"by"},
               {verified ? "verified" : "complete"}});
  for (const v1::Checkpoint& checkpoint : response.checkpoints()) {
    // If a checkpoint's index is damaged, nothing but its name is known.
    const bool known = checkpoint.problem().empty() || !checkpoint.uid().empty();
    const absl::Time saved = absl::FromUnixMillis(checkpoint.saved_unix_ms());
    table.Add({checkpoint.name(), known ? absl::StrCat(checkpoint.step()) : "-",
               known ? absl::StrCat(checkpoint.generation()) : "-",
               known ? checkpoint.uid().substr(0, 8) : "-",
               checkpoint.size_bytes() > 0 ? FormatBytes(checkpoint.size_bytes()) : "-",
               checkpoint.saved_unix_ms() > 0
                   ? absl::FormatTime("%Y-%m-%d %H:%M:%S", saved, absl::UTCTimeZone())
                   : "-",
               !known                   ? "-"
               : checkpoint.asked_for() ? "request"
                                        : "the service",
               checkpoint.problem().empty() ? "yes" : absl::StrCat("no: ", checkpoint.problem())});
  }
  return table.ToString();
}

std::string ToText(const v1::ListCheckpointsResponse& response, bool verified, bool as_json) {
  if (as_json) {
    json all = json::array();
    for (const v1::Checkpoint& checkpoint : response.checkpoints())
      all.push_back(CheckpointToJson(checkpoint));
    return Dump({{"checkpoints", all}});
  }
  if (response.checkpoints().empty()) return "no checkpoints\n";
  int64_t bytes = 0;
  for (const v1::Checkpoint& checkpoint : response.checkpoints()) bytes += checkpoint.size_bytes();
  return absl::StrCat(ToTable(response, verified),
                      Counted(response.checkpoints_size(), "checkpoint"), ", ", FormatBytes(bytes),
                      "\n");
}

absl::StatusOr<Action> PrepareCheckpoints(const Arguments& arguments) {
  BALLAST_RETURN_IF_ERROR(CheckDirectory(arguments.positional(0)));
  v1::ListCheckpointsRequest request;
  request.set_directory(arguments.positional(0));
  return [request](Service& service, bool as_json) -> absl::StatusOr<std::string> {
    BALLAST_ASSIGN_OR_RETURN(const v1::ListCheckpointsResponse response,
                             service.ListCheckpoints(request));
    return ToText(response, /*verified=*/false, as_json);
  };
}

absl::StatusOr<Action> PrepareVerify(const Arguments& arguments) {
  BALLAST_RETURN_IF_ERROR(CheckDirectory(arguments.positional(0)));
  v1::VerifyCheckpointsRequest request;
  request.set_directory(arguments.positional(0));
  return [request](Service& service, bool as_json) -> absl::StatusOr<std::string> {
    const auto verify = [&] {
      const ProgressBar bar(WorkOf(service.channel(), "", {ActivityKind::kVerifyingCheckpoint}));
      return service.Read(service.state(), &v1::StateService::Stub::VerifyCheckpoints, request);
    };
    BALLAST_ASSIGN_OR_RETURN(const v1::ListCheckpointsResponse response, verify());
    std::vector<std::string> problems;
    for (const v1::Checkpoint& checkpoint : response.checkpoints()) {
      if (!checkpoint.problem().empty()) problems.push_back(checkpoint.problem());
    }
    // In JSON a script finds which; else the first is the error's one line.
    if (problems.empty() || as_json) return ToText(response, /*verified=*/true, as_json);
    return absl::DataLossError(absl::StrCat(problems.size(), " of ", response.checkpoints_size(),
                                            " checkpoints cannot be loaded: ", problems[0]));
  };
}

absl::StatusOr<Action> PrepareDelete(const Arguments& arguments) {
  const std::string& checkpoint = arguments.positional(0);
  BALLAST_RETURN_IF_ERROR(CheckDirectory(checkpoint));
  if (!absl::StrContains(checkpoint, "/")) {
    return absl::InvalidArgumentError(absl::StrCat(
        "'", checkpoint, "' is all checkpoints of a job; name one: ", checkpoint, "/step-STEP or ",
        checkpoint, "/step-STEP.GENERATION; `ballast checkpoints ", checkpoint, "` lists them"));
  }
  v1::DeleteCheckpointRequest request;
  request.set_directory(checkpoint);
  request.set_uid(arguments.Get("uid", ""));
  return [request](Service& service, bool as_json) -> absl::StatusOr<std::string> {
    // Call, and not Read: asked again, it would say that there is none.
    BALLAST_ASSIGN_OR_RETURN(
        const v1::DeleteCheckpointResponse response,
        service.Call(service.state(), &v1::StateService::Stub::DeleteCheckpoint, request));
    json all = json::array();
    std::string text;
    for (const v1::Checkpoint& deleted : response.checkpoints()) {
      all.push_back(CheckpointToJson(deleted));
      absl::StrAppend(&text, "deleted ", deleted.name(), ", ", FormatBytes(deleted.size_bytes()),
                      "\n");
    }
    return as_json ? Dump({{"checkpoints", all}}) : text;
  };
}

}  // namespace

Command SaveCommand() {
  return {
      .spec = {.name = "save",
               .positionals = {"JOB", "[DIR]"},
               .summary = "saves all state as safetensors, while training goes on",
               .details = absl::StrCat(
                   kDirectory, kDefault,
                   "A new checkpoint DIR/step-STEP.GENERATION appears whole or not at all. "
                   "Nothing is replaced. It stays until `ballast delete-checkpoint`, unless the "
                   "service has --checkpoint-keep-asked."),
               .flags = {{"background", "", "return once the save has begun"}}},
      .timeout_seconds = kTimeoutSeconds,
      .prepare = PrepareSave};
}

Command LoadCommand() {
  return {.spec = {.name = "load",
                   .positionals = {"JOB", "[DIR]"},
                   .summary = "replaces the job's state by a saved one, by parameter name",
                   .details = absl::StrCat(
                       kDirectory, kDefault,
                       "The newest checkpoint in it is loaded, or the one before, if that is "
                       "damaged. ",
                       kOneOfThem, "An undecided step is cleared.\n\n", kGenerationRises),
                   .flags = {}},
          .timeout_seconds = kTimeoutSeconds,
          .prepare = PrepareLoad};
}

Command ImportCommand() {
  return {.spec = {.name = "import",
                   .positionals = {"JOB", "DIR"},
                   .summary = "begins the job anew with the weights of Hugging Face's safetensors",
                   .details = absl::StrCat(
                       kDirectory,
                       "It has model.safetensors, or model.safetensors.index.json and what that "
                       "names; or DIR is the file. Tensors in fp32, bf16 or fp16 are taken by the "
                       "parameters' names, others are left out; moments are zeros, the step is 0."
                       "\n\n",
                       kGenerationRises),
                   .flags = {}},
          .timeout_seconds = kTimeoutSeconds,
          .prepare = PrepareImport};
}

Command CheckpointsCommand() {
  return {
      .spec = {.name = "checkpoints",
               .positionals = {"[DIR]"},
               .summary = "lists what is saved",
               .details = absl::StrCat(
                   kDirectory,
                   "Without DIR, all under --checkpoint-dir. First the job that saved last, of "
                   "a job the newest first. Only indexes are read: `ballast verify` reads all."),
               .flags = {}},
      .timeout_seconds = kTimeoutSeconds,
      .prepare = PrepareCheckpoints};
}

Command VerifyCommand() {
  return {
      .spec = {.name = "verify",
               .positionals = {"DIR"},
               .summary = "reads every byte of checkpoints, and says whether they can be loaded",
               .details = absl::StrCat(kDirectory, kOneOfThem,
                                       "If one cannot, the exit code is 1 and the error names "
                                       "it."),
               .flags = {}},
      .timeout_seconds = kTimeoutSeconds,
      .prepare = PrepareVerify};
}

Command DeleteCheckpointCommand() {
  return {.spec = {.name = "delete-checkpoint",
                   .positionals = {"CHECKPOINT"},
                   .summary = "deletes what a save has made",
                   .details =
                       "CHECKPOINT is JOB/step-STEP.GENERATION, or JOB/step-STEP for those of the "
                       "step that were asked for (`ballast checkpoints` lists them); or, where the "
                       "service takes paths from you, an absolute path. One that is saved, loaded "
                       "or verified is not deleted.",
                   .flags = {{"uid", "UID", "only if it is of the job with this uid"}}},
          .timeout_seconds = kTimeoutSeconds,
          .prepare = PrepareDelete};
}

}  // namespace ballast::client::cli
