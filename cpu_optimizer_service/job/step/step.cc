#include "cpu_optimizer_service/job/step/step.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/check.h"
#include "cpu_optimizer_service/common/reason.h"
#include "cpu_optimizer_service/common/system/steady_time.h"
#include "cpu_optimizer_service/job/step/step_decision.h"

namespace ballast {

OpenStep::OpenStep(StepTerms terms, int world_size, int64_t parameters)
    : terms_(std::move(terms)), ranks_(world_size), used_(parameters, false) {}

OpenStep::OpenStep(uint64_t step, int world_size, int64_t parameters)
    : OpenStep(StepTerms{.step = step}, world_size, parameters) {
  lacks_terms_ = true;
}

int OpenStep::LiveRank() const {
  // The live attempt is the highest of the ranks', so one of them is in it.
  const auto is_live = [&](const RankInStep& rank) { return rank.attempt == attempt_; };
  return static_cast<int>(std::find_if(ranks_.begin(), ranks_.end(), is_live) - ranks_.begin());
}

absl::StatusOr<bool> OpenStep::CheckAttempt(int rank, uint32_t attempt) const {
  const uint32_t current = ranks_[rank].attempt;
  // An older attempt: the message was under way while the rank discarded, and means nothing now.
  if (attempt <= current) return attempt == current;
  return absl::FailedPreconditionError(absl::StrCat("rank ", rank, " speaks of attempt ", attempt,
                                                    " at step ", terms_.step, " and is in attempt ",
                                                    current, "; discard that one first"));
}

void OpenStep::SetTerms(StepTerms terms) {
  Check(lacks_terms_ && terms.step == terms_.step, "an attempt gets its step's terms once");
  terms_ = std::move(terms);
  lacks_terms_ = false;
}

absl::Status OpenStep::Begin(int rank, const StepSettings& settings) {
  Check(!IsLive(rank) || !lacks_terms_, "the first rank to begin an attempt brings its terms");
  // Terms are those of the live attempt. A rank in a lower one is not compared: it has to discard.
  const std::string difference =
      IsLive(rank) ? FirstDifference(terms_.settings, settings) : std::string();
  if (!difference.empty()) {
    return WithReason(absl::FailedPreconditionError(absl::StrCat(
                          "rank ", rank, " begins step ", terms_.step, " with ", difference,
                          "; all ranks must begin a step with the same settings")),
                      reason::kOtherSettings);
  }
  ranks_[rank].begun = true;
  return absl::OkStatus();
}

std::vector<int> OpenStep::Discard(int rank, absl::Span<const int> chunks) {
  Unseal(rank);
  ranks_[rank] = {.attempt = ranks_[rank].attempt + 1};
  for (const int chunk : chunks) empties_.erase(chunk);
  std::vector<int> undone;
  // The live attempt is at least as new, and keeps what is known of it.
  if (ranks_[rank].attempt <= attempt_) return undone;
  // What is known of the attempt that was live can no longer become a decision.
  attempt_ = ranks_[rank].attempt;
  lacks_terms_ = true;
  is_taken_over_ = false;
  used_.assign(used_.size(), false);
  uses_.clear();
  used_sets_ = 0;
  non_finite_.reset();
  for (int other = 0; other < static_cast<int>(ranks_.size()); ++other) {
    // All other seals were of the attempt that was live.
    if (!ranks_[other].sealed.has_value()) continue;
    Unseal(other);
    undone.push_back(other);
  }
  return undone;
}

absl::Status OpenStep::CheckMayContribute(int rank) const {
  if (!ranks_[rank].begun) {
    return absl::FailedPreconditionError(
        absl::StrCat("rank ", rank, " has not begun step ", terms_.step));
  }
  if (ranks_[rank].sealed.has_value()) {
    return absl::FailedPreconditionError(
        absl::StrCat("rank ", rank, " has sealed step ", terms_.step, " and cannot add to it"));
  }
  return absl::OkStatus();
}

absl::Status OpenStep::EndMicroStep(int rank, uint32_t micro_step, const UsedParameters& used) {
  RankInStep& state = ranks_[rank];
  // A stream that was opened again sends what it does not know to have arrived.
  if (state.begun && micro_step < state.micro_steps_ended) return absl::OkStatus();
  if (absl::Status status = CheckMayContribute(rank); !status.ok()) return status;
  if (micro_step != state.micro_steps_ended) {
    return absl::FailedPreconditionError(
        absl::StrCat("rank ", rank, " ends micro-step ", micro_step, " of step ", terms_.step,
                     " where ", state.micro_steps_ended, " is the next"));
  }
  if (!IsLive(rank)) {  // It will be discarded.
    ++state.micro_steps_ended;
    return absl::OkStatus();
  }
  // One rank may be micro-steps ahead of the others. How many there can be has been checked.
  if (uses_.size() <= micro_step) uses_.resize(micro_step + 1);
  if (used.all) {
    used_.assign(used_.size(), true);
    // The set goes where no neighbour shares it.
    used_sets_ -= uses_[micro_step].some.use_count() == 1 ? 1 : 0;
    uses_[micro_step] = {.all = true, .some = nullptr};
  } else {
    // Before anything else is changed, so that after a refusal the micro-step has not ended.
    if (!AddUses(micro_step, used.parameters)) {
      return absl::ResourceExhaustedError(absl::StrCat(
          "rank ", rank, " ends micro-step ", micro_step, " of step ", terms_.step, ", of which ",
          kMaxUsedSets, " micro-steps used other parameters than the ones before;",
          " say all_used, and send zeros for what was not used, or have fewer micro-steps"));
    }
    for (const int parameter : used.parameters) used_[parameter] = true;
    const bool nothing = used.parameters.empty();
    if (nothing && !state.reached_nothing.has_value()) state.reached_nothing = micro_step;
  }
  ++state.micro_steps_ended;
  if (used.non_finite.has_value()) {
    // The lowest one, and not the first to arrive: the report does not depend on timing.
    const bool first =
        !non_finite_.has_value() ||
        std::pair(micro_step, rank) < std::pair(non_finite_->micro_step, non_finite_->rank);
    if (first) non_finite_ = {.rank = rank, .micro_step = micro_step, .found = *used.non_finite};
  }
  return absl::OkStatus();
}

bool OpenStep::AddUses(uint32_t micro_step, const std::vector<int>& parameters) {
  Uses& uses = uses_[micro_step];
  if (uses.all || parameters.empty()) return true;
  std::vector<bool> some = uses.some != nullptr ? *uses.some : std::vector<bool>(used_.size());
  for (const int parameter : parameters) some[parameter] = true;
  if (uses.some != nullptr && *uses.some == some) return true;
  // A set that a neighbour shares stays after it has been replaced here.
  const size_t freed = uses.some.use_count() == 1 ? 1 : 0;
  // Most models use the same parameters in each micro-step, so that one set serves all of them.
  const UsedSet before = micro_step > 0 ? uses_[micro_step - 1].some : nullptr;
  if (before != nullptr && *before == some) {
    used_sets_ -= freed;
    uses.some = before;
    return true;
  }
  if (used_sets_ - freed >= kMaxUsedSets) return false;
  used_sets_ += 1 - freed;
  uses.some = std::make_shared<const std::vector<bool>>(std::move(some));
  return true;
}

void OpenStep::RecordEmpty(int chunk, uint32_t begin, uint32_t end) {
  std::vector<MicroSteps>& empties = empties_[chunk];
  // The ledger takes a chunk's micro-steps in ascending order, so only the last range can grow.
  if (!empties.empty() && empties.back().end == begin) {
    empties.back().end = end;
  } else {
    empties.push_back({begin, end});
  }
}

std::optional<uint32_t> OpenStep::FirstUse(int parameter, uint32_t begin, uint32_t end) const {
  for (uint32_t m = begin; m < std::min<size_t>(end, uses_.size()); ++m) {
    if (uses_[m].all || (uses_[m].some != nullptr && (*uses_[m].some)[parameter])) return m;
  }
  return std::nullopt;
}

absl::Status OpenStep::Seal(int rank, uint32_t micro_steps) {
  RankInStep& state = ranks_[rank];
  if (!state.begun) {
    return absl::FailedPreconditionError(
        absl::StrCat("rank ", rank, " seals step ", terms_.step, " that it has not begun"));
  }
  if (state.micro_steps_ended != micro_steps) {
    return absl::FailedPreconditionError(absl::StrCat("rank ", rank, " seals ", micro_steps,
                                                      " micro-steps of step ", terms_.step,
                                                      " but has ended ", state.micro_steps_ended));
  }
  state.sealed = micro_steps;
  // From the first seal on ranks wait for each other: the seal's deadline counts from here.
  if (!first_seal_.has_value()) first_seal_ = std::chrono::steady_clock::now();
  return absl::OkStatus();
}

void OpenStep::Unseal(int rank) {
  ranks_[rank].sealed.reset();
  // A vote came with the seal or after it, and is void with it.
  ranks_[rank].vote.reset();
  const auto sealed = [](const RankInStep& state) { return state.sealed.has_value(); };
  // The time for which sealed ranks wait begins at the next seal.
  if (std::none_of(ranks_.begin(), ranks_.end(), sealed)) first_seal_.reset();
}

void OpenStep::UnsealAll() {
  for (int rank = 0; rank < static_cast<int>(ranks_.size()); ++rank) Unseal(rank);
}

std::vector<int> OpenStep::UnsealedRanks() const {
  std::vector<int> ranks;
  for (int rank = 0; rank < static_cast<int>(ranks_.size()); ++rank) {
    if (!ranks_[rank].sealed.has_value()) ranks.push_back(rank);
  }
  return ranks;
}

int OpenStep::RankThatDisagrees(int rank) const {
  for (int other = 0; other < static_cast<int>(ranks_.size()); ++other) {
    if (ranks_[other].sealed.has_value() && ranks_[other].sealed != ranks_[rank].sealed) {
      return other;
    }
  }
  return -1;
}

std::optional<double> OpenStep::SecondsSinceFirstSeal() const {
  if (!first_seal_.has_value()) return std::nullopt;
  return SecondsSince(*first_seal_);
}

double OpenStep::SecondsSinceOpened() const { return SecondsSince(opened_); }

SealedStep OpenStep::Close() && {
  Check(UnsealedRanks().empty() && RankThatDisagrees(0) == -1,
        "a step that closes is sealed by all ranks with one number");
  return SealedStep(std::move(*this));
}

void SealedStep::VoidVotes() {
  for (RankInStep& rank : open_.ranks_) rank.vote.reset();
}

std::vector<int> SealedStep::RanksWithoutVote() const {
  std::vector<int> without;
  for (int rank = 0; rank < static_cast<int>(ranks().size()); ++rank) {
    if (!ranks()[rank].vote.has_value()) without.push_back(rank);
  }
  return without;
}

DecidedStep SealedStep::Decide(StepOutcome outcome) && {
  return DecidedStep(std::move(*this), std::move(outcome));
}

StepTimes DecidedStep::TimesUntilNow() const {
  const auto seconds = [](auto from, auto to) {
    return std::chrono::duration<double>(to - from).count();
  };
  const auto first_seal = sealed_.open_.first_seal_.value_or(sealed_.sealed_);
  return {.gathering = seconds(sealed_.open_.opened_, first_seal),
          .awaiting = seconds(first_seal, sealed_.sealed_),
          .deciding = seconds(sealed_.sealed_, decided_),
          .updating = SecondsSince(decided_)};
}

}  // namespace ballast
