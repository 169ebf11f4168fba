// restore.
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "ballast/v1/tool.pb.h"
#include "client/calls/restore.h"
#include "client/calls/service.h"
#include "client/cli/cli_command.h"
#include "cpu_optimizer_service/common/status.h"
#include "proto/convert.h"
#include "proto/message_json.h"

namespace ballast::client::cli {
namespace {

absl::StatusOr<Action> PrepareRestore(const Arguments& arguments) {
  return [job = arguments.positional(0), force = arguments.Has("force")](
             Service& service, bool json) -> absl::StatusOr<std::string> {
    BALLAST_ASSIGN_OR_RETURN(const Restored restored, Restore(service, job, force));
    v1::RestoredJob message;
    message.set_name(proto::JobName(job));
    message.set_epoch(restored.epoch);
    message.set_directory(restored.checkpoint.directory());
    message.set_step(restored.checkpoint.step());
    message.mutable_ended()->Assign(restored.ended.begin(), restored.ended.end());
    message.mutable_unknown()->Assign(restored.unknown.begin(), restored.unknown.end());
    if (json) return proto::ToJson(message);
    const std::string ended = restored.ended.empty()
                                  ? "as you say"
                                  : absl::StrCat("at ", absl::StrJoin(restored.ended, ", "));
    return absl::StrCat(
        "the old job ", job, " is over, ", ended, "; its name is free, in epoch ", restored.epoch,
        "\n", restored.unknown.empty() ? "" : "no answer: ", absl::StrJoin(restored.unknown, ", "),
        restored.unknown.empty() ? "" : "\n", "start its trainers, to resume from step ",
        restored.checkpoint.step(), " in ", restored.checkpoint.directory(), "\n");
  };
}

}  // namespace

Command RestoreCommand() {
  return {
      .spec =
          {.name = "restore",
           .positionals = {"JOB"},
           .summary =
               "in a cluster, after a host is lost: ends the old job for its newest checkpoint",
           .details =
               "The services of the job that answer close their parts. Every decision needs every "
               "part, so the\nold job can decide nothing any more. Then trainers that resume begin "
               "a "
               "new job of the name, in a\nhigher epoch. Refused while the job is whole, or where "
               "no "
               "checkpoint is found.",
           .flags = {{"force", "",
                      "no service of the job answers, and their hosts are dead: an old lead that "
                      "is only cut off would go on training"}}},
      .timeout_seconds = 60,
      .prepare = PrepareRestore};
}

}  // namespace ballast::client::cli
