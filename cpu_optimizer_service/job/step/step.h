// One step as a state machine. Each state is a type of its own, made only by the move that leads to
// it, and each move consumes the state that it leaves, so an illegal move does not compile:
//
//   OpenStep --Seal by every rank, Close--> SealedStep --Decide--> DecidedStep --> committed
//     | ^                                      | |
//     | +-- Reopen: a rank discards its seal --+ |
//     +--dropped: aborted                        +--dropped: aborted
//
// A DecidedStep has no way back: after the decision there is only roll-forward. Dropping an open or
// sealed step is the abort; nothing of it has shown.
//
// Each rank numbers its attempts at the step, and may discard the one that it is in. A step is
// decided of equal attempts, and attempts only rise, so of all that are in progress only the
// highest can still be decided: the *live* one. Terms, used parameters and reports are kept of
// that one alone, and seals are taken of it alone; a rank in a lower attempt has to discard.
//
// Thread-compatible; the job guards it. No memory, no arithmetic: only what each rank has said.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_JOB_STEP_STEP_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_JOB_STEP_STEP_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "cpu_optimizer_service/common/gradient_norm.h"
#include "cpu_optimizer_service/common/hyper_parameters.h"
#include "cpu_optimizer_service/common/step_record.h"
#include "cpu_optimizer_service/common/step_settings.h"

namespace ballast {

// What all ranks agreed on when they began the attempt, with the hyper-parameters that follow from
// it.
struct StepTerms {
  uint64_t step = 0;
  StepSettings settings;
  std::vector<HyperParameters> hyper_parameters;  // One per group.
};

// Where a rank stands in a step.
struct RankInStep {
  uint32_t attempt = 0;
  bool begun = false;  // That attempt, as all that follows.
  uint32_t micro_steps_ended = 0;
  std::optional<uint32_t> sealed;           // The number of micro-steps that it sealed.
  std::optional<uint32_t> reached_nothing;  // The first one that ended with no parameter used.
  std::optional<StepVote> vote;             // With its seal, or after the norm; void with the seal.

  bool has_part() const { return begun || attempt > 0; }
};

// What a worker found when it checked its gradient before reducing.
struct NonFiniteReport {
  int rank = 0;
  uint32_t micro_step = 0;
  UsedParameters::NonFinite found;
};

class SealedStep;
class DecidedStep;

class OpenStep {
 public:
  // No rank has begun it yet.
  OpenStep(uint64_t step, int world_size, int64_t parameters);
  // The same, with the terms of its first attempt.
  OpenStep(StepTerms terms, int world_size, int64_t parameters);

  // Until the live attempt has terms, only terms().step means anything.
  const StepTerms& terms() const { return terms_; }
  const std::vector<RankInStep>& ranks() const { return ranks_; }
  // The live one.
  uint32_t attempt() const { return attempt_; }
  bool IsLive(int rank) const { return ranks_[rank].attempt == attempt_; }
  // A rank that is in the live attempt.
  int LiveRank() const;

  // Whether `attempt` is the rank's; false: it is one that the rank has discarded.
  // FAILED_PRECONDITION if the rank has not come to it.
  absl::StatusOr<bool> CheckAttempt(int rank, uint32_t attempt) const;
  // The live attempt has no terms: the next rank to begin it brings them.
  bool lacks_terms() const { return lacks_terms_; }
  void SetTerms(StepTerms terms);
  // FAILED_PRECONDITION naming the first setting that differs from those of the ranks before, if
  // the rank's attempt is the live one.
  absl::Status Begin(int rank, const StepSettings& settings);
  // Forgets what the rank has given in its attempt, and begins the next. Of `chunks`, which are the
  // rank's, nothing has come as empty any more. Returns the ranks whose seals are undone by that,
  // since what they sealed can no longer be decided.
  std::vector<int> Discard(int rank, absl::Span<const int> chunks);
  // In order, each once; a repeat is OK and does nothing. FAILED_PRECONDITION otherwise.
  // RESOURCE_EXHAUSTED: the micro-steps have too many different sets of used parameters.
  absl::Status EndMicroStep(int rank, uint32_t micro_step, const UsedParameters& used);
  // Whether this rank may add gradients now: it has begun and not sealed.
  absl::Status CheckMayContribute(int rank) const;
  // `chunk` was sent as empty for micro-steps [begin, end).
  void RecordEmpty(int chunk, uint32_t begin, uint32_t end);

  // An earlier process left the live attempt undecided, and may have sent ranks its norm.
  void SetTakenOver() { is_taken_over_ = true; }
  bool is_taken_over() const { return is_taken_over_; }

  // Records the rank's seal. FAILED_PRECONDITION if its micro-steps have not all ended.
  absl::Status Seal(int rank, uint32_t micro_steps);
  void SetVote(int rank, std::optional<StepVote> vote) { ranks_[rank].vote = std::move(vote); }
  void Unseal(int rank);
  void UnsealAll();
  std::vector<int> UnsealedRanks() const;
  // Another rank that sealed a different number of micro-steps than `rank`, or -1.
  int RankThatDisagrees(int rank) const;
  bool used(int parameter) const { return used_[parameter]; }
  // The first micro-step in [begin, end) in which some rank gave the parameter a gradient.
  std::optional<uint32_t> FirstUse(int parameter, uint32_t begin, uint32_t end) const;
  struct MicroSteps {
    uint32_t begin = 0;
    uint32_t end = 0;
  };
  // What came as empty, by chunk; neighbours merged.
  const std::map<int, std::vector<MicroSteps>>& empties() const { return empties_; }
  // The one of the lowest micro-step, and there of the lowest rank.
  const std::optional<NonFiniteReport>& non_finite() const { return non_finite_; }
  std::optional<double> SecondsSinceFirstSeal() const;
  double SecondsSinceOpened() const;

  // Precondition: every rank has sealed the same number.
  SealedStep Close() &&;

 private:
  friend class SealedStep;
  friend class DecidedStep;
  StepTerms terms_;
  bool lacks_terms_ = false;
  bool is_taken_over_ = false;
  uint32_t attempt_ = 0;
  std::vector<RankInStep> ranks_;
  std::vector<bool> used_;  // By parameter: some rank gave it a gradient in some micro-step.
  // By parameter. Micro-steps beside each other that used the same ones share it.
  using UsedSet = std::shared_ptr<const std::vector<bool>>;
  struct Uses {
    bool all = false;  // Then the next is not kept.
    UsedSet some;      // Null: none.
  };
  // `micro_step` used these too. False if there would be too many sets.
  bool AddUses(uint32_t micro_step, const std::vector<int>& parameters);
  std::vector<Uses> uses_;  // By micro-step, of all ranks together.
  size_t used_sets_ = 0;    // Different ones, alive.
  std::map<int, std::vector<MicroSteps>> empties_;
  std::optional<NonFiniteReport> non_finite_;
  std::chrono::steady_clock::time_point opened_ = std::chrono::steady_clock::now();
  std::optional<std::chrono::steady_clock::time_point> first_seal_;
};

class SealedStep {
 public:
  // As all ranks have given it.
  const OpenStep& given() const { return open_; }
  const StepTerms& terms() const { return open_.terms_; }
  const std::vector<RankInStep>& ranks() const { return open_.ranks_; }
  uint32_t micro_steps() const { return *open_.ranks_[0].sealed; }
  bool used(int parameter) const { return open_.used_[parameter]; }
  const std::optional<NonFiniteReport>& non_finite() const { return open_.non_finite_; }

  // The groups' sums of squares, once they are known: from then on ranks vote.
  void SetSums(std::vector<double> group_sums) { group_sums_ = std::move(group_sums); }
  const std::optional<std::vector<double>>& group_sums() const { return group_sums_; }
  void SetVote(int rank, StepVote vote) { open_.SetVote(rank, std::move(vote)); }
  void VoidVotes();
  std::vector<int> RanksWithoutVote() const;
  // What all ranks voted. Precondition: they have, and the same.
  const StepVote& vote() const { return *open_.ranks_[0].vote; }

  // All seals are undone by a discard that follows.
  OpenStep Reopen() && { return std::move(open_); }
  DecidedStep Decide(StepOutcome outcome) &&;

 private:
  friend class OpenStep;
  friend class DecidedStep;
  explicit SealedStep(OpenStep open)
      : open_(std::move(open)), sealed_(std::chrono::steady_clock::now()) {}
  OpenStep open_;
  std::chrono::steady_clock::time_point sealed_;
  std::optional<std::vector<double>> group_sums_;
};

class DecidedStep {
 public:
  const StepTerms& terms() const { return sealed_.terms(); }
  const std::vector<RankInStep>& ranks() const { return sealed_.ranks(); }
  uint32_t micro_steps() const { return sealed_.micro_steps(); }
  bool used(int parameter) const { return sealed_.used(parameter); }
  const StepVote& vote() const { return sealed_.vote(); }
  const StepOutcome& outcome() const { return outcome_; }
  StepTimes TimesUntilNow() const;

 private:
  friend class SealedStep;
  DecidedStep(SealedStep sealed, StepOutcome outcome)
      : sealed_(std::move(sealed)),
        outcome_(std::move(outcome)),
        decided_(std::chrono::steady_clock::now()) {}
  SealedStep sealed_;
  StepOutcome outcome_;
  std::chrono::steady_clock::time_point decided_;
};

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_JOB_STEP_STEP_H_
