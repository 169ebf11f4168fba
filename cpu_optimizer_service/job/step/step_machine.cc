#include "cpu_optimizer_service/job/step/step_machine.h"

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/check.h"
#include "cpu_optimizer_service/common/reason.h"
#include "cpu_optimizer_service/common/status.h"
#include "cpu_optimizer_service/job/step/step_decision.h"

namespace ballast {

// ---------------------------------------------------------------- checks

absl::Status StepMachine::CheckIsNext(const StepBefore& before, int rank, absl::string_view does,
                                      uint64_t step) const {
  if (step == before.step + 1 && (between_steps() || stage_ == Stage::kOpen)) {
    return absl::OkStatus();
  }
  const bool updates = stage_ == Stage::kSealed || stage_ == Stage::kDecided;
  return WithReason(absl::FailedPreconditionError(absl::StrCat(
                        "rank ", rank, " ", does, " step ", step, " but job ", spec_.name,
                        " is at step ", before.step, updates ? " and is updating" : "")),
                    reason::kOtherStep);
}

absl::Status StepMachine::CheckIsOpen(const StepBefore& before, uint64_t step) const {
  if (stage_ == Stage::kOpen && agreement_->step() == step) return absl::OkStatus();
  return WithReason(
      absl::FailedPreconditionError(absl::StrCat(
          "step ", step, " of job ", spec_.name, " is not open: ",
          stage_ == Stage::kOpen
              ? absl::StrCat("step ", agreement_->step(), " is")
              : absl::StrCat(
                    "the job is at step ", before.step,
                    step == before.step + 1 ? ", and the step has not begun or is sealed" : ""))),
      reason::kOtherStep);
}

absl::Status StepMachine::CheckInAttempt(int rank, uint32_t attempt) const {
  BALLAST_ASSIGN_OR_RETURN(const bool current, agreement_->CheckAttempt(rank, attempt));
  if (current) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("rank ", rank, " has discarded attempt ", attempt, " at step ",
                   agreement_->step(), " and is in attempt ", agreement_->ranks()[rank].attempt));
}

bool StepMachine::WasGivenUp(const StepBefore& before, uint64_t step, int rank) const {
  if (step == 0 || step != given_up_ || step < before.step) return false;
  // A rank that has begun the next step knows of the skip. What it says of the older step is an
  // error again.
  const StepAgreement* next = undecided();
  return next == nullptr || !next->ranks()[rank].begun;
}

bool StepMachine::CanBeSkipped() const {
  // The record of a skip needs the step's terms, which an attempt lacks until a rank begins it.
  const StepAgreement* given = undecided();
  return given != nullptr && !given->lacks_terms() && given->all_have_begun();
}

// ---------------------------------------------------------------- giving

absl::StatusOr<StepTerms> StepMachine::MakeTerms(const StepBefore& before, uint64_t step,
                                                 const StepSettings& settings) const {
  const int groups = layout_.group_count();
  BALLAST_RETURN_IF_ERROR(CheckScale(settings.scale, groups));
  BALLAST_RETURN_IF_ERROR(
      Annotate(Validate(settings.expected_clipping, groups), "the expected clipping"));
  StepTerms terms = {.step = step, .settings = settings, .hyper_parameters = {}};
  BALLAST_ASSIGN_OR_RETURN(terms.hyper_parameters,
                           WithOverrides(spec_, before.hyper_parameters, settings.overrides));
  return terms;
}

void StepMachine::Open(uint64_t step, StepEffects& effects) {
  agreement_.emplace(step, layout_.world_size(), layout_.ranks());
  stage_ = Stage::kOpen;
  effects.opened = true;
}

absl::Status StepMachine::Begin(const StepBefore& before, int rank, StepAttempt at,
                                const StepSettings& settings, StepEffects& effects) {
  if (WasGivenUp(before, at.step, rank)) return absl::OkStatus();
  BALLAST_RETURN_IF_ERROR(CheckIsNext(before, rank, "begins", at.step));
  if (agreement_.has_value()) BALLAST_RETURN_IF_ERROR(CheckInAttempt(rank, at.attempt));
  if (!agreement_.has_value() && at.attempt != 0) {
    return absl::FailedPreconditionError(
        absl::StrCat("rank ", rank, " begins attempt ", at.attempt, " at step ", at.step,
                     " of job ", spec_.name, ", which no rank has begun; begin with attempt 0"));
  }
  const bool brings_terms =
      !agreement_.has_value() || (agreement_->IsLive(rank) && agreement_->lacks_terms());
  if (brings_terms) {
    // The settings are checked before the step is opened, so that a refusal leaves no open step.
    BALLAST_ASSIGN_OR_RETURN(StepTerms terms, MakeTerms(before, at.step, settings));
    if (!agreement_.has_value()) Open(at.step, effects);
    agreement_->SetTerms(std::move(terms));
    effects.has_terms = true;
  }
  const bool had_begun = agreement_->ranks()[rank].begun;
  BALLAST_RETURN_IF_ERROR(agreement_->Begin(rank, settings));
  if (had_begun) return absl::OkStatus();
  effects.words.push_back(
      {.kind = StepWord::Kind::kBegin,
       .rank = rank,
       .step = at.step,
       .settings = brings_terms ? StepSettings() : settings,
       .terms = brings_terms ? std::optional(agreement_->terms()) : std::nullopt});
  return absl::OkStatus();
}

absl::StatusOr<StepMachine::Wants> StepMachine::CheckContribution(const StepBefore& before,
                                                                  int rank, StepAttempt at,
                                                                  int chunk, uint32_t begin,
                                                                  uint32_t end) const {
  if (WasGivenUp(before, at.step, rank)) return Wants::kDiscarded;
  BALLAST_RETURN_IF_ERROR(CheckIsOpen(before, at.step));
  // A worker may push on one thread while it discards on another.
  BALLAST_ASSIGN_OR_RETURN(const bool current, agreement_->CheckAttempt(rank, at.attempt));
  if (!current) return Wants::kDiscarded;
  BALLAST_ASSIGN_OR_RETURN(const Ledger::Verdict verdict, ledger().Check(chunk, begin, end));
  // Before it is asked whether the rank may still contribute: a stream that was opened again sends
  // what it does not know to have arrived, also after its seal.
  if (verdict == Ledger::Verdict::kRepeat) return Wants::kRepeat;
  BALLAST_RETURN_IF_ERROR(agreement_->CheckMayContribute(rank));
  return Wants::kIt;
}

void StepMachine::Empty(int rank, int chunk, uint32_t begin, uint32_t end, StepEffects& effects) {
  part_.RecordEmpty(chunk, begin, end);
  effects.words.push_back({.kind = StepWord::Kind::kEmpty,
                           .rank = rank,
                           .step = agreement_->step(),
                           .chunk = chunk,
                           .begin = begin,
                           .end = end});
}

absl::Status StepMachine::EndMicroStep(const StepBefore& before, int rank, StepAttempt at,
                                       uint32_t micro_step, UsedParameters used,
                                       StepEffects& effects) {
  if (WasGivenUp(before, at.step, rank)) return absl::OkStatus();
  BALLAST_RETURN_IF_ERROR(CheckIsOpen(before, at.step));
  BALLAST_RETURN_IF_ERROR(CheckInAttempt(rank, at.attempt));
  // A stream that was opened again sends what it does not know to have arrived.
  if (agreement_->ranks()[rank].begun && micro_step < part_.rank(rank).micro_steps_ended) {
    return absl::OkStatus();
  }
  BALLAST_RETURN_IF_ERROR(agreement_->CheckMayContribute(rank));
  BALLAST_RETURN_IF_ERROR(
      part_.EndMicroStep(at.step, rank, agreement_->IsLive(rank), micro_step, used));
  effects.words.push_back({.kind = StepWord::Kind::kEndMicroStep,
                           .rank = rank,
                           .step = at.step,
                           .micro_step = micro_step,
                           .used = std::move(used)});
  return absl::OkStatus();
}

// ---------------------------------------------------------------- sealing

absl::StatusOr<std::optional<SealRefusal>> StepMachine::Seal(const StepBefore& before, int rank,
                                                             StepAttempt at, uint32_t micro_steps,
                                                             const std::optional<StepVote>& vote,
                                                             const Looks& looks,
                                                             StepEffects& effects) {
  if (micro_steps == 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("rank ", rank, " seals step ", at.step, " with no micro-steps"));
  }
  // The step is a skip, and its decision is on the way to the rank: that answers the seal.
  if (WasGivenUp(before, at.step, rank)) return std::nullopt;
  // A reopened stream carries the last seal again, of which its client does not know that it was
  // accepted. By the time it is read, the other ranks may have sealed, the step been committed, and
  // the next begun.
  if (at.step == before.step && micro_steps == before.micro_steps) return std::nullopt;
  if (stage_ > Stage::kOpen && at.step == agreement_->step() &&
      micro_steps == agreement_->micro_steps()) {
    BALLAST_RETURN_IF_ERROR(RepeatSeal(rank, vote, effects));
    return std::nullopt;
  }
  BALLAST_RETURN_IF_ERROR(CheckIsOpen(before, at.step));
  BALLAST_ASSIGN_OR_RETURN(const bool current, agreement_->CheckAttempt(rank, at.attempt));
  if (!current) return RefuseDiscarded(at.step, rank, at.attempt, rank);
  // Its last word counts.
  const bool sealed_before = agreement_->ranks()[rank].sealed == micro_steps;
  if (!sealed_before) {
    agreement_->Unseal(rank);  // Until it is taken the rank has not sealed.
    // The same seal again was checked when it was taken, and nothing was added since.
    if (auto refused = CheckRank(Given(), rank, micro_steps)) {
      refused->attempt = at.attempt;
      return refused;
    }
  }
  if (vote.has_value()) BALLAST_RETURN_IF_ERROR(CheckVote(spec_, agreement_->terms(), rank, *vote));
  for (const int chunk : layout_.chunks_of_rank(rank)) {
    // Its sum holds a part of a contribution that was not acknowledged, and that the ledger does
    // not count. A seal of fewer micro-steps would pass, with that part in the sum.
    if (!looks.half_added(chunk)) continue;
    return SealRefusal{.status = WithReason(absl::FailedPreconditionError(absl::StrCat(
                                                "the service crashed while adding to chunk ", chunk,
                                                " from rank ", rank, "; send it again")),
                                            reason::kSendAndSealAgain),
                       .missing = {},
                       .attempt = at.attempt};
  }
  const bool has_begun = agreement_->ranks()[rank].begun;
  if (const uint32_t ended = part_.rank(rank).micro_steps_ended;
      !has_begun || ended != micro_steps) {
    return SealRefusal{
        .status = WithReason(
            absl::FailedPreconditionError(
                has_begun ? absl::StrCat("rank ", rank, " seals ", micro_steps,
                                         " micro-steps of step ", at.step, " but has ended ", ended)
                          : absl::StrCat("rank ", rank, " seals step ", at.step,
                                         " that it has not begun")),
            reason::kSendAndSealAgain),
        .missing = {},
        .attempt = at.attempt};
  }
  agreement_->Seal(rank, micro_steps);
  agreement_->SetVote(rank, vote);
  if (!agreement_->UnsealedRanks().empty()) return std::nullopt;
  auto refused = CheckPart(Given(), rank, looks.has_gradient);
  if (!refused.has_value() && is_alone()) refused = CheckUses(Given(), rank, looks.has_gradient);
  if (!refused.has_value()) {
    // The step is whole. It goes on by itself, until it is found that votes are missing.
    stage_ = Stage::kSealed;
    effects.sealed = true;
    return std::nullopt;
  }
  refused->attempt = at.attempt;  // Of all: only equal attempts are sealed.
  // All of them: whichever rank has to send more, a rank that has sealed may not.
  agreement_->UnsealAll();
  for (const int other : layout_.ranks()) {
    if (other != rank) effects.told.push_back({other, *refused});
  }
  return refused;
}

// Its client does not know what came of it: the norm, or a refusal of the vote that it brought.
absl::Status StepMachine::RepeatSeal(int rank, const std::optional<StepVote>& vote,
                                     StepEffects& effects) {
  if (agreement_->ranks()[rank].vote.has_value()) return absl::OkStatus();
  const bool is_asked = stage_ == Stage::kReported && norm_is_known_;
  // It had sealed with this vote, which is not kept.
  const bool is_known = is_report_taken_over_ && stage_ != Stage::kDecided;
  if (vote.has_value() && (is_asked || is_known)) return TakeVote(rank, *vote, effects);
  if (is_asked) TellNorm({rank}, effects);
  return absl::OkStatus();
}

// ---------------------------------------------------------------- voting

void StepMachine::TellNorm(const std::vector<int>& ranks, StepEffects& effects) const {
  for (const int rank : ranks) effects.told.push_back({rank, StepEffects::NormIsKnown()});
}

std::optional<StepVote> StepMachine::CommonVote() const {
  const bool is_one = agreement_->RanksWithoutVote().empty() &&
                      CheckVotesAgree(agreement_->step(), agreement_->ranks()).ok();
  return is_one ? std::optional(agreement_->vote()) : std::nullopt;
}

bool StepMachine::NormIsKnown(StepEffects& effects) {
  norm_is_known_ = true;
  const std::vector<int> awaited = agreement_->RanksWithoutVote();
  if (awaited.empty() && VotesAgree(effects)) return true;
  // Votes that differ have been voided by now, so they are awaited like those that are missing.
  if (!awaited.empty()) TellNorm(awaited, effects);
  return false;
}

void StepMachine::AwaitLead() {
  Check(stage_ == Stage::kSealed, "only a sealed part is reported");
  stage_ = Stage::kReported;
}

void StepMachine::GoOn() {
  Check(stage_ == Stage::kReported, "the lead goes on with a reported part");
  stage_ = Stage::kSealed;
}

void StepMachine::Reopen(StepEffects& effects) {
  if (stage_ != Stage::kReported) return;
  stage_ = Stage::kOpen;
  norm_is_known_ = is_report_taken_over_ = false;
  effects.reopened = true;
}

absl::Status StepMachine::Vote(const StepBefore& before, int rank, StepAttempt at,
                               const StepVote& vote, StepEffects& effects) {
  if (WasGivenUp(before, at.step, rank)) return absl::OkStatus();
  const auto wrong = [&](absl::string_view why) {
    return absl::FailedPreconditionError(
        absl::StrCat("rank ", rank, " votes on step ", at.step, " of job ", spec_.name, why));
  };
  // A reopened stream carries the last vote again, of which its client does not know that it was
  // the decision.
  const bool is_decided = stage_ == Stage::kDecided && agreement_->step() == at.step;
  if (is_decided || (at.step == before.step && at.step > 0)) {
    const bool same = vote == (is_decided ? agreement_->vote() : before.vote);
    return same ? absl::OkStatus()
                : WithReason(wrong(", which is decided otherwise"), reason::kOtherStep);
  }
  const StepAgreement* given = undecided();
  if (given == nullptr || given->step() != at.step) {
    return WithReason(wrong(absl::StrCat(", but the job is at step ", before.step)),
                      reason::kOtherStep);
  }
  BALLAST_ASSIGN_OR_RETURN(const bool current, given->CheckAttempt(rank, at.attempt));
  if (!current) return wrong(absl::StrCat(" in attempt ", at.attempt, ", which it has discarded"));
  // Another rank has discarded the attempt, which this one could not know: so this is no error of
  // its call, and its listener is told.
  if (!given->IsLive(rank)) {
    effects.told.push_back(
        {rank, StepEffects::VoteRefused{
                   at, RefuseVoteOfDiscarded(at.step, rank, at.attempt, given->live_since())}});
    return absl::OkStatus();
  }
  if (!given->lacks_terms()) {  // Of a discarded attempt there are none to check it by.
    BALLAST_RETURN_IF_ERROR(CheckVote(spec_, given->terms(), rank, vote));
  }
  const RankInStep& state = given->ranks()[rank];
  const bool is_sealed = stage_ != Stage::kOpen;
  // It was told the norm by a process that has died since. This one waits for other ranks' seals,
  // or computes the norm again.
  if (given->is_taken_over() && state.sealed.has_value() &&
      (!is_sealed || (!norm_is_known_ && !state.vote.has_value()))) {
    agreement_->SetVote(rank, vote);
    return absl::OkStatus();
  }
  if (is_sealed && state.vote == vote) return absl::OkStatus();
  const bool awaited = !given->RanksWithoutVote().empty();
  if (stage_ == Stage::kReported && norm_is_known_ && awaited) return TakeVote(rank, vote, effects);
  return wrong(is_sealed && !awaited ? ", which is being decided otherwise"
                                     : " before its norm is known; seal, and wait for the norm");
}

absl::Status StepMachine::TakeVote(int rank, const StepVote& vote, StepEffects& effects) {
  // First, so that a vote that can never work leaves the rank's earlier one.
  BALLAST_RETURN_IF_ERROR(CheckVote(spec_, agreement_->terms(), rank, vote));
  agreement_->SetVote(rank, vote);
  // Before the norm is known the part has not been asked for its vote.
  if (!norm_is_known_ || !agreement_->RanksWithoutVote().empty()) return absl::OkStatus();
  if (VotesAgree(effects)) effects.voted = true;
  return absl::OkStatus();
}

bool StepMachine::VotesAgree(StepEffects& effects) {
  const absl::Status differ = CheckVotesAgree(agreement_->step(), agreement_->ranks());
  if (!differ.ok()) VoteAgain(differ, effects);
  return differ.ok();
}

void StepMachine::VoteAgain(const absl::Status& why, StepEffects& effects) {
  norm_is_known_ = true;
  agreement_->VoidVotes();
  TellNorm(agreement_->RanksWithoutVote(), effects);  // Some have voted without it.
  const StepAttempt at = {agreement_->step(), agreement_->attempt()};
  for (const int rank : layout_.ranks()) {
    effects.told.push_back({rank, StepEffects::VoteRefused{at, why}});
  }
}

// ---------------------------------------------------------------- discarding

absl::StatusOr<bool> StepMachine::Discard(const StepBefore& before, int rank, StepAttempt at,
                                          StepEffects& effects) {
  const bool is_decided = stage_ == Stage::kDecided;
  if (at.step > 0 && at.step == before.step + (is_decided ? 1 : 0)) return false;
  // The bound is that of the bits that a ledger's word has for the attempt (kept_job.cc).
  if (at.attempt + 1 >= kMaxAttempts) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "rank ", rank, " has discarded ", at.attempt, " attempts at step ", at.step, " of job ",
        spec_.name, ", which is the limit; abort the step (`ballast abort-step ", spec_.name,
        "`) and begin it again"));
  }
  if (stage_ == Stage::kReported && at.step == before.step + 1) {
    BALLAST_ASSIGN_OR_RETURN(const bool current, agreement_->CheckAttempt(rank, at.attempt));
    // This discard has been done before. The step that is sealed now is of a later attempt, and
    // stays.
    if (!current) return true;
    Reopen(effects);
  }
  BALLAST_RETURN_IF_ERROR(CheckIsNext(before, rank, "discards", at.step));
  if (between_steps()) {
    if (at.attempt > 0) {
      return absl::FailedPreconditionError(
          absl::StrCat("rank ", rank, " discards attempt ", at.attempt, " at step ", at.step,
                       " of job ", spec_.name, ", which no rank has begun"));
    }
    // A rank may discard before any has begun. The step is opened to remember its attempt.
    Open(at.step, effects);
  }
  BALLAST_ASSIGN_OR_RETURN(const bool current, agreement_->CheckAttempt(rank, at.attempt));
  if (!current) return true;
  effects.live_is_over = agreement_->IsLive(rank);
  effects.forgotten = rank;
  for (const int other : agreement_->Discard(rank)) {
    effects.told.push_back({other, RefuseDiscarded(at.step, other, at.attempt, rank)});
  }
  part_.Forget(rank, layout_.chunks_of_rank(rank));
  if (effects.live_is_over) part_.ForgetLive();
  // This word is all that is kept: the ledger's words name the attempt they are of, so with it
  // those of this one count no more.
  effects.words.push_back({.kind = StepWord::Kind::kDiscard, .rank = rank, .step = at.step});
  return true;
}

// ---------------------------------------------------------------- the lead's words

void StepMachine::RaiseLive(const StepBefore& before, StepAttempt at, int by,
                            StepEffects& effects) {
  if (at.step != before.step + 1 || stage_ == Stage::kDecided) return;
  if (between_steps()) Open(at.step, effects);
  if (at.attempt <= agreement_->attempt()) return;
  Reopen(effects);
  effects.live_is_over = true;
  for (const int rank : agreement_->RaiseTo(at.attempt, by)) {
    const uint32_t attempt = agreement_->ranks()[rank].attempt;
    effects.told.push_back({rank, RefuseDiscarded(at.step, rank, attempt, by)});
  }
  part_.ForgetLive();
  // What ranks say from now on of attempts before it does not count.
  effects.words.push_back(
      {.kind = StepWord::Kind::kLive, .rank = by, .step = at.step, .attempt = at.attempt});
}

void StepMachine::Refuse(SealRefusal why, StepEffects& effects) {
  Reopen(effects);
  agreement_->UnsealAll();
  for (const int rank : layout_.ranks()) effects.told.push_back({rank, why});
}

std::optional<SealRefusal> StepMachine::CheckAllUses(const StepUses& uses,
                                                     HasGradient has_gradient) const {
  auto refused = CheckUses(Given(uses), layout_.ranks().front(), has_gradient);
  if (refused.has_value()) refused->attempt = agreement_->attempt();
  return refused;
}

void StepMachine::TakeOverReport(uint32_t micro_steps, const std::optional<StepVote>& vote) {
  for (const int rank : layout_.ranks()) {
    agreement_->Seal(rank, micro_steps);
    agreement_->SetVote(rank, vote);
  }
  stage_ = Stage::kSealed;
  is_report_taken_over_ = true;
}

// ---------------------------------------------------------------- the end

void StepMachine::Decide(const StepVote& vote) {
  Check(stage_ == Stage::kSealed, "only a sealed step is decided");
  // A rank of which an earlier process had the vote may not have repeated it.
  for (const int rank : layout_.ranks()) agreement_->SetVote(rank, vote);
  stage_ = Stage::kDecided;
}

void StepMachine::Drop() {
  agreement_.reset();
  norm_is_known_ = is_report_taken_over_ = false;
  stage_ = Stage::kNone;
}

absl::Status StepMachine::Replay(const StepBefore& before, const StepWord& word,
                                 StepEffects& effects) {
  if (word.step != before.step + 1 || word.rank < 0 || word.rank >= layout_.world_size()) {
    return absl::DataLossError(absl::StrCat("what rank ", word.rank, " said of step ", word.step,
                                            " is not of the step in progress"));
  }
  if (between_steps()) Open(word.step, effects);
  const uint32_t attempt = agreement_->ranks()[word.rank].attempt;
  const absl::Status wrong = absl::DataLossError("a word of the log cannot be of this job");
  switch (word.kind) {
    case StepWord::Kind::kBegin:
      if (word.terms.has_value() != (agreement_->IsLive(word.rank) && agreement_->lacks_terms()) ||
          (word.terms.has_value() && word.terms->step != word.step)) {
        return wrong;
      }
      if (word.terms.has_value()) agreement_->SetTerms(*word.terms);
      return agreement_->Begin(word.rank,
                               word.terms.has_value() ? word.terms->settings : word.settings);
    case StepWord::Kind::kEndMicroStep:
      if (!CheckUsed(spec_, layout_, word.rank, word.used).ok()) return wrong;
      return EndMicroStep(before, word.rank, {word.step, attempt}, word.micro_step, word.used,
                          effects);
    case StepWord::Kind::kEmpty:
      if (word.chunk < 0 || word.chunk >= static_cast<int>(layout_.chunks().size())) return wrong;
      part_.RecordEmpty(word.chunk, word.begin, word.end);
      return absl::OkStatus();
    case StepWord::Kind::kDiscard:
      return Discard(before, word.rank, {word.step, attempt}, effects).status();
    case StepWord::Kind::kLive:
      RaiseLive(before, {word.step, word.attempt}, word.rank, effects);
      return absl::OkStatus();
  }
  return absl::DataLossError("a word of the log is of no kind");
}

}  // namespace ballast
