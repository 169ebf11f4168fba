// groups, set-group.
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "client/calls/service.h"
#include "client/cli/cli_command.h"
#include "client/cli/cli_history.h"
#include "client/cli/cli_print.h"
#include "cpu_optimizer_service/common/hyper_parameters.h"
#include "cpu_optimizer_service/common/status.h"
#include "proto/convert.h"
#include "proto/message_json.h"

namespace ballast::client::cli {
namespace {

absl::StatusOr<Action> PrepareGroups(const Arguments& arguments) {
  return [job = arguments.positional(0), history = arguments.Has("history")](
             Service& service, bool json) -> absl::StatusOr<std::string> {
    BALLAST_ASSIGN_OR_RETURN(const v1::Job response, service.GetJob(job, false));
    if (json) return proto::ToJson(response);
    return history ? HistoryText(response) : GroupsText(response);
  };
}

absl::StatusOr<HyperParameterOverrides> ChangesOf(const Arguments& arguments) {
  HyperParameterOverrides changes;
  absl::Status status;
  ForEachHyperParameter(
      [&]<typename T>(const char* name, std::optional<T>& change) {
        const std::string flag = absl::StrReplaceAll(name, {{"_", "-"}});
        absl::StatusOr<std::optional<T>> given;
        if constexpr (std::is_same_v<T, bool>) {
          given = arguments.Bool(flag);
        } else if constexpr (std::is_same_v<T, int32_t>) {
          given = arguments.Integer(flag);
        } else {
          given = arguments.Number(flag);
        }
        status.Update(given.status());
        if (given.ok()) change = *given;
      },
      changes);
  BALLAST_RETURN_IF_ERROR(status);
  if (changes == HyperParameterOverrides()) {
    return absl::InvalidArgumentError("nothing to change: give at least one of --lr, --beta1, ...");
  }
  return changes;
}

absl::StatusOr<Action> PrepareSetGroup(const Arguments& arguments) {
  BALLAST_ASSIGN_OR_RETURN(const HyperParameterOverrides changes, ChangesOf(arguments));
  return [job = arguments.positional(0), group = arguments.positional(1), changes](
             Service& service, bool json) -> absl::StatusOr<std::string> {
    v1::UpdateGroupRequest request;
    request.set_name(proto::GroupName(job, group));
    *request.mutable_changes() = proto::ToProto(changes);
    BALLAST_ASSIGN_OR_RETURN(const auto response,
                             service.Call<v1::ParamGroup>("JobService/UpdateGroup", request));
    if (json) return proto::ToJson(response);
    return absl::StrCat(GroupText(response), "\nin force from the next step that begins\n");
  };
}

}  // namespace

Command GroupsCommand() {
  return {.spec = {.name = "groups",
                   .positionals = {"JOB"},
                   .summary = "the param groups and their hyper-parameters",
                   .details = "",
                   .flags = {{"history", "", "the values of the last 64 steps, newest last"}}},
          .prepare = PrepareGroups};
}

Command SetGroupCommand() {
  return {.spec = {.name = "set-group",
                   .positionals = {"JOB", "GROUP"},
                   .summary = "changes hyper-parameters from the next step on",
                   .details =
                       "A group has the hyper-parameters of its rule; ballast groups shows them. "
                       "Other values do not\nchange. amsgrad and "
                       "initial_accumulator_value are fixed when a job is created. "
                       "If the trainer sends a value with each step, as ballast-worker "
                       "sends lr, the trainer's value counts.",
                   .flags = {{"lr", "NUMBER", "learning rate"},
                             {"beta1", "NUMBER", "Adam, Lion: decay of exp_avg"},
                             {"beta2", "NUMBER", "Adam: decay of exp_avg_sq; Lion: of exp_avg"},
                             {"eps", "NUMBER",
                              "Adam, Adagrad: added to the denominator; Muon: the least norm"},
                             {"weight-decay", "NUMBER", "weight decay"},
                             {"decoupled-weight-decay", "BOOL", "true: AdamW; false: L2 (Adam)"},
                             {"bias-correction", "BOOL", "Adam: true or false"},
                             {"momentum", "NUMBER", "SGD, Muon: decay of momentum_buffer"},
                             {"dampening", "NUMBER", "SGD: for momentum"},
                             {"nesterov", "BOOL", "SGD, Muon: true or false"},
                             {"lr-decay", "NUMBER", "Adagrad: decay of lr"},
                             {"ns-steps", "N", "Muon: steps of Newton-Schulz"},
                             {"ns-a", "NUMBER", "Muon: its coefficients"},
                             {"ns-b", "NUMBER", "Muon: its coefficients"},
                             {"ns-c", "NUMBER", "Muon: its coefficients"},
                             {"match-rms-adamw", "BOOL",
                              "Muon: true: lr for updates as large as AdamW's"},
                             {"maximize", "BOOL", "true or false"}}},
          .prepare = PrepareSetGroup};
}

}  // namespace ballast::client::cli
