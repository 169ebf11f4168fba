// groups, set-group.
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "client/cli/cli_command.h"
#include "client/cli/cli_history.h"
#include "client/cli/cli_json.h"
#include "client/cli/cli_print.h"
#include "client/cli/cli_service.h"
#include "cpu_optimizer_service/common/hyper_parameters.h"
#include "cpu_optimizer_service/common/status.h"
#include "cpu_optimizer_service/common/text/suggestions.h"
#include "proto/convert.h"

namespace ballast::client::cli {
namespace {

absl::StatusOr<Action> PrepareGroups(const Arguments& arguments) {
  return [job = arguments.positional(0), history = arguments.Has("history")](
             Service& service, bool json) -> absl::StatusOr<std::string> {
    BALLAST_ASSIGN_OR_RETURN(const v1::Job response, service.GetJob(job, false));
    if (history) return json ? Dump(HistoryToJson(response)) : HistoryText(response);
    return json ? Dump(GroupsToJson(response)) : GroupsText(response);
  };
}

absl::StatusOr<HyperParameterOverrides> ChangesOf(const Arguments& arguments) {
  HyperParameterOverrides changes;
  BALLAST_ASSIGN_OR_RETURN(changes.lr, arguments.Number("lr"));
  BALLAST_ASSIGN_OR_RETURN(changes.beta1, arguments.Number("beta1"));
  BALLAST_ASSIGN_OR_RETURN(changes.beta2, arguments.Number("beta2"));
  BALLAST_ASSIGN_OR_RETURN(changes.eps, arguments.Number("eps"));
  BALLAST_ASSIGN_OR_RETURN(changes.weight_decay, arguments.Number("weight-decay"));
  BALLAST_ASSIGN_OR_RETURN(changes.decoupled_weight_decay,
                           arguments.Bool("decoupled-weight-decay"));
  BALLAST_ASSIGN_OR_RETURN(changes.bias_correction, arguments.Bool("bias-correction"));
  BALLAST_ASSIGN_OR_RETURN(changes.maximize, arguments.Bool("maximize"));
  if (changes == HyperParameterOverrides()) {
    return absl::InvalidArgumentError("nothing to change: give at least one of --lr, --beta1, ...");
  }
  // The defaults are valid, so an error is about one of the changes.
  BALLAST_RETURN_IF_ERROR(Validate(Apply(HyperParameters(), changes)));
  return changes;
}

absl::Status SuggestGroup(Service& service, const absl::Status& status, const std::string& job,
                          const std::string& group) {
  if (!absl::IsNotFound(status)) return status;
  // GetJob's error names the job, if that is what was not found.
  BALLAST_ASSIGN_OR_RETURN(const v1::Job there, service.GetJob(job, false));
  std::vector<std::string> names;
  for (const v1::ParamGroup& known : there.groups()) {
    names.push_back(BareName(known.name()));
    // The group is there: the first error says what else is wrong.
    if (names.back() == group) return status;
  }
  return absl::NotFoundError(
      absl::StrCat("job ", job, " has no group ", group, Suggestion(group, names)));
}

absl::StatusOr<Action> PrepareSetGroup(const Arguments& arguments) {
  BALLAST_ASSIGN_OR_RETURN(const HyperParameterOverrides changes, ChangesOf(arguments));
  return [job = arguments.positional(0), group = arguments.positional(1), changes](
             Service& service, bool json) -> absl::StatusOr<std::string> {
    v1::UpdateGroupRequest request;
    request.set_name(proto::GroupName(job, group));
    *request.mutable_changes() = proto::ToProto(changes);
    const auto response = service.Call(service.jobs(), &v1::JobService::Stub::UpdateGroup, request);
    if (!response.ok()) return SuggestGroup(service, response.status(), job, group);
    if (json) return Dump(ToJson(*response));
    return absl::StrCat(GroupText(*response), "\nin force from the next step that begins\n");
  };
}

}  // namespace

Command GroupsCommand() {
  return {
      .spec = {.name = "groups",
               .positionals = {"JOB"},
               .summary = "the param groups and their hyper-parameters",
               .details = "",
               .flags = {{"history", "", "the values that the last 64 steps used, newest last"}}},
      .prepare = PrepareGroups};
}

Command SetGroupCommand() {
  return {
      .spec = {.name = "set-group",
               .positionals = {"JOB", "GROUP"},
               .summary = "changes hyper-parameters from the next step on",
               .details =
                   "A value that is not named stays. amsgrad is fixed when a job is created. What "
                   "the trainer itself brings with each step, as ballast-worker brings lr, stays "
                   "the trainer's.",
               .flags = {{"lr", "NUMBER", "learning rate"},
                         {"beta1", "NUMBER", "decay of exp_avg"},
                         {"beta2", "NUMBER", "decay of exp_avg_sq"},
                         {"eps", "NUMBER", "added to the denominator"},
                         {"weight-decay", "NUMBER", "weight decay"},
                         {"decoupled-weight-decay", "BOOL", "true: AdamW; false: L2 (Adam)"},
                         {"bias-correction", "BOOL", "true or false"},
                         {"maximize", "BOOL", "true or false"}}},
      .prepare = PrepareSetGroup};
}

}  // namespace ballast::client::cli
