// plan.
#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "client/cli/cli_command.h"
#include "client/cli/support/plan.h"
#include "cpu_optimizer_service/common/layout.h"
#include "cpu_optimizer_service/common/plan/homes.h"
#include "cpu_optimizer_service/common/status.h"
#include "cpu_optimizer_service/common/system/available_memory.h"
#include "cpu_optimizer_service/common/text/amounts.h"
#include "proto/message_json.h"

namespace ballast::client::cli {
namespace {

// "3", or "a:7070,b:7070".
absl::StatusOr<std::vector<std::string>> MembersOf(const std::string& text) {
  int count = 0;
  if (!absl::SimpleAtoi(text, &count)) return ParseServices(text);
  if (count < 1 || count > static_cast<int>(kMaxMembers)) {
    return absl::InvalidArgumentError(
        absl::StrCat("must be addresses, or a number from 1 to ", kMaxMembers));
  }
  std::vector<std::string> members;
  for (int i = 0; i < count; ++i) members.push_back(absl::StrCat(i));
  return members;
}

absl::StatusOr<Action> PreparePlan(const Arguments& arguments) {
  BALLAST_ASSIGN_OR_RETURN(const std::optional<double> ranks, arguments.Number("world-size"));
  // 0: none is given, and a file's own counts.
  const double world_size = ranks.value_or(0);
  if (ranks.has_value() && !(world_size >= 1 && world_size <= kMaxWorldSize &&
                             world_size == static_cast<int>(world_size))) {
    return absl::InvalidArgumentError(
        absl::StrCat("--world-size must be a whole number from 1 to ", kMaxWorldSize));
  }
  std::vector<int64_t> limits;
  if (arguments.Has("memory")) {
    for (const absl::string_view size : absl::StrSplit(arguments.Get("memory", ""), ',')) {
      absl::StatusOr<int64_t> given = ParseBytes(std::string(size));
      if (!given.ok()) return Annotate(given.status(), "--memory");
      limits.push_back(*given);
    }
  } else {
    limits.push_back(DefaultMemoryLimitBytes());
  }
  std::vector<std::string> members;
  if (arguments.Has("members")) {
    absl::StatusOr<std::vector<std::string>> given = MembersOf(arguments.Get("members", ""));
    if (!given.ok()) return Annotate(given.status(), "--members");
    members = *std::move(given);
  }
  // All of the work is done before the action: an error in the description is wrong usage.
  BALLAST_ASSIGN_OR_RETURN(JobSpec spec,
                           ReadPlanSpec(arguments.positional(0), static_cast<int>(world_size),
                                        std::max(1, static_cast<int>(members.size()))));
  if (!members.empty()) {
    spec.members.clear();
    spec.homes.clear();
    BALLAST_RETURN_IF_ERROR(Annotate(SpreadRanks(members, spec), "--members"));
  }
  BALLAST_ASSIGN_OR_RETURN(const v1::JobPlan plan, MakePlan(std::move(spec), limits));
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
                   .details =
                       "SPEC is a size, COUNT[:bf16|fp16|fp32][:RULE][:state=FORMAT], such as "
                       "7B:bf16 or\n7B:bf16:state=8bit, or a file with a job as CreateJob takes it "
                       "(ballast.v1.Job in JSON,\npartitions optional). RULE is adam (default), "
                       "adam:amsgrad, sgd, sgd:momentum, lion, adagrad,\nsignsgd or muon. FORMAT "
                       "of the state is fp32 (default), bf16 or 8bit. A service of this\nversion "
                       "allocates by these figures. The exit code is 1 if the job does not fit.",
                   .flags = {{"members", "N|HOST:PORT,...",
                              "services that hold the job together (default 1, or the file's)"},
                             {"memory", "SIZE[,...]",
                              "the service's --memory-limit, or each member's (default: ballastd's "
                              "default on this host)"},
                             {"world-size", "N",
                              "ranks (default: one for each service, or the file's)"}}},
          .asks_service = false,
          .prepare = PreparePlan};
}

}  // namespace ballast::client::cli
