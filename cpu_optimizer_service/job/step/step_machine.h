// A member's half of a step as a machine: its ranks' input goes in, actions come out. The other half
// is the lead's (step_lead.h).
//
//   kNone --first begin--> kOpen --seal by all--> kSealed --sums, and votes--> kDecided --> kNone
//                            ^                      |  ^
//                            |        it is reported|  |the lead goes on with it
//                            +---- discard ----- kReported
//
// With several members a sealed part is reported, and waits for the lead. A job on one host waits
// only for votes. A decided step has no way back. An undecided one may be dropped: nothing of it has
// shown.
//
// Pure: no lock, no thread, no clock, no memory of gradients. Thread-compatible.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_JOB_STEP_STEP_MACHINE_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_JOB_STEP_STEP_MACHINE_H_

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "cpu_optimizer_service/common/job_spec.h"
#include "cpu_optimizer_service/common/layout.h"
#include "cpu_optimizer_service/common/step_settings.h"
#include "cpu_optimizer_service/job/step/seal_check.h"
#include "cpu_optimizer_service/job/step/seal_refusal.h"
#include "cpu_optimizer_service/job/step/step_agreement.h"
#include "cpu_optimizer_service/job/step/step_part.h"

namespace ballast {

// A rank's input beside gradients, seal and vote: enough to bring the machine to the same state
// again.
struct StepWord {
  enum class Kind : uint8_t { kBegin, kEndMicroStep, kEmpty, kDiscard, kLive };
  Kind kind = Kind::kBegin;
  int rank = 0;  // kLive: whose discard has begun the attempt, at any member.
  uint64_t step = 0;
  StepSettings settings;           // kBegin, unless it sets the terms.
  std::optional<StepTerms> terms;  // kBegin, by the rank that sets them, with its settings.
  uint32_t micro_step = 0;         // kEndMicroStep.
  UsedParameters used;             // kEndMicroStep.
  int chunk = 0;                   // kEmpty.
  uint32_t begin = 0;              // kEmpty: micro-steps [begin, end).
  uint32_t end = 0;
  uint32_t attempt = 0;  // kLive: the lead has made it the live one.
};

// The step before: the machine's starting point.
struct StepBefore {
  uint64_t step = 0;
  uint32_t micro_steps = 0;  // 0: unknown.
  const StepVote& vote;
  const std::vector<HyperParameters>& hyper_parameters;  // One per group, in force.
};

// The consequences of an event. The words are kept before the event is answered.
struct StepEffects {
  struct VoteRefused {
    StepAttempt at;
    absl::Status why;
  };
  struct NormIsKnown {};
  struct ToRank {
    int rank = 0;
    std::variant<SealRefusal, VoteRefused, NormIsKnown> what;
  };

  std::vector<StepWord> words;
  bool opened = false;           // The step has begun.
  bool has_terms = false;        // The live attempt has its terms.
  bool reopened = false;         // A reported step is open again.
  bool sealed = false;           // All ranks have sealed.
  bool voted = false;            // All ranks have voted the same, after the norm.
  std::optional<int> forgotten;  // Everything that this rank gave is dropped.
  bool live_is_over = false;     // Computations of the live attempt cannot be decided.
  std::vector<ToRank> told;
};

class StepMachine {
 public:
  // Both outlive it.
  StepMachine(const JobSpec& spec, const Layout& layout)
      : spec_(spec),
        layout_(layout),
        part_(layout.world_size(), static_cast<int64_t>(spec.layout.parameters.size()),
              static_cast<int64_t>(layout.chunks().size())) {}

  enum class Stage : uint8_t { kNone, kOpen, kSealed, kReported, kDecided };
  Stage stage() const { return stage_; }
  bool between_steps() const { return stage_ == Stage::kNone; }
  // Null: between steps.
  const StepAgreement* agreement() const { return agreement_.has_value() ? &*agreement_ : nullptr; }
  // While ranks can still take back their input. Null otherwise.
  const StepAgreement* undecided() const {
    return stage_ == Stage::kDecided ? nullptr : agreement();
  }
  const StepPart& part() const { return part_; }
  const Ledger& ledger() const { return part_.ledger(); }
  // For accepted contributions: CheckContribution before, in the same turn or an earlier one.
  void Added(int chunk, uint32_t micro_step_end, bool final) {
    part_.ledger().Advance(chunk, micro_step_end, final);
  }

  // ---- The ranks' input. Errors are invalid requests. They change nothing, except that a rank
  // whose seal is refused has not sealed.
  // FAILED_PRECONDITION if `step`, which the rank begins or discards (`does`), is neither open nor
  // may be opened.
  absl::Status CheckIsNext(const StepBefore& before, int rank, absl::string_view does,
                           uint64_t step) const;
  absl::Status Begin(const StepBefore& before, int rank, StepAttempt at,
                     const StepSettings& settings, StepEffects& effects);
  enum class Wants : uint8_t { kIt, kRepeat, kDiscarded };
  // How to treat micro-steps [begin, end) of the rank's chunk.
  absl::StatusOr<Wants> CheckContribution(const StepBefore& before, int rank, StepAttempt at,
                                          int chunk, uint32_t begin, uint32_t end) const;
  // These micro-steps of the chunk, already checked, are empty.
  void Empty(int rank, int chunk, uint32_t begin, uint32_t end, StepEffects& effects);
  absl::Status EndMicroStep(const StepBefore& before, int rank, StepAttempt at, uint32_t micro_step,
                            UsedParameters used, StepEffects& effects);
  // A seal's questions about the memory of gradients.
  struct Looks {
    absl::FunctionRef<bool(int chunk)> half_added;  // By a crashed process.
    HasGradient has_gradient;
  };
  // A refusal leaves the step open, and this rank unsealed; nullopt: accepted.
  absl::StatusOr<std::optional<SealRefusal>> Seal(const StepBefore& before, int rank,
                                                  StepAttempt at, uint32_t micro_steps,
                                                  const std::optional<StepVote>& vote,
                                                  const Looks& looks, StepEffects& effects);
  absl::Status Vote(const StepBefore& before, int rank, StepAttempt at, const StepVote& vote,
                    StepEffects& effects);
  // True: done, now or by an earlier call. False: too late, the step is decided.
  absl::StatusOr<bool> Discard(const StepBefore& before, int rank, StepAttempt at,
                               StepEffects& effects);
  // Repeats what an earlier process has kept.
  absl::Status Replay(const StepBefore& before, const StepWord& word, StepEffects& effects);
  void SetTakenOver() { agreement_->SetTakenOver(); }

  // ---- Results of the sealed part.
  // Its sums of squares are known.
  void SetSummed() { agreement_->SetSummed(); }
  // The vote of all ranks, if they have cast the same.
  std::optional<StepVote> CommonVote() const;
  // The norm is known. True: all have voted the same. False: votes are missing, or have been voided
  // because they differ.
  bool NormIsKnown(StepEffects& effects);
  // The part waits for the lead; the lead goes on with it.
  void AwaitLead();
  void GoOn();
  void Decide(const StepVote& vote);  // Of all ranks.
  bool norm_is_known() const { return norm_is_known_; }

  // ---- The lead's words.
  // Another attempt is live, which a rank of another member has begun.
  void RaiseLive(const StepBefore& before, StepAttempt at, int by, StepEffects& effects);
  // No rank has sealed, for this reason.
  void Refuse(SealRefusal why, StepEffects& effects);
  // Of the reported part: is it complete with the uses of all ranks?
  std::optional<SealRefusal> CheckAllUses(const StepUses& uses, HasGradient has_gradient) const;
  // Votes of members differ: all vote again.
  void VoteAgain(const absl::Status& why, StepEffects& effects);
  // The part as it was reported by an earlier process.
  void TakeOverReport(uint32_t micro_steps, const std::optional<StepVote>& vote);

  // The step is over, or dropped: no event finds it any more. Clear empties the part.
  void Drop();
  void Clear() { part_.Clear(); }

  // ---- Lost steps, which are skipped.
  // Whether the step can be skipped: all ranks have begun it.
  bool CanBeSkipped() const;
  void GiveUp(uint64_t step) { given_up_ = step; }
  // Whether the step was lost and skipped, and the rank may not know yet: its late input is
  // dropped.
  bool WasGivenUp(const StepBefore& before, uint64_t step, int rank) const;

 private:
  absl::Status CheckInAttempt(int rank, uint32_t attempt) const;
  absl::Status CheckIsOpen(const StepBefore& before, uint64_t step) const;
  absl::StatusOr<StepTerms> MakeTerms(const StepBefore& before, uint64_t step,
                                      const StepSettings& settings) const;
  void Open(uint64_t step, StepEffects& effects);
  // For a repeated seal, from a stream that may have missed the norm.
  absl::Status RepeatSeal(int rank, const std::optional<StepVote>& vote, StepEffects& effects);
  // A reported step is open again.
  void Reopen(StepEffects& effects);
  // The last vote makes the decision possible, or voids all votes.
  absl::Status TakeVote(int rank, const StepVote& vote, StepEffects& effects);
  // If votes differ: voids them, and tells all ranks.
  bool VotesAgree(StepEffects& effects);
  void TellNorm(const std::vector<int>& ranks, StepEffects& effects) const;
  bool is_alone() const { return static_cast<int>(layout_.ranks().size()) == layout_.world_size(); }
  StepGiven Given(const StepUses& uses) const { return {spec_, layout_, *agreement_, part_, uses}; }
  StepGiven Given() const { return Given(part_.uses()); }

  const JobSpec& spec_;
  const Layout& layout_;
  Stage stage_ = Stage::kNone;
  std::optional<StepAgreement> agreement_;
  StepPart part_;
  bool norm_is_known_ = false;  // Of the reported part.
  bool is_report_taken_over_ = false;
  uint64_t given_up_ = 0;  // The last one; 0: none.
};

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_JOB_STEP_STEP_MACHINE_H_
