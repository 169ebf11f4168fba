// What a member tells of its sealed part of a step, and what all members' reports say together.
//
// Pure functions: for the same gradients the summary is the same, whichever member has which ranks.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_JOB_STEP_STEP_REPORT_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_JOB_STEP_STEP_REPORT_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "cpu_optimizer_service/common/job_spec.h"
#include "cpu_optimizer_service/common/layout.h"
#include "cpu_optimizer_service/gradients/part_sums.h"
#include "cpu_optimizer_service/job/step/step_part.h"
#include "cpu_optimizer_service/job/step/step_uses.h"

namespace ballast {

// An element of a gradient as it arrived.
struct GradientElement {
  int parameter = 0;
  int64_t element = 0;
  double value = 0;
  int rank = 0;  // It sent the element.
};

struct StepReport {
  uint32_t micro_steps = 0;
  PartSums sums;
  StepUses uses;
  bool has_empties = false;                        // Chunks that were sent as empty.
  std::optional<GradientElement> non_finite;       // The first, by (group, parameter, element).
  std::optional<NonFiniteReport> before_reducing;  // StepPart::non_finite.
};

struct StepSummary {
  uint32_t micro_steps = 0;
  std::vector<double> group_sums;  // Sums of squares.
  StepUses uses;
  std::string non_finite;  // Names the first non-finite element; empty: all are finite.
};

// Precondition: at least one, all of the same number of micro-steps. INVALID_ARGUMENT: the sums do
// not fit together. RESOURCE_EXHAUSTED: StepUses::Merge.
absl::StatusOr<StepSummary> Summarize(const JobSpec& spec, const Layout& layout,
                                      absl::Span<const StepReport* const> reports);

// A trainable parameter that no rank used. One of no elements has no gradient to get, and is not
// unused for that.
bool IsUnused(const JobSpec& spec, const Layout& layout, const StepUses& uses, int parameter);
// Some is.
bool HasUnused(const JobSpec& spec, const Layout& layout, const StepUses& uses);

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_JOB_STEP_STEP_REPORT_H_
