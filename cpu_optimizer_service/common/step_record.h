// What is remembered of a step: its outcome and what it was computed with.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_STEP_RECORD_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_STEP_RECORD_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "cpu_optimizer_service/common/gradient_norm.h"
#include "cpu_optimizer_service/common/hyper_parameters.h"

namespace ballast {

inline constexpr size_t kRecentSteps = 64;    // How many decisions a job remembers.
inline constexpr size_t kRecordedNames = 64;  // Unused parameters that a record of a step names.

struct StepOutcome {
  uint64_t step = 0;
  Decision decision;
  std::string skip_reason;  // Why decision.apply is false; names the first non-finite parameter.
  std::vector<std::string> unused_parameters;
};

// Updates computed before their decision.
struct SpeculationCounts {
  int64_t speculated = 0;
  int64_t published = 0;  // Of those, the ones that became the chunk's state,
  int64_t redone = 0;     // and the ones dropped and computed again; of skipped steps, neither.
};

struct StepRecord {
  StepOutcome outcome;
  SpeculationCounts speculation;  // Of this step, in chunks.
  uint32_t micro_steps = 0;
  double loss_scale = 1;
  std::vector<HyperParameters> hyper_parameters;  // One per group, as used.
};

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_STEP_RECORD_H_
