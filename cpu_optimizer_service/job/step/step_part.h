// A member's half of a step: the input of its own ranks. It records which micro-steps of which
// chunks have arrived, which have ended, and the parameters used in them.
//
// Pure: no lock, no thread, no clock, no memory of gradients.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_JOB_STEP_STEP_PART_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_JOB_STEP_STEP_PART_H_

#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "cpu_optimizer_service/common/step_settings.h"
#include "cpu_optimizer_service/gradients/ledger.h"
#include "cpu_optimizer_service/job/step/step_uses.h"

namespace ballast {

// A worker's finding when it checked its gradient before reducing.
struct NonFiniteReport {
  int rank = 0;
  uint32_t micro_step = 0;
  UsedParameters::NonFinite found;
};

class StepPart {
 public:
  StepPart(int world_size, int64_t parameters, int64_t chunks)
      : ledger_(chunks), ranks_(world_size), uses_(parameters) {}

  struct Rank {
    uint32_t micro_steps_ended = 0;
    std::optional<uint32_t> reached_nothing;  // The first one that ended without a used parameter.
  };
  const Rank& rank(int rank) const { return ranks_[rank]; }
  Ledger& ledger() { return ledger_; }
  const Ledger& ledger() const { return ledger_; }

  // In order, each once: FAILED_PRECONDITION. `is_live`: the rank is in the live attempt; otherwise
  // it will discard, and its uses are not kept. RESOURCE_EXHAUSTED: the micro-steps have too many
  // different sets of used parameters; then this one has not ended.
  absl::Status EndMicroStep(uint64_t step, int rank, bool is_live, uint32_t micro_step,
                            const UsedParameters& used);
  // `chunk` was sent as empty for micro-steps [begin, end).
  void RecordEmpty(int chunk, uint32_t begin, uint32_t end);

  // Drops everything that the rank has given.
  void Forget(int rank, absl::Span<const int> chunks);
  // Another attempt is live: drops the uses of the one before.
  void ForgetLive();
  // Drops everything of the step.
  void Clear();

  // In the live attempt.
  const StepUses& uses() const { return uses_; }
  struct MicroSteps {
    uint32_t begin = 0;
    uint32_t end = 0;
  };
  // Empty contributions, by chunk; neighbours merged.
  const std::map<int, std::vector<MicroSteps>>& empties() const { return empties_; }
  // That of the lowest micro-step and, within it, of the lowest rank.
  const std::optional<NonFiniteReport>& non_finite() const { return non_finite_; }

 private:
  Ledger ledger_;
  std::vector<Rank> ranks_;
  StepUses uses_;
  std::map<int, std::vector<MicroSteps>> empties_;
  std::optional<NonFiniteReport> non_finite_;
};

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_JOB_STEP_STEP_PART_H_
