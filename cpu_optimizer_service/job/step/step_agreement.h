// What a member's ranks have to agree on in a step. It knows each rank's attempt, seal and vote, and
// the terms of the live attempt.
//
// Each rank numbers its attempts at the step, and may discard its current one. A step is decided
// from equal attempts, and attempts only rise. So only the highest attempt in progress can still be
// decided: the *live* one. Only its terms are kept, and only its seals are accepted. A rank in a
// lower attempt has to discard.
//
// Pure: no lock, no thread, no clock, no memory of gradients.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_JOB_STEP_STEP_AGREEMENT_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_JOB_STEP_STEP_AGREEMENT_H_

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "cpu_optimizer_service/common/hyper_parameters.h"
#include "cpu_optimizer_service/common/step_settings.h"

namespace ballast {

// The ranks' agreement at the begin of the attempt, with the resulting hyper-parameters.
struct StepTerms {
  uint64_t step = 0;
  StepSettings settings;
  std::vector<HyperParameters> hyper_parameters;  // One per group.
};

// Where a rank stands in a step.
struct RankInStep {
  uint32_t attempt = 0;
  bool begun = false;              // In that attempt, as the following.
  std::optional<uint32_t> sealed;  // The number of micro-steps that it sealed.
  std::optional<StepVote> vote;    // With its seal, or after the norm; void together with the seal.

  bool has_part() const { return begun || attempt > 0; }
};

class StepAgreement {
 public:
  // Of the ranks `own` of `world_size`. None has begun it yet.
  StepAgreement(uint64_t step, int world_size, absl::Span<const int> own)
      : terms_{.step = step}, own_(own.begin(), own.end()), ranks_(world_size) {}

  uint64_t step() const { return terms_.step; }
  // Until the live attempt has terms, only terms().step is valid.
  const StepTerms& terms() const { return terms_; }
  const std::vector<RankInStep>& ranks() const { return ranks_; }  // Others stay as they are here.
  // The live one.
  uint32_t attempt() const { return attempt_; }
  bool IsLive(int rank) const { return ranks_[rank].attempt == attempt_; }
  // The rank whose discard began it, which may be another member's. Precondition: one has.
  int live_since() const { return live_since_; }
  // Whether `attempt` is the rank's current one; false: a discarded one. FAILED_PRECONDITION if the
  // rank has not reached it.
  absl::StatusOr<bool> CheckAttempt(int rank, uint32_t attempt) const;

  // The live attempt has no terms: the next rank to begin it sets them.
  bool lacks_terms() const { return lacks_terms_; }
  void SetTerms(StepTerms terms);
  // FAILED_PRECONDITION, with the first setting that differs from earlier ranks', if the rank's
  // attempt is the live one.
  absl::Status Begin(int rank, const StepSettings& settings);
  bool all_have_begun() const;
  // Whether this rank may add gradients now: it has begun and not sealed.
  absl::Status CheckMayContribute(int rank) const;
  // The rank begins its next attempt, which may become the live one. Returns the ranks whose seals
  // this undoes, because they can no longer be decided.
  std::vector<int> Discard(int rank);
  // A higher attempt is live, which a rank, `by`, has begun. Returns as Discard.
  std::vector<int> RaiseTo(uint32_t attempt, int by);

  void Seal(int rank, uint32_t micro_steps) { ranks_[rank].sealed = micro_steps; }
  // Voids the sums and the rank's vote, too.
  void Unseal(int rank);
  void UnsealAll();
  bool any_sealed() const;
  std::vector<int> UnsealedRanks() const;
  // Another rank that sealed another number of micro-steps than `rank`, or -1.
  int RankThatDisagrees(int rank) const;
  // Precondition: all ranks have sealed.
  uint32_t micro_steps() const { return *ranks_[own_[0]].sealed; }

  // The sums of squares are known, after all have sealed: from then on ranks vote.
  void SetSummed() { is_summed_ = true; }
  bool is_summed() const { return is_summed_; }
  void SetVote(int rank, std::optional<StepVote> vote) { ranks_[rank].vote = std::move(vote); }
  void VoidVotes();
  std::vector<int> RanksWithoutVote() const;
  // The vote of all ranks. Precondition: they have cast the same vote.
  const StepVote& vote() const { return *ranks_[own_[0]].vote; }

  // An earlier process left the live attempt undecided, and may have sent ranks its norm.
  void SetTakenOver() { is_taken_over_ = true; }
  bool is_taken_over() const { return is_taken_over_; }

 private:
  template <typename Is>
  std::vector<int> RanksThat(Is is) const {
    std::vector<int> found;
    for (const int rank : own_) {
      if (is(ranks_[rank])) found.push_back(rank);
    }
    return found;
  }

  StepTerms terms_;
  bool lacks_terms_ = true;
  bool is_taken_over_ = false;
  uint32_t attempt_ = 0;
  int live_since_ = 0;
  std::vector<int> own_;
  std::vector<RankInStep> ranks_;
  bool is_summed_ = false;
};

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_JOB_STEP_STEP_AGREEMENT_H_
