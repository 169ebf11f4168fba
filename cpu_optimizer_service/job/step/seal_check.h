// Whether a step is complete: pure functions over the ranks' input, without lock, clock or memory
// of gradients. HasGradient tells what a gradient holds.
//
// A refusal leaves the step open. It names the rank, the micro-step and the missing parameters. It
// says whether to send and seal again, or to abort the step and repeat it.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_JOB_STEP_SEAL_CHECK_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_JOB_STEP_SEAL_CHECK_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "cpu_optimizer_service/common/job_spec.h"
#include "cpu_optimizer_service/common/layout.h"
#include "cpu_optimizer_service/common/step_settings.h"
#include "cpu_optimizer_service/gradients/ledger.h"
#include "cpu_optimizer_service/job/step/seal_refusal.h"
#include "cpu_optimizer_service/job/step/step_agreement.h"
#include "cpu_optimizer_service/job/step/step_part.h"

namespace ballast {

// The checks' input. All of it outlives them.
struct StepGiven {
  const JobSpec& spec;
  const Layout& layout;
  const StepAgreement& agreement;
  const StepPart& part;
  const StepUses& uses;  // By all ranks.
};

// Whether a piece, which may be padding, has a non-zero gradient.
using HasGradient = absl::FunctionRef<bool(const ChunkPiece& piece)>;

// The refusal of a seal of `attempt`, which the rank or another rank, `by`, has discarded.
SealRefusal RefuseDiscarded(uint64_t step, int rank, uint32_t attempt, int by);

// At a rank's seal. Its attempt can still be decided. If required, its backward reached a parameter
// in every micro-step. The ledger has all `micro_steps` of each of its chunks.
std::optional<SealRefusal> CheckRank(const StepGiven& given, int rank, uint32_t micro_steps);

// At the last seal of the member's ranks. They sealed the same number. Padding is zero.
std::optional<SealRefusal> CheckPart(const StepGiven& given, int last_rank,
                                     HasGradient has_gradient);
// With the uses of all ranks. No parameter with a gradient came as empty. A parameter that no rank
// used has no gradient, and is allowed to have none.
std::optional<SealRefusal> CheckUses(const StepGiven& given, int last_rank,
                                     HasGradient has_gradient);

// Parameters in chunks of the rank that are not at `micro_step`; the first kMissingNames.
std::vector<std::string> NamesBehind(const JobSpec& spec, const Layout& layout,
                                     const Ledger& ledger, int rank, uint32_t micro_step);

// INVALID_ARGUMENT if a loss scale, a divisor or both together give no positive normal fp32
// multiplier.
absl::Status CheckScale(const GradientScale& scale, int group_count);
// INVALID_ARGUMENT if a parameter is not a trainable one of the job, or a reported value is finite.
absl::Status CheckUsed(const JobSpec& spec, const Layout& layout, int rank,
                       const UsedParameters& used);

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_JOB_STEP_SEAL_CHECK_H_
