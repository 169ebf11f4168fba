// What a rank gives a step, up to the decision, and takes back: settings, gradients, ends of
// micro-steps, seals, votes.
//
// A payload is added by the thread that brings it, while it is in that thread's cache, and its sums
// of squares are computed there, too. What lies in memory that is shared with the rank costs the
// transport's thread nothing but the ledger: it stays where it is, and a task computes its sums.
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
  // No turn is waited for: while a step is cleared no stream is current.
  MutexLock lock(mutex_);
  BALLAST_RETURN_IF_ERROR(CheckCurrent(key));
  if (settings.trainer_state.size() > kMaxTrainerStateBytes) {
    return absl::InvalidArgumentError(absl::StrCat(
        "rank ", key.rank, " begins step ", at.step, " with a trainer_state of ",
        settings.trainer_state.size(), " bytes, of ", kMaxTrainerStateBytes, " at most"));
  }
  if (WasGivenUp(at.step, key.rank)) return absl::OkStatus();
  BALLAST_RETURN_IF_ERROR(CheckIsNext(key.rank, "begins", at.step));
  auto* open = std::get_if<OpenStep>(&step_);
  if (open != nullptr) BALLAST_RETURN_IF_ERROR(CheckInAttempt(*open, key.rank, at.attempt));
  if (open == nullptr && at.attempt != 0) {
    return absl::FailedPreconditionError(
        absl::StrCat("rank ", key.rank, " begins attempt ", at.attempt, " at step ", at.step,
                     " of job ", spec().name, ", which no rank has begun; begin with attempt 0"));
  }
  const bool brings_terms = open == nullptr || (open->IsLive(key.rank) && open->lacks_terms());
  if (brings_terms) {
    BALLAST_ASSIGN_OR_RETURN(StepTerms terms, MakeTerms(at.step, settings));
    if (open == nullptr) BALLAST_RETURN_IF_ERROR(OpenNextStep(at.step));
    open = &std::get<OpenStep>(step_);
    // Of an operator's changes those before this are in the terms, and its overrides come last.
    if (later_changes_ != std::vector<HyperParameterOverrides>(later_changes_.size())) {
      later_changes_.assign(later_changes_.size(), {});
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
  if (kept_ != nullptr && open->ranks()[key.rank].micro_steps_ended > ended) {
    KeepWord({.kind = KeptWord::Kind::kEndMicroStep,
              .rank = key.rank,
              .step = at.step,
              .micro_step = micro_step,
              .used = std::move(used)});
  }
  return absl::OkStatus();
}

// ---------------------------------------------------------------- gradients

absl::Status JobImpl::CheckContribution(int rank, const Contribution& given) const {
  if (given.chunk < 0 || given.chunk >= static_cast<int64_t>(layout_.chunks().size())) {
    return absl::InvalidArgumentError(absl::StrCat("chunk ", given.chunk, " is not in job ",
                                                   spec().name, ", which has ",
                                                   layout_.chunks().size()));
  }
  const Chunk& chunk = layout_.chunks()[given.chunk];
  if (chunk.rank != rank) {
    return absl::InvalidArgumentError(absl::StrCat("chunk ", given.chunk, " belongs to rank ",
                                                   chunk.rank, ", not to rank ", rank));
  }
  if (given.in_place && given.empty) {
    return absl::InvalidArgumentError(absl::StrCat("chunk ", given.chunk, " from rank ", rank,
                                                   " lies in shared memory and is empty"));
  }
  size_t size_bytes = 0;
  for (const auto& piece : given.payload) size_bytes += piece.size();
  const DType dtype = spec().groups[chunk.group].wire_dtype;
  const bool has_payload = !given.empty && !given.in_place;
  const size_t expected =
      has_payload ? static_cast<size_t>(chunk.elements * SizeBytes(dtype)) : size_t{0};
  if (size_bytes != expected) {
    return absl::InvalidArgumentError(absl::StrCat(
        "chunk ", given.chunk, " from rank ", rank, " has ", size_bytes, " bytes, expected ",
        expected,
        given.empty      ? " as it is empty"
        : given.in_place ? " as it lies in shared memory"
                         : absl::StrCat(": ", chunk.elements, " elements of ", Name(dtype))));
  }
  return CheckMicroSteps(absl::StrCat("chunk ", given.chunk, " covers"), given.micro_step_end);
}

absl::StatusOr<JobImpl::Accepted> JobImpl::Accept(const StreamKey& key, const Contribution& given) {
  const int chunk = static_cast<int>(given.chunk);
  BALLAST_RETURN_IF_ERROR(CheckCurrent(key));
  BALLAST_RETURN_IF_ERROR(CheckContribution(key.rank, given));
  if (WasGivenUp(given.step, key.rank)) return Accepted{.result = ContributionResult::kDiscarded};
  BALLAST_ASSIGN_OR_RETURN(OpenStep * open, FindOpenStep(given.step));
  // A worker may push on one thread while it discards on another.
  BALLAST_ASSIGN_OR_RETURN(const bool current, open->CheckAttempt(key.rank, given.attempt));
  if (!current) return Accepted{.result = ContributionResult::kDiscarded};
  BALLAST_ASSIGN_OR_RETURN(
      const Ledger::Verdict verdict,
      ledger_.Check(given.chunk, given.micro_step_begin, given.micro_step_end));
  if (verdict == Ledger::Verdict::kRepeat) return Accepted{.result = ContributionResult::kRepeat};
  BALLAST_RETURN_IF_ERROR(open->CheckMayContribute(key.rank));
  if (gradients_->half_added(chunk) &&
      (given.empty || !kept_->HasLeft(chunk, KeptJob::TagOf(kept_state_.epoch, given.attempt,
                                                            given.micro_step_end)))) {
    return absl::FailedPreconditionError(absl::StrCat(
        "chunk ", given.chunk, " from rank ", key.rank, " covers micro-steps ",
        given.micro_step_begin, " to ", given.micro_step_end,
        ", and others were being added when the service's process died; send those again, or "
        "discard the attempt"));
  }
  // A guess that it drops is not read any more: see Contribute.
  if (speculation_.DropGuess(chunk, *store_)) ++record_.history.speculation.redone;
  sums_.Clear(chunk);
  const RankEntry& rank = ranks_[key.rank];
  Accepted accepted = {.provisional = speculation_.update(),
                       .ticket = tickets_[key.rank],
                       .epoch = kept_state_.epoch};
  if (given.in_place) {
    if (rank.memory == nullptr) {
      return absl::FailedPreconditionError(
          absl::StrCat("chunk ", given.chunk, " from rank ", key.rank,
                       " is said to lie in shared memory, but job ", spec().name,
                       " shares none with that rank"));
    }
    accepted.memory = rank.memory;
    // Where shared memory may be gone before the job is, its gradients are copied: what has been
    // acknowledged, and decided, must be there.
    const bool may_borrow =
        environment_.named_memory == nullptr || environment_.named_memory->KeepsShared();
    accepted.borrowed = may_borrow && given.final && ledger_.next_micro_step(given.chunk) == 0;
  }
  if (accepted.borrowed) {
    ranks_.Lend(key.rank);
    gradients_->Borrow(chunk, rank.memory->gradient(chunk).data());
    KeepContribution(given, accepted.epoch);
    ledger_.Advance(given.chunk, given.micro_step_end, given.final);
  } else {
    gate_.StartAdding(key.rank);
  }
  if (given.empty) {
    open->RecordEmpty(chunk, given.micro_step_begin, given.micro_step_end);
    if (kept_ != nullptr) {
      KeepWord({.kind = KeptWord::Kind::kEmpty,
                .rank = key.rank,
                .step = given.step,
                .chunk = chunk,
                .begin = given.micro_step_begin,
                .end = given.micro_step_end});
    }
  }
  return accepted;
}

absl::StatusOr<ContributionResult> JobImpl::Contribute(const StreamKey& key,
                                                       const Contribution& given) {
  const int64_t arrived_ns = trace_.Begin(given.step);
  const int chunk = static_cast<int>(given.chunk);
  Accepted accepted;
  {
    MutexLock lock(mutex_);
    // Of a guess that was wrong, for as long as the update of one chunk takes at most: it is not
    // only queued, but runs, and calls nobody meanwhile.
    while (!broken() && speculation_.IsRunning(given.chunk)) guess_over_.Wait(mutex_);
    BALLAST_ASSIGN_OR_RETURN(accepted, Accept(key, given));
  }
  if (accepted.result != ContributionResult::kAdded) return accepted.result;
  if (!given.empty) {
    (given.in_place ? gradient_bytes_in_place_ : gradient_bytes_in_messages_) +=
        layout_.chunks()[chunk].elements *
        SizeBytes(spec().groups[layout_.chunks()[chunk].group].wire_dtype);
  }
  if (accepted.borrowed) {
    trace_.Record(TraceEventKind::kArrived, given.step, chunk, arrived_ns);
    StartSums(given.step, chunk, accepted.ticket);
    return ContributionResult::kAdded;
  }
  // This rank's calls come one at a time, and no other rank owns the chunk.
  SumLane* lane = nullptr;
  if (kept_ != nullptr && !given.empty && gradients_->changes_sum(chunk)) {
    lane = kept_->TakeSumLane(chunk,
                              KeptJob::TagOf(accepted.epoch, given.attempt, given.micro_step_end));
  }
  AddToGradient(given, accepted.memory.get(), lane);
  KeepContribution(given, accepted.epoch);
  if (lane != nullptr) kept_->GiveSumLane(lane);
  trace_.Record(TraceEventKind::kArrived, given.step, chunk, arrived_ns);
  // What may be added to later is not left to a task.
  const bool whole = given.final || given.may_guess;
  const bool sums_here = whole && (given.may_guess || !given.in_place);
  const double squared_norm =
      sums_here ? ComputeSums(given.step, chunk, accepted.provisional.get()) : 0;
  std::optional<Speculation::Task> provisional;
  {
    Section section(*this);
    if (broken()) return broken_;
    ledger_.Advance(given.chunk, given.micro_step_end, given.final);
    gate_.StopAdding(key.rank);
    if (sums_here) {
      sums_.Finish(chunk);
      provisional = SpeculateIfWorthwhile(chunk, squared_norm);
    }
  }
  if (provisional.has_value()) StartProvisional(*std::move(provisional));
  if (whole && !sums_here) StartSums(given.step, chunk, accepted.ticket);
  return ContributionResult::kAdded;
}

void JobImpl::AddToGradient(const Contribution& given, const RankMemory* memory, SumLane* lane) {
  const int chunk = static_cast<int>(given.chunk);
  if (given.empty) {
    gradients_->AddZeros(chunk);
  } else if (memory != nullptr) {
    const absl::Span<const std::byte> place = memory->gradient(chunk);
    gradients_->Add(chunk, {&place, 1}, lane);
  } else {
    gradients_->Add(chunk, given.payload, lane);
  }
}

// ---------------------------------------------------------------- sums of squares

double JobImpl::ComputeSums(uint64_t step, int chunk, const StepUpdate* provisional) {
  const TraceSpan span(trace_, TraceEventKind::kSummed, step, chunk);
  gradients_->ComputeSums(chunk);
  if (provisional == nullptr) return 0;
  const double unscale = provisional->multipliers[layout_.chunks()[chunk].group];
  return unscale * unscale * gradients_->SumInChunk(chunk);
}

void JobImpl::StartOfChunk(int chunk, std::function<void()> task) {
  const int node = environment_.tasks->NodeOf(chunk, static_cast<int64_t>(layout_.chunks().size()));
  StartTask(std::move(task), node);
}

void JobImpl::StartSums(uint64_t step, int chunk, uint64_t ticket) {
  StartOfChunk(chunk, [self = Self(), step, chunk, ticket] { self->RunSums(step, chunk, ticket); });
}

void JobImpl::RunSums(uint64_t step, int chunk, uint64_t ticket) {
  const int owner = layout_.chunks()[chunk].rank;
  std::shared_ptr<const StepUpdate> update;
  {
    MutexLock lock(mutex_);
    // The step is over or forgotten, or its decision was first. What the chunk holds now may be
    // another attempt's, which has tasks of its own.
    if (broken() || ticket != tickets_[owner] || !sums_.Claim(chunk)) return;
    gate_.StartComputing(owner);
    update = speculation_.update();
  }
  const double squared_norm = ComputeSums(step, chunk, update.get());
  std::optional<Speculation::Task> provisional;
  {
    Section section(*this);
    if (broken()) return;
    sums_.Finish(chunk);
    gate_.StopComputing(owner);
    provisional = SpeculateIfWorthwhile(chunk, squared_norm);
  }
  // Here and now, since the gradient is in this thread's cache.
  if (provisional.has_value()) RunProvisional(*std::move(provisional));
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
    if (auto refused =
            sealed_before ? std::nullopt : CheckRank(Given(*open), key.rank, micro_steps)) {
      refused->attempt = at.attempt;
      return refused;
    }
    if (vote.has_value()) {
      BALLAST_RETURN_IF_ERROR(CheckVote(spec(), open->terms(), key.rank, *vote));
    }
    for (const int chunk : layout_.chunks_of_rank(key.rank)) {
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
      SealedStep sealed = std::move(*open).Close();
      step_ = std::move(sealed);
      gate_.Seal();
      sealed_ns_ = trace_.Begin(step);
      StartDecisionIfDue();
      return std::nullopt;
    }
    refusal = *std::move(refused);
    refusal.attempt = at.attempt;  // Of all: only equal attempts are sealed.
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
    const bool same = vote == (is_decided ? decided->vote() : last_vote_);
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
  if (auto* open = std::get_if<OpenStep>(&step_); open != nullptr && at.step == taken_over_step_ &&
                                                  open->ranks()[key.rank].sealed.has_value()) {
    // It was told the norm by a process that has died since, and other ranks have not come back yet.
    open->SetVote(key.rank, vote);
    return absl::OkStatus();
  }
  const bool same = given->ranks()[key.rank].vote == vote;
  if (sealed != nullptr && same) return absl::OkStatus();
  if (gate_.phase() == Phase::kVoting) return TakeVote(*sealed, key.rank, vote);
  return wrong(sealed != nullptr && sealed->RanksWithoutVote().empty()
                   ? ", which is being decided otherwise"
                   : " before its norm is known; seal, and wait for the norm");
}

absl::Status JobImpl::TakeVote(SealedStep& sealed, int rank, const StepVote& vote) {
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
  if (at.attempt + 1 >= kMaxAttempts) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "rank ", rank, " has discarded ", at.attempt, " attempts at step ", at.step, " of job ",
        spec().name, ", and a step has no more; abort it (`ballast abort-step ", spec().name,
        "`), and begin it anew"));
  }
  if (gate_.phase() == Phase::kVoting && at.step == record_.committed_step + 1) {
    auto& sealed = std::get<SealedStep>(step_);
    BALLAST_ASSIGN_OR_RETURN(const bool current, sealed.given().CheckAttempt(rank, at.attempt));
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
    BALLAST_RETURN_IF_ERROR(OpenNextStep(at.step));
  }
  OpenStep& open = std::get<OpenStep>(step_);
  BALLAST_ASSIGN_OR_RETURN(const bool current, open.CheckAttempt(rank, at.attempt));
  if (!current) return true;
  const absl::Span<const int> chunks = layout_.chunks_of_rank(rank);
  const bool was_live = open.IsLive(rank);
  const std::vector<int> undone = open.Discard(rank, chunks);
  if (kept_ != nullptr) {
    KeepWord({.kind = KeptWord::Kind::kDiscard, .rank = rank, .step = at.step});
    kept_->LookAtSumLanes([&](const SumLane& lane) {
      return layout_.chunks()[SumWord::Unpack(lane.word).chunk].rank != rank;
    });
  }
  // No rank's provisional updates of the attempt that was live can become the state.
  if (was_live) speculation_.Stop();
  VoidTickets(rank);
  speculation_.Cancel(rank);
  speculation_.Drop(rank, *store_);
  for (const int chunk : chunks) {
    ledger_.Clear(chunk);
    sums_.Clear(chunk);
    gradients_->Clear(chunk);
  }
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

RankProgress JobImpl::ProgressOf(int rank, const RankInStep* state) const {
  const absl::Span<const int> chunks = layout_.chunks_of_rank(rank);
  RankProgress progress;
  progress.attached = !ranks_[rank].process_id.empty();
  progress.process_id = ranks_[rank].process_id;
  progress.shared_memory = ranks_[rank].memory != nullptr;
  progress.chunks = static_cast<int64_t>(chunks.size());
  if (state == nullptr) return progress;
  progress.attempt = state->attempt;
  progress.begun = state->begun;
  progress.micro_steps_ended = state->micro_steps_ended;
  progress.sealed = state->sealed.has_value();
  progress.voted = state->vote.has_value();
  progress.furthest_micro_step = state->sealed.value_or(0);
  for (const int chunk : chunks) {
    progress.furthest_micro_step =
        std::max(progress.furthest_micro_step, ledger_.next_micro_step(chunk));
  }
  if (progress.furthest_micro_step == 0)
    return progress;  // Nothing has arrived, so nothing is behind.
  progress.chunks_complete = std::count_if(
      chunks.begin(), chunks.end(), [&](int chunk) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
        return ledger_.next_micro_step(chunk) == progress.furthest_micro_step;
      });
  progress.missing_parameters =
      NamesBehind(spec(), layout_, ledger_, rank, progress.furthest_micro_step);
  return progress;
}

}  // namespace ballast
