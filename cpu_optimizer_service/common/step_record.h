// The record of a step: its outcome and the values it was computed with.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_STEP_RECORD_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_STEP_RECORD_H_

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "cpu_optimizer_service/common/gradient_norm.h"
#include "cpu_optimizer_service/common/hyper_parameters.h"

namespace ballast {

inline constexpr size_t kRecentSteps = 64;    // How many decisions a job remembers.
inline constexpr size_t kRecordedNames = 64;  // Unused parameters that a step's record names.

// Why a step is skipped. kOther: only skip_reason says it. kNotKept: OnAbort::kSkip.
enum class SkipCause : uint8_t { kOther, kGradient, kMultiplier, kState, kAbandoned, kNotKept };
inline constexpr size_t kSkipCauses = 6;

// What the ranks get about a step that all have sealed, before they vote.
struct StepNorm {
  uint64_t step = 0;
  uint32_t attempt = 0;
  double norm = 0;                  // Of the unscaled, divided gradient; may be inf or NaN.
  std::vector<double> group_norms;  // By group.
  std::string non_finite;           // Names the first non-finite element; empty: all are finite.
  std::vector<std::string> unused_parameters;
  int64_t more_unused_parameters = 0;  // On the wire: beyond the first kRecordedNames.
};

struct StepOutcome {
  uint64_t step = 0;
  Decision decision;
  std::string skip_reason;  // Why decision.apply is false; names the first non-finite parameter.
  SkipCause skip_cause = SkipCause::kOther;
  std::vector<std::string> unused_parameters;
  std::string left;  // Which matrices the second round has left as they were, and why; empty: none.
};

// Updates computed before their decision.
struct SpeculationCounts {
  int64_t speculated = 0;
  int64_t published = 0;  // Those that became the chunk's state.
  int64_t redone = 0;     // Those dropped and computed again. Neither counts skipped steps.
};

// The parts of a step's time, in seconds, one after another.
struct StepTimes {
  double gathering = 0;  // From its first rank's begin to its first seal: gradients come.
  double awaiting = 0;   // From the first seal to the last: ranks wait for the slowest.
  double deciding = 0;   // From the last seal to the decision.
  double updating = 0;   // From the decision to the commit.
  double total() const { return gathering + awaiting + deciding + updating; }
};

// Durations by length. Bucket i counts those of at most kBounds[i] seconds and more than the bound
// before; the last bucket counts longer ones.
struct DurationHistogram {
  static constexpr std::array<double, 16> kBounds = {
      0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100};
  std::array<uint64_t, kBounds.size() + 1> counts = {};
  double sum_seconds = 0;

  void Add(double seconds) {
    ++counts[std::lower_bound(kBounds.begin(), kBounds.end(), seconds) - kBounds.begin()];
    sum_seconds += seconds;
  }
};

// About all steps that a job has decided since it was created.
struct StepStatistics {
  uint64_t clipped_steps = 0;
  std::array<uint64_t, kSkipCauses> skips = {};  // By SkipCause.
  DurationHistogram gathering;                   // The parts of StepTimes.
  DurationHistogram awaiting;
  DurationHistogram deciding;
  DurationHistogram updating;

  uint64_t not_kept_steps() const { return skips[static_cast<size_t>(SkipCause::kNotKept)]; }
};

struct StepRecord {
  StepOutcome outcome;
  SpeculationCounts speculation;  // Of this step, in chunks.
  uint32_t micro_steps = 0;
  double loss_scale = 1;
  StepTimes times;                                // Zeros in a record that was loaded.
  Clipping voted;                                 // The ranks' votes about clipping.
  bool abandoned = false;                         // The ranks voted to abandon the step.
  std::vector<HyperParameters> hyper_parameters;  // One per group, as used.
};

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_STEP_RECORD_H_
