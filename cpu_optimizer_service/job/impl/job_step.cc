// What a rank says of a step, up to the decision, and takes back: settings, ends of micro-steps,
// seals, votes. Its gradients are in job_contribution.cc.
#include <algorithm>
#include <utility>
#include <variant>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/reason.h"
#include "cpu_optimizer_service/common/status.h"
#include "cpu_optimizer_service/job/impl/job_impl.h"

namespace ballast {

StepBefore JobImpl::Before() const {
  const JobRecord& record = core_.record;
  const auto& steps = record.history.recent_steps;
  const StepRecord* last = record.directions.has_value() ? &record.directions->record
                           : steps.empty()               ? nullptr
                                                         : &steps.back();
  const bool has_record = last != nullptr && last->outcome.step == record.committed_step;
  return {.step = record.committed_step,
          .micro_steps = has_record ? last->micro_steps : 0,
          .vote = record.last_vote,
          .hyper_parameters = record.hyper_parameters};
}

absl::Status JobImpl::CheckHasWeights() const {
  if (core_.first_weights.complete()) return absl::OkStatus();
  if (!other_states_.ok()) return other_states_;
  if (core_.first_weights.only_held()) {
    return WithReason(
        absl::FailedPreconditionError(absl::StrCat(
            "job ", spec().name, " has not begun: ranks of other members upload their weights")),
        reason::kNoWeightsYet);
  }
  return WithReason(absl::FailedPreconditionError(absl::StrCat(
                        "job ", spec().name, " has no weights yet: ", core_.first_weights.missing(),
                        " of ", core_.layout.chunks().size(), " chunks have not been uploaded")),
                    reason::kNoWeightsYet);
}

absl::Status JobImpl::CheckMayOpen() const {
  // Only new steps are refused: those that have begun go on to their end, and the drain waits for
  // them.
  if (!machine_.between_steps() || !core_.environment.draining->load()) return absl::OkStatus();
  return WithReason(absl::UnavailableError("the service is stopping and begins no new steps"),
                    reason::kStopping);
}

absl::Status JobImpl::BeginStep(const StreamKey& key, StepAttempt at,
                                const StepSettings& settings) {
  // No turn is waited for: while a step is cleared no stream is current, or, if it becomes a skip,
  // the step is one that was given up (WasGivenUp).
  JobCore::Section section(core_);
  BALLAST_RETURN_IF_ERROR(members_.CheckCurrent(key));
  if (settings.trainer_state.size() > kMaxTrainerStateBytes) {
    return absl::InvalidArgumentError(absl::StrCat(
        "rank ", key.rank, " begins step ", at.step, " with a trainer_state of ",
        settings.trainer_state.size(), " bytes; expected at most ", kMaxTrainerStateBytes));
  }
  if (machine_.WasGivenUp(Before(), at.step, key.rank)) return absl::OkStatus();
  BALLAST_RETURN_IF_ERROR(CheckHasWeights());
  BALLAST_RETURN_IF_ERROR(machine_.CheckIsNext(Before(), key.rank, "begins", at.step));
  BALLAST_RETURN_IF_ERROR(CheckNoSecondRound(key.rank, "begins", at.step));
  if (absl::Status ended = writes_.CheckEnded(key.rank, at.step); !ended.ok()) {
    writes_.Refuse(ended);
    return ended;
  }
  BALLAST_RETURN_IF_ERROR(CheckMayOpen());
  StepEffects effects;
  absl::Status begun = machine_.Begin(Before(), key.rank, at, settings, effects);
  Perform(std::move(effects));
  if (begun.ok()) begun.Update(CheckSettings(key.rank));
  // The lead skips a step that all have begun, in whichever attempt.
  const StepAgreement* given = machine_.undecided();
  const bool all_have_begun = given != nullptr && given->all_have_begun();
  if (!is_alone() && spec().on_abort == OnAbort::kSkip && all_have_begun) SayStanding();
  return begun;
}

absl::Status JobImpl::CheckMicroSteps(absl::string_view what, int64_t end) const {
  if (end <= spec().most_micro_steps()) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      what, " micro-steps up to ", end, " but job ", spec().name,
      " was created with max_micro_steps ", spec().max_micro_steps,
      spec().max_micro_steps == 0 ? absl::StrCat(", which allows ", kMaxMicroSteps) : "",
      "; use fewer in a step, or create the job with more"));
}

absl::Status JobImpl::EndMicroStep(const StreamKey& key, StepAttempt at, uint32_t micro_step,
                                   UsedParameters used) {
  BALLAST_RETURN_IF_ERROR(CheckUsed(spec(), core_.layout, key.rank, used));
  // Of no elements: backward may name them or not, and has not reached anything by that.
  std::erase_if(used.parameters,
                [&](int parameter) { return core_.layout.place(parameter).elements == 0; });
  BALLAST_RETURN_IF_ERROR(
      CheckMicroSteps(absl::StrCat("rank ", key.rank, " ends"), int64_t{micro_step} + 1));
  JobCore::Lock lock(core_);
  BALLAST_RETURN_IF_ERROR(members_.CheckCurrent(key));
  StepEffects effects;
  const absl::Status ended =
      machine_.EndMicroStep(Before(), key.rank, at, micro_step, std::move(used), effects);
  Perform(std::move(effects));
  return ended;
}

absl::Status JobImpl::Report(const StreamKey& key, StepAttempt at, const RankReport& report) {
  BALLAST_RETURN_IF_ERROR(CheckReport(report));
  const JobCore::Lock lock(core_);
  BALLAST_RETURN_IF_ERROR(members_.CheckCurrent(key));
  // Of a step that is decided it is a repeat: a reopened stream brings it again.
  const StepAgreement* given = machine_.undecided();
  if (given != nullptr && given->step() == at.step &&
      given->ranks()[key.rank].attempt == at.attempt) {
    core_.history.Report(at.step, key.rank, report);
  }
  return absl::OkStatus();
}

absl::StatusOr<std::optional<SealRefusal>> JobImpl::Seal(const StreamKey& key, StepAttempt at,
                                                         uint32_t micro_steps,
                                                         const std::optional<StepVote>& vote,
                                                         uint32_t refusals_heard) {
  const JobCore::Section section(core_);
  BALLAST_RETURN_IF_ERROR(members_.CheckCurrent(key));
  // A reopened stream brings what its client did not know to be refused.
  const bool is_refused = members_.table.IsRefused(key.rank, at, refusals_heard);
  const auto half_added = [&](int chunk) { return memory_.gradients->half_added(chunk); };
  const auto has_gradient = [&](const ChunkPiece& piece) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock) {
    return memory_.gradients->HasNonZero(piece, executor_.sums_are_current(piece.chunk));
  };
  StepEffects effects;
  auto refused =
      machine_.Seal(Before(), key.rank, at, micro_steps, is_refused ? std::nullopt : vote,
                    {.half_added = half_added, .has_gradient = has_gradient}, effects);
  Perform(std::move(effects));
  return refused;
}

absl::Status JobImpl::Vote(const StreamKey& key, StepAttempt at, const StepVote& vote,
                           uint32_t refusals_heard) {
  const JobCore::Section section(core_);
  BALLAST_RETURN_IF_ERROR(members_.CheckCurrent(key));
  if (members_.table.IsRefused(key.rank, at, refusals_heard)) return absl::OkStatus();
  StepEffects effects;
  const absl::Status voted = machine_.Vote(Before(), key.rank, at, vote, effects);
  Perform(std::move(effects));
  return voted;
}

// ---------------------------------------------------------------- discarding

// All that is forgotten is forgotten in one turn, so a stream that breaks before it has discarded
// nothing, and after it all.
Pending JobImpl::Discard(const StreamKey& key, StepAttempt at, Done<bool> done) {
  {
    // What only waits to be computed need not be waited for.
    JobCore::Lock lock(core_);
    // Should this call be cancelled before its turn, nothing is lost: the decision computes the
    // sums that are missing, and updates after it what was not updated ahead of it.
    const StepAgreement* given = machine_.undecided();
    if (members_.table.IsCurrent(key) && given != nullptr && given->step() == at.step &&
        given->ranks()[key.rank].attempt == at.attempt) {
      executor_.Cancel(key.rank);
      // Of a reported part it is the lead's to grant: it opens the part again (Gate).
      if (!core_.identity.is_lead() && given->IsLive(key.rank)) {
        to_lead_.wants_discard = key.rank;
        if (is_reported()) SayStanding();
      }
    }
  }
  return core_.Enter(Admission::kDiscard, key.rank,
                     [this, self = Self(), key, at, done = std::move(done)](absl::Status admitted)
                         ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock) mutable {
                           if (to_lead_.wants_discard == key.rank) to_lead_.wants_discard.reset();
                           core_.Reply<bool>(std::move(done), admitted.ok()
                                                                  ? DiscardNow(key, at)
                                                                  : absl::StatusOr<bool>(admitted));
                         });
}

absl::StatusOr<bool> JobImpl::DiscardNow(const StreamKey& key, StepAttempt at) {
  BALLAST_RETURN_IF_ERROR(members_.CheckCurrent(key));
  BALLAST_RETURN_IF_ERROR(CheckHasWeights());
  if (at.step == core_.record.committed_step + 1) {
    BALLAST_RETURN_IF_ERROR(CheckMayOpen());
    BALLAST_RETURN_IF_ERROR(CheckNoSecondRound(key.rank, "discards", at.step));
  }
  StepEffects effects;
  const absl::StatusOr<bool> discarded = machine_.Discard(Before(), key.rank, at, effects);
  Perform(std::move(effects));
  return discarded;
}

// ---------------------------------------------------------------- what follows

void JobImpl::Perform(StepEffects effects) {
  if (effects.opened) {
    core_.gate.BeginStep();
    clock_ = {.opened = std::chrono::steady_clock::now()};
    core_.trace.Mark(TraceEventKind::kBegun, machine_.agreement()->step());
  }
  if (effects.reopened) {
    core_.gate.Reopen();
    ForgetReport();
  }
  if (effects.has_terms) UseTerms(machine_.agreement()->terms());
  for (const StepWord& word : effects.words) journal_.KeepWord(word);
  // No rank's provisional updates of the attempt that was live can become the state.
  if (effects.live_is_over) executor_.StopSpeculating();
  if (effects.forgotten.has_value()) ForgetGiven(*effects.forgotten);
  clock_.SealsAre(machine_.agreement() != nullptr && machine_.agreement()->any_sealed());
  if (effects.sealed) {
    core_.gate.Seal();
    clock_.sealed = std::chrono::steady_clock::now();
    clock_.sealed_ns = core_.trace.Begin(machine_.agreement()->step());
    AwaitDecision();
  }
  if (!effects.told.empty()) TellRanks(std::move(effects.told));
  if (effects.voted) SayVote();
  if (!is_alone() && (effects.has_terms || effects.live_is_over)) SayStanding();
}

void JobImpl::UseTerms(const StepTerms& terms) {
  // Of an operator's changes those before this are in the terms, and its overrides come last.
  std::vector<HyperParameterOverrides>& later = core_.record.later_changes;
  if (later != std::vector<HyperParameterOverrides>(later.size())) {
    // In the record, too: a process that takes over would apply them over the step's overrides.
    later.assign(later.size(), {});
    journal_.Keep();
  }
  executor_.Begin(terms);
}

void JobImpl::ForgetGiven(int rank) {
  if (KeptJob* const kept = journal_.kept(); kept != nullptr) {
    kept->sum_lanes().KeepLeft([&](const RedoLane& lane) {
      return core_.layout.chunks()[RedoWord::Unpack(lane.word).chunk].rank != rank;
    });
  }
  executor_.Forget(rank);
  // Without the lock, as the last reference unmaps the memory.
  core_.RunAfter([lender = members_.table.TakeLender(rank)]() mutable { lender = nullptr; });
}

void JobImpl::TellRanks(std::vector<StepEffects::ToRank> told) {
  const uint64_t step = machine_.agreement()->step();
  for (StepEffects::ToRank& each : told) {
    const std::shared_ptr<RankListener>& listener = members_.table[each.rank].listener;
    if (listener == nullptr) continue;
    if (std::holds_alternative<StepEffects::NormIsKnown>(each.what)) {
      core_.RunAfter([listener, norm = *told_norm_] { listener->OnNorm(norm); });
    } else if (auto* vote = std::get_if<StepEffects::VoteRefused>(&each.what)) {
      members_.table.RefuseVote(each.rank, vote->at);
      core_.RunAfter([listener, refused = std::move(*vote)] {
        listener->OnVoteRefused(refused.at, refused.why);
      });
    } else {
      auto& refusal = std::get<SealRefusal>(each.what);
      // Another rank may have discarded the attempt for its norm, and this one is to know it first. The
      // thread that tells it the norm may come later than this one.
      const bool knows_norm = told_norm_.has_value() && told_norm_->step == step &&
                              told_norm_->attempt == refusal.attempt;
      core_.RunAfter([listener, step, norm = knows_norm ? told_norm_ : std::nullopt,
                      refusal = std::move(refusal)] {
        if (norm.has_value()) listener->OnNorm(*norm);
        listener->OnSealRefused(step, refusal);
      });
    }
  }
}

}  // namespace ballast
