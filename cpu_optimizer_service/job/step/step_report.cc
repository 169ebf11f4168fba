#include "cpu_optimizer_service/job/step/step_report.h"

#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/status.h"

namespace ballast {
namespace {

std::string DescribeNonFinite(const JobSpec& spec, absl::Span<const StepReport* const> reports) {
  const auto group_of = [&](const GradientElement& found) {
    return spec.layout.parameters[found.parameter].group;
  };
  const GradientElement* first = nullptr;
  const NonFiniteReport* before_reducing = nullptr;
  for (const StepReport* const report : reports) {
    if (const auto& found = report->non_finite; found.has_value()) {
      if (first == nullptr || std::tuple(group_of(*found), found->parameter, found->element) <
                                  std::tuple(group_of(*first), first->parameter, first->element)) {
        first = &*found;
      }
    }
    if (const auto& found = report->before_reducing; found.has_value()) {
      if (before_reducing == nullptr ||
          std::pair(found->micro_step, found->rank) <
              std::pair(before_reducing->micro_step, before_reducing->rank)) {
        before_reducing = &*found;
      }
    }
  }
  if (first == nullptr) return "";
  // Nearer to the cause than what has been summed over ranks.
  if (before_reducing != nullptr) {
    const auto& [parameter, element, value] = before_reducing->found;
    return absl::StrCat("gradient of ", spec.layout.parameters[parameter].name, " is ", value,
                        " at element ", element, ", found on rank ", before_reducing->rank,
                        " in micro-step ", before_reducing->micro_step, " before reducing");
  }
  return absl::StrCat("gradient of ", spec.layout.parameters[first->parameter].name, " is ",
                      first->value, " at element ", first->element, ", from rank ", first->rank);
}

}  // namespace

absl::StatusOr<StepSummary> Summarize(const JobSpec& spec, const Layout& layout,
                                      absl::Span<const StepReport* const> reports) {
  StepSummary summary = {.micro_steps = reports.front()->micro_steps,
                         .group_sums = {},
                         .uses = reports.front()->uses,
                         .non_finite = DescribeNonFinite(spec, reports)};
  for (const StepReport* const report : reports.subspan(1)) {
    if (summary.uses.Merge(report->uses)) continue;
    return absl::ResourceExhaustedError(
        absl::StrCat("the used parameters change more than ", kMaxUsedSets,
                     " times; set all_used and send zeros for unused ones, or use fewer "
                     "micro-steps"));
  }
  std::vector<const PartSums*> sums;
  for (const StepReport* const report : reports) sums.push_back(&report->sums);
  BALLAST_ASSIGN_OR_RETURN(summary.group_sums, GroupSums(layout, sums));
  return summary;
}

bool IsUnused(const JobSpec& spec, const Layout& layout, const StepUses& uses, int parameter) {
  return spec.layout.parameters[parameter].trainable && layout.place(parameter).elements > 0 &&
         !uses.used(parameter);
}

bool HasUnused(const JobSpec& spec, const Layout& layout, const StepUses& uses) {
  for (int p = 0; p < static_cast<int>(spec.layout.parameters.size()); ++p) {
    if (IsUnused(spec, layout, uses, p)) return true;
  }
  return false;
}

}  // namespace ballast
