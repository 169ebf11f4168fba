#include "server/access/method_rules.h"

namespace ballast::server {
namespace {

struct Rule {
  absl::string_view method;
  Role role;
};

// All messages of a stream are of the job that its first one names, and take the same role.
constexpr Rule kRules[] = {
    {"JobService.GetJob", Role::kViewer},
    {"JobService.ListJobs", Role::kViewer},  // Of those jobs of which the caller is one.
    {"JobService.TraceJob", Role::kViewer},
    {"JobService.GetHistory", Role::kViewer},
    {"JobService.CreateJob", Role::kTrainer},
    {"JobService.AttachWorker", Role::kTrainer},
    {"JobService.CloseJob", Role::kOperator},
    {"JobService.AbortStep", Role::kOperator},
    {"JobService.UndoStep", Role::kOperator},
    {"JobService.UpdateGroup", Role::kOperator},
    {"MemberService.Follow", Role::kMember},
    {"TrainService.Train", Role::kTrainer},
    {"TrainService.UploadWeights", Role::kTrainer},
    {"TrainService.ReadWeights", Role::kViewer},
    {"StateService.ReadState", Role::kViewer},
    {"StateService.SummarizeState", Role::kViewer},
    {"StateService.ListCheckpoints", Role::kViewer},  // As ListJobs.
    {"StateService.SaveJob", Role::kTrainer},         // Replaces nothing.
    {"StateService.LoadJob", Role::kOperator},
    {"StateService.WriteState", Role::kOperator},
    {"StateService.VerifyCheckpoints", Role::kOperator},
    {"StateService.DeleteCheckpoint", Role::kOperator},
    {"DiagnosticsService.DescribeService", Role::kOperator},  // Of all jobs.
};

}  // namespace

std::optional<Role> RuleOf(absl::string_view method) {
  for (const Rule& rule : kRules) {
    if (rule.method == method) return rule.role;
  }
  return std::nullopt;
}

}  // namespace ballast::server
