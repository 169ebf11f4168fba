// save, load, import, checkpoints, verify, delete-checkpoint.
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "client/calls/service.h"
#include "client/cli/cli_command.h"
#include "client/cli/cli_text.h"
#include "client/cli/terminal/progress_bar.h"
#include "cpu_optimizer_service/common/status.h"
#include "cpu_optimizer_service/common/text/checkpoint_name.h"
#include "proto/convert.h"
#include "proto/message_json.h"

namespace ballast::client::cli {
namespace {

// The answer to a save, a load or a verification comes when all state is written or read.
constexpr double kTimeoutSeconds = 3600;

constexpr char kDirectory[] =
    "DIR is a name under the service's --checkpoint-dir. If the service accepts paths from you "
    "(over a unix socket of its own user, or with ballastd --allow-paths), it may be an absolute "
    "path on its host. ";
constexpr char kDefault[] = "By default it is the job's name. ";
constexpr char kOneOfThem[] =
    "DIR/step-STEP means the newest checkpoint of that step, DIR/step-STEP.GENERATION a single one "
    "(`ballast checkpoints` lists them). ";

// Here, before the service is asked. Empty: the job's name.
absl::Status CheckDirectory(const std::string& directory) {
  return directory.empty() ? absl::OkStatus() : CheckCheckpointDirectory(directory);
}

// What becomes of a save whose answer does not come.
absl::Status ExplainSave(const absl::Status& status, const std::string& job) {
  if (!absl::IsUnavailable(status) && !absl::IsDeadlineExceeded(status)) return status;
  return Annotate(
      status,
      absl::StrCat(
          "the outcome of the save is unknown; while the service still saves, `ballast job ", job,
          "` shows it"));
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
    const auto response = [&] {
      const ProgressBar bar(
          WorkOf(service.channel(), job,
                 {ActivityKind::kMakingSecondVersions, ActivityKind::kWritingCheckpoint}));
      return service.Call<v1::SaveJobResponse>("StateService/SaveJob", request);
    }();
    if (!response.ok()) return ExplainSave(response.status(), job);
    if (as_json) return proto::ToJson(*response);
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
    return service.Call<v1::LoadJobResponse>("StateService/LoadJob", request);
  }();
  if (!response.ok()) return response.status();
  if (as_json) return proto::ToJson(*response);
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
  request.set_convert_state(arguments.Has("convert-state"));
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

std::string ToText(const v1::ListCheckpointsResponse& response, bool verified) {
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
    BALLAST_ASSIGN_OR_RETURN(const auto response, service.Call<v1::ListCheckpointsResponse>(
                                                      "StateService/ListCheckpoints", request));
    return as_json ? proto::ToJson(response) : ToText(response, /*verified=*/false);
  };
}

absl::StatusOr<Action> PrepareVerify(const Arguments& arguments) {
  BALLAST_RETURN_IF_ERROR(CheckDirectory(arguments.positional(0)));
  v1::VerifyCheckpointsRequest request;
  request.set_directory(arguments.positional(0));
  return [request](Service& service, bool as_json) -> absl::StatusOr<std::string> {
    const auto verify = [&] {
      const ProgressBar bar(WorkOf(service.channel(), "", {ActivityKind::kVerifyingCheckpoint}));
      return service.Call<v1::ListCheckpointsResponse>("StateService/VerifyCheckpoints", request);
    };
    BALLAST_ASSIGN_OR_RETURN(const v1::ListCheckpointsResponse response, verify());
    std::vector<std::string> problems;
    for (const v1::Checkpoint& checkpoint : response.checkpoints()) {
      if (!checkpoint.problem().empty()) problems.push_back(checkpoint.problem());
    }
    // In JSON a script finds which; else the first is the error's one line.
    if (as_json) return proto::ToJson(response);
    if (problems.empty()) return ToText(response, /*verified=*/true);
    return absl::DataLossError(absl::StrCat(problems.size(), " of ", response.checkpoints_size(),
                                            " checkpoints cannot be loaded: ", problems[0]));
  };
}

absl::StatusOr<Action> PrepareDelete(const Arguments& arguments) {
  const std::string& checkpoint = arguments.positional(0);
  BALLAST_RETURN_IF_ERROR(CheckDirectory(checkpoint));
  if (!absl::StrContains(checkpoint, "/")) {
    return absl::InvalidArgumentError(
        absl::StrCat("'", checkpoint, "' names all checkpoints of a job; name one: ", checkpoint,
                     "/step-STEP or ", checkpoint, "/step-STEP.GENERATION; `ballast checkpoints ",
                     checkpoint, "` lists them"));
  }
  v1::DeleteCheckpointRequest request;
  request.set_directory(checkpoint);
  request.set_uid(arguments.Get("uid", ""));
  return [request](Service& service, bool as_json) -> absl::StatusOr<std::string> {
    BALLAST_ASSIGN_OR_RETURN(const auto response, service.Call<v1::DeleteCheckpointResponse>(
                                                      "StateService/DeleteCheckpoint", request));
    if (as_json) return proto::ToJson(response);
    std::string text;
    for (const v1::Checkpoint& deleted : response.checkpoints()) {
      absl::StrAppend(&text, "deleted ", deleted.name(), ", ", FormatBytes(deleted.size_bytes()),
                      "\n");
    }
    return text;
  };
}

}  // namespace

Command SaveCommand() {
  return {.spec = {.name = "save",
                   .positionals = {"JOB", "[DIR]"},
                   .summary = "saves all state as safetensors, while training goes on",
                   .details = absl::StrCat(
                       kDirectory, kDefault,
                       "A new checkpoint DIR/step-STEP.GENERATION appears whole or not at all, and "
                       "replaces nothing. It stays until `ballast delete-checkpoint`, unless the "
                       "service has --checkpoint-keep-asked."),
                   .flags = {{"background", "", "return when the save has begun"}}},
          .timeout_seconds = kTimeoutSeconds,
          .prepare = PrepareSave};
}

Command LoadCommand() {
  return {
      .spec =
          {.name = "load",
           .positionals = {"JOB", "[DIR]"},
           .summary = "replaces the job's state by a saved one, by parameter name",
           .details = absl::StrCat(
               kDirectory, kDefault,
               "Loads the newest checkpoint in it. If that is damaged, it loads the one before. ",
               kOneOfThem, "An undecided step is cleared.\n\n", kGenerationRises),
           .flags = {{"convert-state", "",
                      "convert state in another format than the job's, such as fp32 to 8bit"}}},
      .timeout_seconds = kTimeoutSeconds,
      .prepare = PrepareLoad};
}

Command ImportCommand() {
  return {.spec = {.name = "import",
                   .positionals = {"JOB", "DIR"},
                   .summary = "restarts the job with weights from Hugging Face's safetensors",
                   .details = absl::StrCat(
                       kDirectory,
                       "It has model.safetensors, or model.safetensors.index.json and the files "
                       "that it names. DIR may also be the file itself. Tensors (fp32, bf16 or "
                       "fp16) are matched by the parameters' names, and others are ignored. "
                       "Moments are zeros, the step is 0.\n\n",
                       kGenerationRises),
                   .flags = {}},
          .timeout_seconds = kTimeoutSeconds,
          .prepare = PrepareImport};
}

Command CheckpointsCommand() {
  return {.spec = {.name = "checkpoints",
                   .positionals = {"[DIR]"},
                   .summary = "lists checkpoints",
                   .details =
                       absl::StrCat(kDirectory,
                                    "Without DIR, all under --checkpoint-dir. The job that saved "
                                    "last comes first, and within a job the newest checkpoint. "
                                    "Only indexes are read; `ballast verify` reads all bytes."),
                   .flags = {}},
          .timeout_seconds = kTimeoutSeconds,
          .prepare = PrepareCheckpoints};
}

Command VerifyCommand() {
  return {.spec = {.name = "verify",
                   .positionals = {"DIR"},
                   .summary = "reads every byte of checkpoints and says whether they can be loaded",
                   .details = absl::StrCat(
                       kDirectory, kOneOfThem,
                       "If one cannot be loaded, the exit code is 1 and the error names it."),
                   .flags = {}},
          .timeout_seconds = kTimeoutSeconds,
          .prepare = PrepareVerify};
}

Command DeleteCheckpointCommand() {
  return {.spec = {.name = "delete-checkpoint",
                   .positionals = {"CHECKPOINT"},
                   .summary = "deletes a checkpoint, or a step's requested ones",
                   .details = "CHECKPOINT is JOB/step-STEP.GENERATION, or JOB/step-STEP for the "
                              "step's requested ones (`ballast checkpoints` lists them). If the "
                              "service accepts paths from you, it may be an absolute path. A "
                              "checkpoint that is being saved, loaded or verified is not deleted.",
                   .flags = {{"uid", "UID", "only if the job with this uid saved it"}}},
          .timeout_seconds = kTimeoutSeconds,
          .prepare = PrepareDelete};
}

}  // namespace ballast::client::cli
