#include "cpu_optimizer_service/job/step/step_agreement.h"

#include <algorithm>
#include <string>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/check.h"
#include "cpu_optimizer_service/common/reason.h"
#include "cpu_optimizer_service/job/step/step_decision.h"

namespace ballast {

absl::StatusOr<bool> StepAgreement::CheckAttempt(int rank, uint32_t attempt) const {
  const uint32_t current = ranks_[rank].attempt;
  // An older attempt: the message was under way while the rank discarded, and means nothing now.
  if (attempt <= current) return attempt == current;
  return absl::FailedPreconditionError(absl::StrCat("rank ", rank, " names attempt ", attempt,
                                                    " at step ", terms_.step, " but is in attempt ",
                                                    current, "; discard that one first"));
}

void StepAgreement::SetTerms(StepTerms terms) {
  Check(lacks_terms_ && terms.step == terms_.step, "an attempt gets its step's terms once");
  terms_ = std::move(terms);
  lacks_terms_ = false;
}

absl::Status StepAgreement::Begin(int rank, const StepSettings& settings) {
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

bool StepAgreement::all_have_begun() const {
  return RanksThat([](const RankInStep& rank) { return !rank.begun; }).empty();
}

absl::Status StepAgreement::CheckMayContribute(int rank) const {
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

std::vector<int> StepAgreement::Discard(int rank) {
  Unseal(rank);
  ranks_[rank] = {.attempt = ranks_[rank].attempt + 1};
  // The live attempt is at least as new, and keeps what is known of it.
  return RaiseTo(ranks_[rank].attempt, rank);
}

std::vector<int> StepAgreement::RaiseTo(uint32_t attempt, int by) {
  if (attempt <= attempt_) return {};
  attempt_ = attempt;
  live_since_ = by;
  lacks_terms_ = true;
  is_taken_over_ = false;
  // All other seals were of the attempt that was live.
  std::vector<int> undone =
      RanksThat([](const RankInStep& each) { return each.sealed.has_value(); });
  UnsealAll();
  return undone;
}

void StepAgreement::Unseal(int rank) {
  ranks_[rank].sealed.reset();
  ranks_[rank].vote.reset();
  is_summed_ = false;
}

void StepAgreement::UnsealAll() {
  for (const int rank : own_) Unseal(rank);
}

bool StepAgreement::any_sealed() const {
  return std::ranges::any_of(ranks_,
                             [](const RankInStep& rank) { return rank.sealed.has_value(); });
}

std::vector<int> StepAgreement::UnsealedRanks() const {
  return RanksThat([](const RankInStep& rank) { return !rank.sealed.has_value(); });
}

int StepAgreement::RankThatDisagrees(int rank) const {
  const auto disagrees = [&](const RankInStep& other) {
    return other.sealed.has_value() && other.sealed != ranks_[rank].sealed;
  };
  const std::vector<int> others = RanksThat(disagrees);
  return others.empty() ? -1 : others.front();
}

void StepAgreement::VoidVotes() {
  for (RankInStep& rank : ranks_) rank.vote.reset();
}

std::vector<int> StepAgreement::RanksWithoutVote() const {
  return RanksThat([](const RankInStep& rank) { return !rank.vote.has_value(); });
}

}  // namespace ballast
