// What a rank says of a step, up to the decision, and takes back: settings, ends of micro-steps,
// seals, votes. Its gradients are in job_contribution.cc.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/reason.h"
#include "cpu_optimizer_service/common/status.h"
#include "cpu_optimizer_service/job/job_impl.h"

namespace ballast {

absl::StatusOr<OpenStep*> JobImpl::FindOpenStep(uint64_t step) {
  auto* open = std::get_if<OpenStep>(&step_);
  if (open == nullptr) {
    return WithReason(
        absl::FailedPreconditionError(absl::StrCat(
            "step ", step, " of job ", spec().name, " is not open; the job stands at step ",
            record_.committed_step,
            step == record_.committed_step + 1 ? "; it has not begun, or is sealed" : "")),
        reason::kOtherStep);
  }
  if (open->terms().step != step) {
    return WithReason(absl::FailedPreconditionError(absl::StrCat("step ", step, " of job ",
                                                                 spec().name, " is not open; step ",
                                                                 open->terms().step, " is")),
                      reason::kOtherStep);
  }
  return open;
}

absl::StatusOr<StepTerms> JobImpl::MakeTerms(uint64_t step, const StepSettings& settings) const {
  StepTerms terms = {
      .step = step, .settings = settings, .hyper_parameters = record_.hyper_parameters};
  BALLAST_RETURN_IF_ERROR(CheckScale(settings.scale, layout_.group_count()));
  BALLAST_RETURN_IF_ERROR(Annotate(Validate(settings.expected_clipping, layout_.group_count()),
                                   "the expected clipping"));
  BALLAST_ASSIGN_OR_RETURN(
      terms.hyper_parameters,
      WithOverrides(spec(), std::move(terms.hyper_parameters), settings.overrides));
  return terms;
}

absl::Status JobImpl::CheckIsNext(int rank, absl::string_view does, uint64_t step) const {
  if (!first_weights_.complete()) {
    return WithReason(absl::FailedPreconditionError(absl::StrCat(
                          "job ", spec().name, " has no weights yet: ", first_weights_.missing(),
                          " of ", layout_.chunks().size(), " chunks have not been uploaded")),
                      reason::kNoWeightsYet);
  }
  if (step != record_.committed_step + 1 || std::holds_alternative<SealedStep>(step_) ||
      std::holds_alternative<DecidedStep>(step_)) {
    return WithReason(
        absl::FailedPreconditionError(absl::StrCat(
            "rank ", rank, " ", does, " step ", step, " but job ", spec().name, " stands at step ",
            record_.committed_step, gate_.state().deciding ? " and is updating" : "")),
        reason::kOtherStep);
  }
  return absl::OkStatus();
}

absl::Status JobImpl::OpenNextStep(uint64_t step) {
  // Only new steps are refused: those that have begun go on to their end, and the drain waits for
  // them.
  if (environment_.draining->load()) {
    return WithReason(absl::UnavailableError("the service is stopping and begins no new steps"),
                      reason::kStopping);
  }
  gate_.BeginStep();
  step_ =
      OpenStep(step, layout_.world_size(), static_cast<int64_t>(spec().layout.parameters.size()));
  trace_.Mark(TraceEventKind::kBegun, step);
  return absl::OkStatus();
}

absl::Status JobImpl::CheckInAttempt(const OpenStep& open, int rank, uint32_t attempt) const {
  BALLAST_ASSIGN_OR_RETURN(const bool current, open.CheckAttempt(rank, attempt));
  if (current) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("rank ", rank, " has discarded attempt ", attempt, " at step ",
                   open.terms().step, " and is in attempt ", open.ranks()[rank].attempt));
}

absl::Status JobImpl::BeginStep(const StreamKey& key, StepAttempt at,
                                const StepSettings& settings) {
  // No turn is waited for: while a step is cleared no stream is current, or, if it becomes a skip,
  // the step is one that was given up (WasGivenUp).
  MutexLock lock(mutex_);
  BALLAST_RETURN_IF_ERROR(CheckCurrent(key));
  if (settings.trainer_state.size() > kMaxTrainerStateBytes) {
    return absl::InvalidArgumentError(absl::StrCat(
        "rank ", key.rank, " begins step ", at.step, " with a trainer_state of ",
        settings.trainer_state.size(), " bytes, of ", kMaxTrainerStateBytes, " at most"));
  }
  if (WasGivenUp(at.step, key.rank)) return absl::OkStatus();
  BALLAST_RETURN_IF_ERROR(CheckIsNext(key.rank, "begins", at.step));
  BALLAST_RETURN_IF_ERROR(CheckWritesEnded(key.rank, at.step));
  auto* open = std::get_if<OpenStep>(&step_);
  if (open != nullptr) BALLAST_RETURN_IF_ERROR(CheckInAttempt(*open, key.rank, at.attempt));
  if (open == nullptr && at.attempt != 0) {
    return absl::FailedPreconditionError(
        absl::StrCat("rank ", key.rank, " begins attempt ", at.attempt, " at step ", at.step,
                     " of job ", spec().name, ", which no rank has begun; begin with attempt 0"));
  }
  const bool brings_terms = open == nullptr || (open->IsLive(key.rank) && open->lacks_terms());
  if (brings_terms) {
    // The settings are checked before the step is opened, so that a refusal leaves no open step.
    BALLAST_ASSIGN_OR_RETURN(StepTerms terms, MakeTerms(at.step, settings));
    if (open == nullptr) BALLAST_RETURN_IF_ERROR(OpenNextStep(at.step));
    open = &std::get<OpenStep>(step_);
    // Of an operator's changes those before this are in the terms, and its overrides come last.
    if (record_.later_changes !=
        std::vector<HyperParameterOverrides>(record_.later_changes.size())) {
      // In the record, too: a process that takes over would apply them over the step's overrides.
      record_.later_changes.assign(record_.later_changes.size(), {});
      Keep();
    }
    speculation_.Begin(
        CanSpeculate() ? MakeProvisionalUpdate(spec(), terms, record_.update_counts) : nullptr,
        settings.expected_clipping.max_norm);
    open->SetTerms(std::move(terms));
  }
  const bool had_begun = open->ranks()[key.rank].begun;
  BALLAST_RETURN_IF_ERROR(open->Begin(key.rank, settings));
  if (kept_ != nullptr && !had_begun) {
    KeepWord({.kind = KeptWord::Kind::kBegin,
              .rank = key.rank,
              .step = at.step,
              .settings = brings_terms ? StepSettings() : settings,
              .terms = brings_terms ? std::optional(open->terms()) : std::nullopt});
  }
  return absl::OkStatus();
}

absl::Status JobImpl::CheckMicroSteps(absl::string_view what, int64_t end) const {
  if (end <= spec().most_micro_steps()) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      what, " micro-steps up to ", end, " but job ", spec().name,
      " was created with max_micro_steps ", spec().max_micro_steps,
      spec().max_micro_steps == 0 ? absl::StrCat(", which allows ", kMaxMicroSteps) : "",
      "; have fewer in a step, or create the job with more"));
}

absl::Status JobImpl::EndMicroStep(const StreamKey& key, StepAttempt at, uint32_t micro_step,
                                   UsedParameters used) {
  BALLAST_RETURN_IF_ERROR(CheckUsed(spec(), layout_, key.rank, used));
  // Of no elements: backward may name them or not, and has not reached anything by that.
  std::erase_if(used.parameters,
                [&](int parameter) { return layout_.place(parameter).elements == 0; });
  BALLAST_RETURN_IF_ERROR(
      CheckMicroSteps(absl::StrCat("rank ", key.rank, " ends"), int64_t{micro_step} + 1));
  MutexLock lock(mutex_);
  BALLAST_RETURN_IF_ERROR(CheckCurrent(key));
  if (WasGivenUp(at.step, key.rank)) return absl::OkStatus();
  BALLAST_ASSIGN_OR_RETURN(OpenStep * open, FindOpenStep(at.step));
  BALLAST_RETURN_IF_ERROR(CheckInAttempt(*open, key.rank, at.attempt));
  const uint32_t ended = open->ranks()[key.rank].micro_steps_ended;
  BALLAST_RETURN_IF_ERROR(open->EndMicroStep(key.rank, micro_step, used));
  // A repeat has its entry in the log already.
  if (kept_ != nullptr && open->ranks()[key.rank].micro_steps_ended > ended) {
    KeepWord({.kind = KeptWord::Kind::kEndMicroStep,
              .rank = key.rank,
              .step = at.step,
              .micro_step = micro_step,
              .used = std::move(used)});
  }
  return absl::OkStatus();
}

absl::Status JobImpl::Report(const StreamKey& key, StepAttempt at, const RankReport& report) {
  BALLAST_RETURN_IF_ERROR(CheckReport(report));
  const MutexLock lock(mutex_);
  BALLAST_RETURN_IF_ERROR(CheckCurrent(key));
  // Of a step that is decided it is a repeat: a reopened stream brings it again.
  const OpenStep* given = Undecided();
  if (given != nullptr && given->terms().step == at.step &&
      given->ranks()[key.rank].attempt == at.attempt) {
    history_.Report(at.step, key.rank, report);
  }
  return absl::OkStatus();
}

// ---------------------------------------------------------------- sealing

// A reopened stream carries the last seal again, of which its client does not know that it was
// accepted. By the time it is read, the other ranks may have sealed, the step been committed, and
// the next begun.
bool JobImpl::HasAcceptedSeal(uint64_t step, uint32_t micro_steps) const {
  if (step == record_.committed_step) {
    return !record_.history.recent_steps.empty() &&
           record_.history.recent_steps.back().outcome.step == step &&
           record_.history.recent_steps.back().micro_steps == micro_steps;
  }
  const auto is_it = [&](const auto& sealed) {
    return sealed != nullptr && sealed->terms().step == step &&
           sealed->micro_steps() == micro_steps;
  };
  return is_it(std::get_if<SealedStep>(&step_)) || is_it(std::get_if<DecidedStep>(&step_));
}

absl::StatusOr<std::optional<SealRefusal>> JobImpl::Seal(const StreamKey& key, StepAttempt at,
                                                         uint32_t micro_steps,
                                                         const std::optional<StepVote>& vote) {
  const uint64_t step = at.step;
  if (micro_steps == 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("rank ", key.rank, " seals step ", step, " with no micro-steps"));
  }
  Listeners others;
  SealRefusal refusal;
  {
    Section section(*this);
    BALLAST_RETURN_IF_ERROR(CheckCurrent(key));
    // The step is a skip, and its decision is on the way to the rank: that answers the seal.
    if (WasGivenUp(step, key.rank)) return std::nullopt;
    if (HasAcceptedSeal(step, micro_steps)) {
      BALLAST_RETURN_IF_ERROR(RepeatSeal(key.rank, vote));
      return std::nullopt;
    }
    BALLAST_ASSIGN_OR_RETURN(OpenStep * open, FindOpenStep(step));
    BALLAST_ASSIGN_OR_RETURN(const bool current, open->CheckAttempt(key.rank, at.attempt));
    if (!current) return RefuseDiscarded(step, key.rank, at.attempt, key.rank);
    // Its last word counts.
    const bool sealed_before = open->ranks()[key.rank].sealed == micro_steps;
    if (!sealed_before) open->Unseal(key.rank);  // Until it is taken the rank has not sealed.
    // The same seal again, from a stream that was opened again: it was checked when it was taken,
    // and nothing was added since (CheckMayContribute).
    if (auto refused =
            sealed_before ? std::nullopt : CheckRank(Given(*open), key.rank, micro_steps)) {
      refused->attempt = at.attempt;
      return refused;
    }
    if (vote.has_value()) {
      BALLAST_RETURN_IF_ERROR(CheckVote(spec(), open->terms(), key.rank, *vote));
    }
    for (const int chunk : layout_.chunks_of_rank(key.rank)) {
      // Its sum holds a part of a contribution that was not acknowledged, and that the ledger does
      // not count. A seal of fewer micro-steps would pass, with that part in the sum.
      if (!gradients_->half_added(chunk)) continue;
      return SealRefusal{
          .status = WithReason(
              absl::FailedPreconditionError(absl::StrCat(
                  "chunk ", chunk, " from rank ", key.rank,
                  " was being added to when the service's process died, and has not come again")),
              reason::kSendAndSealAgain),
          .missing = {},
          .attempt = at.attempt};
    }
    if (absl::Status status = open->Seal(key.rank, micro_steps); !status.ok()) {
      return SealRefusal{.status = WithReason(std::move(status), reason::kSendAndSealAgain),
                         .missing = {},
                         .attempt = at.attempt};
    }
    open->SetVote(key.rank, vote);
    if (!open->UnsealedRanks().empty()) return std::nullopt;
    auto refused = CheckStep(Given(*open), key.rank,
                             [&](const ChunkPiece& piece) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
                               return gradients_->HasNonZero(piece, sums_.current(piece.chunk));
                             });
    if (!refused.has_value()) {
      // The step is whole. The engine goes on by itself, until it finds that votes are missing.
      SealedStep sealed = std::move(*open).Close();
      step_ = std::move(sealed);
      gate_.Seal();
      sealed_ns_ = trace_.Begin(step);
      StartDecisionIfDue();
      return std::nullopt;
    }
    refusal = *std::move(refused);
    refusal.attempt = at.attempt;  // Of all: only equal attempts are sealed.
    // All of them: whichever rank has to send more, a rank that has sealed may not.
    open->UnsealAll();
    for (int rank = 0; rank < layout_.world_size(); ++rank) {
      if (rank != key.rank && ranks_[rank].listener != nullptr) {
        others.push_back(ranks_[rank].listener);
      }
    }
  }
  for (const auto& listener : others) listener->OnSealRefused(step, refusal);
  return refusal;
}

// A reopened stream carries the last seal again, too, of which its client does not know what came
// of it: the norm, or a refusal of the vote that it brought.
absl::Status JobImpl::RepeatSeal(int rank, const std::optional<StepVote>& vote) {
  auto* sealed = std::get_if<SealedStep>(&step_);
  if (sealed == nullptr || gate_.phase() != Phase::kVoting) return absl::OkStatus();
  if (sealed->ranks()[rank].vote.has_value()) return absl::OkStatus();
  if (vote.has_value()) return TakeVote(*sealed, rank, *vote);
  TellNorm(*sealed, {rank});
  return absl::OkStatus();
}

// ---------------------------------------------------------------- voting

absl::Status JobImpl::Vote(const StreamKey& key, StepAttempt at, const StepVote& vote) {
  const Section section(*this);
  BALLAST_RETURN_IF_ERROR(CheckCurrent(key));
  if (WasGivenUp(at.step, key.rank)) return absl::OkStatus();
  const auto wrong = [&](absl::string_view why) {
    return absl::FailedPreconditionError(
        absl::StrCat("rank ", key.rank, " votes on step ", at.step, " of job ", spec().name, why));
  };
  // A reopened stream carries the last vote again, of which its client does not know that it was
  // the decision.
  const auto* decided = std::get_if<DecidedStep>(&step_);
  const bool is_decided = decided != nullptr && decided->terms().step == at.step;
  if (is_decided || (at.step == record_.committed_step && at.step > 0)) {
    const bool same = vote == (is_decided ? decided->vote() : record_.last_vote);
    return same ? absl::OkStatus()
                : WithReason(wrong(", which is decided otherwise"), reason::kOtherStep);
  }
  const OpenStep* given = Undecided();
  if (given == nullptr || given->terms().step != at.step) {
    return WithReason(wrong(absl::StrCat(", but the job stands at step ", record_.committed_step)),
                      reason::kOtherStep);
  }
  BALLAST_ASSIGN_OR_RETURN(const bool current, given->CheckAttempt(key.rank, at.attempt));
  if (!current) return wrong(absl::StrCat(" in attempt ", at.attempt, ", which it has discarded"));
  // Another rank has discarded the attempt, which this one could not know: so this is no error of
  // its call, and its listener is told.
  if (!given->IsLive(key.rank)) {
    RunAfter([listener = ranks_[key.rank].listener, at,
              why = RefuseVoteOfDiscarded(at.step, key.rank, at.attempt, given->LiveRank())] {
      if (listener != nullptr) listener->OnVoteRefused(at, why);
    });
    return absl::OkStatus();
  }
  if (!given->lacks_terms()) {  // Of a discarded attempt there are none to check it by.
    BALLAST_RETURN_IF_ERROR(CheckVote(spec(), given->terms(), key.rank, vote));
  }
  auto* sealed = std::get_if<SealedStep>(&step_);
  if (given->is_taken_over() && given->ranks()[key.rank].sealed.has_value()) {
    // It was told the norm by a process that has died since. This one waits for other ranks'
    // seals, or computes the norm again.
    if (sealed == nullptr) {
      std::get<OpenStep>(step_).SetVote(key.rank, vote);
      return absl::OkStatus();
    }
    if (!sealed->group_sums().has_value() && !given->ranks()[key.rank].vote.has_value()) {
      sealed->SetVote(key.rank, vote);
      return absl::OkStatus();
    }
  }
  const bool same = given->ranks()[key.rank].vote == vote;
  if (sealed != nullptr && same) return absl::OkStatus();
  if (gate_.phase() == Phase::kVoting) return TakeVote(*sealed, key.rank, vote);
  return wrong(sealed != nullptr && sealed->RanksWithoutVote().empty()
                   ? ", which is being decided otherwise"
                   : " before its norm is known; seal, and wait for the norm");
}

absl::Status JobImpl::TakeVote(SealedStep& sealed, int rank, const StepVote& vote) {
  // First, so that a vote that can never work leaves the rank's earlier one.
  BALLAST_RETURN_IF_ERROR(CheckVote(spec(), sealed.terms(), rank, vote));
  sealed.SetVote(rank, vote);
  if (!sealed.RanksWithoutVote().empty() || !CheckVotes(sealed)) return absl::OkStatus();
  gate_.EndVoting();
  StartDecisionIfDue();
  return absl::OkStatus();
}

bool JobImpl::CheckVotes(SealedStep& sealed) {
  absl::Status differ = CheckVotesAgree(sealed.terms().step, sealed.ranks());
  if (differ.ok()) return true;
  sealed.VoidVotes();
  TellNorm(sealed, sealed.RanksWithoutVote());  // Some have voted without it.
  const StepAttempt at = {sealed.terms().step, sealed.given().attempt()};
  RunAfter([listeners = ranks_.ByRank(), at, differ = std::move(differ)] {
    for (const auto& listener : listeners) {
      if (listener != nullptr) listener->OnVoteRefused(at, differ);
    }
  });
  return false;
}

// ---------------------------------------------------------------- discarding

// All that is forgotten is forgotten in one turn, so a stream that breaks before it has discarded
// nothing, and after it all.
Pending JobImpl::Discard(const StreamKey& key, StepAttempt at, Done<bool> done) {
  {
    // What only waits to be computed need not be waited for.
    MutexLock lock(mutex_);
    // Should this call be cancelled before its turn, nothing is lost: the decision computes the
    // sums that are missing, and updates after it what was not updated ahead of it.
    const OpenStep* given = Undecided();
    if (ranks_.IsCurrent(key) && given != nullptr && given->terms().step == at.step &&
        given->ranks()[key.rank].attempt == at.attempt) {
      VoidTickets(key.rank);
      speculation_.Cancel(key.rank);
    }
  }
  return Enter(Admission::kDiscard, key.rank,
               [this, self = Self(), key, at, done = std::move(done)](absl::Status admitted)
                   ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) mutable {
                     Reply<bool>(std::move(done), admitted.ok() ? DiscardNow(key, at)
                                                                : absl::StatusOr<bool>(admitted));
                   });
}

absl::StatusOr<bool> JobImpl::DiscardNow(const StreamKey& key, StepAttempt at) {
  const int rank = key.rank;
  BALLAST_RETURN_IF_ERROR(CheckCurrent(key));
  const bool decided = std::holds_alternative<DecidedStep>(step_);
  if (at.step > 0 && at.step == record_.committed_step + (decided ? 1 : 0)) return false;
  // The bound is that of the bits that a ledger's word has for the attempt (kept_job.cc).
  if (at.attempt + 1 >= kMaxAttempts) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "rank ", rank, " has discarded ", at.attempt, " attempts at step ", at.step, " of job ",
        spec().name, ", and a step has no more; abort it (`ballast abort-step ", spec().name,
        "`), and begin it anew"));
  }
  if (gate_.phase() == Phase::kVoting && at.step == record_.committed_step + 1) {
    auto& sealed = std::get<SealedStep>(step_);
    BALLAST_ASSIGN_OR_RETURN(const bool current, sealed.given().CheckAttempt(rank, at.attempt));
    // This discard has been done before. The step that is sealed now is of a later attempt, and
    // stays.
    if (!current) return true;
    OpenStep reopened = std::move(sealed).Reopen();
    step_ = std::move(reopened);
    gate_.Reopen();
  }
  BALLAST_RETURN_IF_ERROR(CheckIsNext(rank, "discards", at.step));
  if (std::holds_alternative<std::monostate>(step_)) {
    if (at.attempt > 0) {
      return absl::FailedPreconditionError(
          absl::StrCat("rank ", rank, " discards attempt ", at.attempt, " at step ", at.step,
                       " of job ", spec().name, ", which no rank has begun"));
    }
    // A rank may discard before any has begun. The step is opened to remember its attempt.
    BALLAST_RETURN_IF_ERROR(OpenNextStep(at.step));
  }
  OpenStep& open = std::get<OpenStep>(step_);
  BALLAST_ASSIGN_OR_RETURN(const bool current, open.CheckAttempt(rank, at.attempt));
  if (!current) return true;
  const absl::Span<const int> chunks = layout_.chunks_of_rank(rank);
  const bool was_live = open.IsLive(rank);
  const std::vector<int> undone = open.Discard(rank, chunks);
  if (kept_ != nullptr) {
    // This entry is all that is stored: the ledger's words name the attempt they are of, so with it
    // those of this one count no more.
    KeepWord({.kind = KeptWord::Kind::kDiscard, .rank = rank, .step = at.step});
    kept_->LookAtSumLanes([&](const SumLane& lane) {
      return layout_.chunks()[SumWord::Unpack(lane.word).chunk].rank != rank;
    });
  }
  // No rank's provisional updates of the attempt that was live can become the state.
  if (was_live) speculation_.Stop();
  VoidTickets(rank);
  speculation_.Cancel(rank);
  speculation_.DropOfRank(rank, *store_);
  for (const int chunk : chunks) {
    ledger_.Clear(chunk);
    sums_.Clear(chunk);
    gradients_->Clear(chunk);
  }
  // Without the lock, as the last reference unmaps the memory.
  RunAfter([lender = ranks_.TakeLender(rank)]() mutable { lender = nullptr; });
  for (const int other : undone) {
    if (ranks_[other].listener == nullptr) continue;
    RunAfter([listener = ranks_[other].listener, step = at.step,
              refusal = RefuseDiscarded(at.step, other, at.attempt, rank)] {
      listener->OnSealRefused(step, refusal);
    });
  }
  return true;
}

}  // namespace ballast
