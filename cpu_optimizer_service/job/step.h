// One step as a state machine. Each state is a type of its own, made only by the move that leads to
// it, and each move consumes the state that it leaves, so an illegal move does not compile:
//
//   OpenStep --Seal by every rank, Close--> SealedStep --Decide--> DecidedStep --> committed
//       \--dropped: aborted                    \--dropped: aborted
//
// A DecidedStep has no way back: after the decision there is only roll-forward. Dropping an open or
// sealed step is the abort; nothing of it has shown.
//
// Thread-compatible; the job guards it. No memory, no arithmetic: only what each rank has said.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_JOB_STEP_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_JOB_STEP_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "cpu_optimizer_service/common/gradient_norm.h"
#include "cpu_optimizer_service/common/hyper_parameters.h"
#include "cpu_optimizer_service/common/step_record.h"
#include "cpu_optimizer_service/common/step_settings.h"

namespace ballast {

// The most different sets of used parameters that a step keeps, each of a bit for every parameter.
// Micro-steps that are alike share one.
inline constexpr size_t kMaxUsedSets = 512;

// What all ranks agreed on at begin_step, with the hyper-parameters that follow from it.
struct StepTerms {
  uint64_t step = 0;
  StepSettings settings;
  std::vector<HyperParameters> hyper_parameters;  // One per group.
};

// Where a rank stands in a step.
struct RankInStep {
  bool begun = false;
  uint32_t micro_steps_ended = 0;
  std::optional<uint32_t> sealed;           // The number of micro-steps that it sealed.
  std::optional<uint32_t> reached_nothing;  // The first one that ended with no parameter used.
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
  OpenStep(StepTerms terms, int world_size, int64_t parameters);

  const StepTerms& terms() const { return terms_; }
  const std::vector<RankInStep>& ranks() const { return ranks_; }

  // FAILED_PRECONDITION naming the first setting that differs from the ranks before.
  absl::Status Begin(int rank, const StepSettings& settings);
  // In order, each once; a repeat is OK and does nothing. FAILED_PRECONDITION otherwise.
  // RESOURCE_EXHAUSTED: the micro-steps have too many different sets of used parameters.
  absl::Status EndMicroStep(int rank, uint32_t micro_step, const UsedParameters& used);
  // Whether this rank may add gradients now: it has begun and not sealed.
  absl::Status CheckMayContribute(int rank) const;
  // `chunk` was sent as empty for micro-steps [begin, end).
  void RecordEmpty(int chunk, uint32_t begin, uint32_t end);

  // Records the rank's seal. FAILED_PRECONDITION if its micro-steps have not all ended.
  absl::Status Seal(int rank, uint32_t micro_steps);
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
  // Of the lowest micro-step, and of its lowest rank.
  const std::optional<NonFiniteReport>& non_finite() const { return non_finite_; }
  std::optional<double> SecondsSinceFirstSeal() const;

  // Precondition: every rank has sealed the same number.
  SealedStep Close() &&;

 private:
  friend class SealedStep;
  StepTerms terms_;
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
  std::optional<std::chrono::steady_clock::time_point> first_seal_;
};

class SealedStep {
 public:
  const StepTerms& terms() const { return open_.terms_; }
  const std::vector<RankInStep>& ranks() const { return open_.ranks_; }
  uint32_t micro_steps() const { return *open_.ranks_[0].sealed; }
  bool used(int parameter) const { return open_.used_[parameter]; }
  const std::optional<NonFiniteReport>& non_finite() const { return open_.non_finite_; }

  DecidedStep Decide(StepOutcome outcome) &&;

 private:
  friend class OpenStep;
  friend class DecidedStep;
  explicit SealedStep(OpenStep open) : open_(std::move(open)) {}
  OpenStep open_;
};

class DecidedStep {
 public:
  const StepTerms& terms() const { return sealed_.terms(); }
  const std::vector<RankInStep>& ranks() const { return sealed_.ranks(); }
  uint32_t micro_steps() const { return sealed_.micro_steps(); }
  bool used(int parameter) const { return sealed_.used(parameter); }
  const StepOutcome& outcome() const { return outcome_; }
  double SecondsSinceDecision() const;

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

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_JOB_STEP_H_
