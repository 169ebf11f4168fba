#include "tests/histories/engine/engine_player.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/status.h"

namespace ballast::histories {

EnginePlayer::EnginePlayer(Engines& engines, const History& history)
    : history_(history),
      may_die_(CanDie() && HasDeath(history)),
      stage_(engines, history.job, may_die_),
      ranks_(history.job.world_size) {}

absl::Status EnginePlayer::Play() {
  for (int rank = 0; rank < history_.job.world_size; ++rank) {
    ranks_[rank].process_id = absl::StrCat("process", ++processes_);
    BALLAST_RETURN_IF_ERROR(Open(rank, /*over=*/false));
  }
  BALLAST_RETURN_IF_ERROR(UploadWeights());
  for (size_t i = 0; i < history_.attempts.size(); ++i) {
    const Attempt attempt = Normalize(history_.job, history_.attempts[i], stage_.layout());
    BALLAST_RETURN_IF_ERROR(Annotate(PlayAttempt(attempt), absl::StrCat("attempt ", i + 1)));
  }
  for (const OpenSnapshot& open : snapshots_) {
    BALLAST_RETURN_IF_ERROR(stage_.CheckSnapshot(open.snapshot, open.state));
  }
  return stage_.CheckAllState();
}

absl::Status EnginePlayer::Open(int rank, bool over, const UnderWay& under_way) {
  Rank& side = ranks_[rank];
  if (!over) side.stream.reset();
  AttachRequest request = {.rank = rank,
                           .process_id = side.process_id,
                           .uid = stage_.job().uid(),
                           .spec = stage_.job().spec()};
  request.expected_committed_step =
      stage_.model().state().committed_step + (in_directions_ ? 1 : 0);
  if (side.generation == generation_) request.generation = generation_;
  BALLAST_ASSIGN_OR_RETURN(const Attachment attached, stage_.job().Attach(request));
  if (attached.generation != generation_) {
    return Wrong("rank ", rank, " attached in generation ", ToString(attached.generation),
                 ", expected ", ToString(generation_));
  }
  side.generation = generation_;
  if (!request.generation.has_value()) {
    LoseMemory(rank);
    if (Shares(rank)) BALLAST_RETURN_IF_ERROR(GiveMemory(rank));
  }
  side.weights_in_place = side.memory != nullptr && (history_.seed / 2 + rank) % 3 != 0;
  // Not every rank of a job that speculates has room for it.
  const bool speculates =
      history_.job.update_mode == UpdateMode::kSpeculate && (history_.seed + rank) % 5 != 0;
  auto ear =
      std::make_shared<RecordingListener>(speculates, may_die_ ? stage_.deaths().flag() : nullptr);
  ear->MayGuess(attempt_ != nullptr && attempt_->may_guess);
  BALLAST_ASSIGN_OR_RETURN(
      std::unique_ptr<RankStream> stream,
      stage_.job().OpenStream(
          {.uid = stage_.job().uid(),
           .rank = rank,
           .process_id = side.process_id,
           .generation = generation_,
           .update_mode = speculates ? UpdateMode::kSpeculate : UpdateMode::kWait,
           .weights_in_place = side.weights_in_place,
           .orthogonalizes = true},
          ear));
  if (in_directions_) ear->OpenedInDirections(step_);
  std::swap(side.stream, stream);
  side.ear = std::move(ear);
  side.away = false;
  side.vote_refusals = 0;
  if (over) BALLAST_RETURN_IF_ERROR(ExpectAborted(*stream, rank));
  if (rank == under_way.rank) under_way.adopt(side.stream->position());
  return CheckPosition(rank);
}

// ---------------------------------------------------------------- an attempt

absl::Status EnginePlayer::PlayAttempt(const Attempt& attempt) {
  attempt_ = &attempt;
  tries_ = std::make_unique<Tries>(history_.job, attempt, stage_.layout());
  live_ = 0;
  live_begun_ = false;
  step_ = stage_.next_step();
  open_ = whole_ = refused_ = hopeless_ = carried_out_ = in_directions_ = false;
  first_round_taken_over_ = false;
  given_variant_ = variant_ = 0;
  if (may_die_) stage_.deaths().Disarm();
  calls_ = tries_->script(0).Calls();
  next_micro_step_.assign(stage_.layout().chunks().size(), 0);
  payloads_.assign(stage_.layout().chunks().size(), 0);
  repeats_.clear();
  votes_otherwise_ = -1;
  for (const Event& event : attempt.events) {
    const bool differs = event.kind == EventKind::kOtherVote && history_.job.world_size > 1;
    if (differs) votes_otherwise_ = event.rank;
  }
  for (Rank& rank : ranks_) {
    rank.ear->MayGuess(attempt.may_guess);
    rank.vote_refusals = rank.ear->vote_refusals();  // One that was aborted at its votes told some.
    rank.try_number = 0;
    rank.begun = rank.sealed = false;
    rank.micro_steps_ended = 0;
  }
  // Who dropped its memory gets another between steps.
  for (int rank = 0; rank < history_.job.world_size; ++rank) {
    const bool lacks = Shares(rank) && ranks_[rank].memory == nullptr && !ranks_[rank].away;
    if (lacks) BALLAST_RETURN_IF_ERROR(GiveMemory(rank));
  }
  BALLAST_RETURN_IF_ERROR(WriteState());
  BALLAST_RETURN_IF_ERROR(DeriveJob());
  BALLAST_RETURN_IF_ERROR(PlayCalls());
  BALLAST_RETURN_IF_ERROR(Finish());
  for (const Rank& rank : ranks_) BALLAST_RETURN_IF_ERROR(rank.ear->fault());
  BALLAST_RETURN_IF_ERROR(PoisonGradients());
  return LeaveAttempt();
}

// Those of the snapshots that were to be kept for long stay.
absl::Status EnginePlayer::LeaveAttempt() {
  while (snapshots_.size() > 2) {
    BALLAST_RETURN_IF_ERROR(
        stage_.CheckSnapshot(snapshots_.front().snapshot, snapshots_.front().state));
    snapshots_.erase(snapshots_.begin());
  }
  while (ghosts_.size() > 8) ghosts_.pop_front();
  return absl::OkStatus();
}

absl::Status EnginePlayer::PlayCalls() {
  const size_t planned = calls_.size();
  const bool breaks_off = attempt_->end != End::kCommit && attempt_->end != End::kAbortAtDecision;
  for (size_t i = 0; i < calls_.size(); ++i) {
    if (breaks_off && Script::IndexOf(attempt_->end_at, planned) == static_cast<int>(i)) {
      return absl::OkStatus();
    }
    next_call_ = i;
    for (const Event& event : attempt_->events) {
      if (Script::IndexOf(event.at, planned) != static_cast<int>(i)) continue;
      BALLAST_RETURN_IF_ERROR(Happen(event, i));
    }
    for (const auto& [at, call] : std::vector(repeats_)) {
      if (at == i) BALLAST_RETURN_IF_ERROR(Repeat(call));
    }
    const Call call = calls_[i];
    next_call_ = i + 1;
    mortal_ = may_die_;
    const absl::Status made = Make(call);
    mortal_ = false;
    BALLAST_RETURN_IF_ERROR(made);
    if (whole_ && SpikeIsDue()) {
      BALLAST_RETURN_IF_ERROR(DiscardForSpike());
      continue;
    }
    if (refused_ || whole_) return absl::OkStatus();
  }
  return Wrong("all calls were made, and the step is neither whole nor refused");
}

absl::Status EnginePlayer::Finish() {
  if (refused_) return FinishRefused();
  if (!whole_) return BreakOff(attempt_->end);
  if (attempt_->end == End::kAbortAtDecision) return AbortNow(/*at_decision=*/true);
  while (!carried_out_) {
    absl::Status told;
    if (!DiesIn([&] { told = AwaitDecision(); })) {
      BALLAST_RETURN_IF_ERROR(told);
      break;
    }
    BALLAST_RETURN_IF_ERROR(TakeOver(/*may_be_decided=*/true));
    if (!carried_out_ && !in_directions_) BALLAST_RETURN_IF_ERROR(SealAll());
  }
  return FinishCommit();
}

absl::Status EnginePlayer::AwaitDecision() {
  if (in_directions_) return PlayDirections();
  BALLAST_RETURN_IF_ERROR(PlayVotes());
  // Who lost the answer to a seal says it again, whatever has become of the step meanwhile.
  for (int rank = 0; rank < history_.job.world_size; ++rank) {
    if (ranks_[rank].away) continue;
    BALLAST_ASSIGN_OR_RETURN(
        const auto refusal,
        ranks_[rank].stream->Seal(At(rank), attempt_->micro_steps, VoteWithSeal(rank)));
    if (refusal.has_value()) return Wrong("a seal said again: ", refusal->status.ToString());
    BALLAST_RETURN_IF_ERROR(ranks_[rank].stream->Vote(At(rank), live().vote));
    StepVote other = live().vote;
    other.apply = !other.apply;
    BALLAST_RETURN_IF_ERROR(ExpectCode(absl::StatusCode::kFailedPrecondition,
                                       ranks_[rank].stream->Vote(At(rank), other),
                                       "another vote than the decided one"));
  }
  for (const Rank& side : ranks_) {
    if (side.away || side.ear->AwaitDirectionsOrCommit(step_)) continue;
    return Wrong("step ", step_, " was not committed");
  }
  in_directions_ = ranks_[0].ear->AwaitsOrthogonal(step_);
  return in_directions_ ? PlayDirections() : absl::OkStatus();
}

absl::Status EnginePlayer::FinishCommit() {
  const ModelOutcome expected = stage_.model().Commit(live(), variant_);
  in_directions_ = false;
  for (Rank& side : ranks_) {
    side.begun = false;
    side.try_number = 0;
  }
  for (int rank = 0; rank < history_.job.world_size; ++rank) {
    Rank& side = ranks_[rank];
    if (side.away) {
      BALLAST_RETURN_IF_ERROR(Open(rank, /*over=*/false));
      continue;
    }
    if (!side.ear->AwaitCommit(step_)) return Wrong("step ", step_, " was not committed");
    BALLAST_RETURN_IF_ERROR(side.ear->fault());
    // A stream that was opened while directions were orthogonalized has not been told.
    if (const auto outcomes = side.ear->outcomes(); !outcomes.empty()) {
      BALLAST_RETURN_IF_ERROR(stage_.CheckOutcome(outcomes.back(), expected, live()));
    }
    if (!expected.decision.apply) continue;
    const auto shards = side.ear->shards();
    const auto unread = side.ear->unread_chunks();
    for (const int chunk : stage_.layout().chunks_of_rank(rank)) {
      if (unread.contains(chunk)) continue;
      const auto found = shards.find(chunk);
      if (found == shards.end()) return Wrong("the weights of chunk ", chunk, " have not come");
      BALLAST_RETURN_IF_ERROR(stage_.CheckShard(chunk, found->second));
    }
    BALLAST_RETURN_IF_ERROR(CheckWeightsInPlace(rank));
    if (shards.size() + unread.size() != stage_.layout().chunks_of_rank(rank).size()) {
      return Wrong("rank ", rank, " was sent weights of chunks that it does not own");
    }
  }
  const int64_t summed =
      std::count_if(payloads_.begin(), payloads_.end(), [](int payloads) { return payloads > 1; });
  // A step that is carried out after a death leaves none in use.
  return stage_.CheckCommit(live(), expected, carried_out_ || first_round_taken_over_ ? 0 : summed);
}

bool EnginePlayer::GivesUp() const {
  return history_.job.on_abort == OnAbort::kSkip &&
         std::all_of(ranks_.begin(), ranks_.end(), [](const Rank& side) { return side.begun; });
}

absl::Status EnginePlayer::FinishGivenUp(int replaced) {
  const ModelOutcome expected = stage_.model().GiveUp(live());
  for (int rank = 0; rank < history_.job.world_size; ++rank) {
    Rank& side = ranks_[rank];
    const uint32_t try_number = std::exchange(side.try_number, 0);
    side.begun = false;
    if (side.away || rank == replaced) {
      BALLAST_RETURN_IF_ERROR(Open(rank, /*over=*/false));
      continue;
    }
    if (!side.ear->AwaitCommit(step_)) return Wrong("step ", step_, " was not committed");
    BALLAST_RETURN_IF_ERROR(side.ear->fault());
    BALLAST_RETURN_IF_ERROR(stage_.CheckOutcome(side.ear->outcomes().back(), expected, live()));
    // What is still on its way is dropped.
    const StepAttempt at = {step_, try_number};
    BALLAST_RETURN_IF_ERROR(side.stream->BeginStep(at, {}));
    for (const int chunk : stage_.layout().chunks_of_rank(rank)) {
      BALLAST_ASSIGN_OR_RETURN(
          const ContributionResult result,
          side.stream->Contribute(
              {.step = step_, .attempt = try_number, .chunk = chunk, .empty = true}));
      if (result != ContributionResult::kDiscarded) return Wrong("a late gradient was taken");
    }
    BALLAST_RETURN_IF_ERROR(side.stream->EndMicroStep(at, 0, {}));
    BALLAST_RETURN_IF_ERROR(side.stream->Seal(at, 1).status());
    BALLAST_RETURN_IF_ERROR(side.stream->Vote(at, {}));
    BALLAST_ASSIGN_OR_RETURN(const bool discarded, side.stream->Discard(at));
    if (discarded) return Wrong("rank ", rank, " has discarded a step that is over");
  }
  return stage_.CheckCommit(live(), expected, 0);
}

// ---------------------------------------------------------------- attempts that come to nothing

absl::Status EnginePlayer::FinishRefused() {
  ++stage_.tally().spoilt;
  if (hopeless_) return AbortNow(/*at_decision=*/false);
  // A second try is refused just the same, by whichever rank is the last now.
  for (int rank = history_.job.world_size - 1; rank >= 0; --rank) {
    if (ranks_[rank].away) return AbortNow(/*at_decision=*/false);
  }
  for (int rank = history_.job.world_size - 1; rank >= 0; --rank) {
    BALLAST_ASSIGN_OR_RETURN(
        const auto refusal,
        ranks_[rank].stream->Seal(At(rank), attempt_->micro_steps, VoteWithSeal(rank)));
    if (refusal.has_value() != (rank == 0)) return Wrong("the second seal of rank ", rank);
  }
  return AbortNow(/*at_decision=*/false);
}

absl::Status EnginePlayer::BreakOff(End end) {
  switch (end) {
    case End::kReplace:
      return TakeRank(/*restart=*/false);
    case End::kRestart:
      return TakeRank(/*restart=*/true);
    case End::kLoad: {
      BALLAST_ASSIGN_OR_RETURN(const std::optional<CheckpointInfo> info, stage_.Load());
      if (!info.has_value()) return AbortNow(/*at_decision=*/false);
      if (info->generation != generation_.Next()) {
        return Wrong("a load to generation ", ToString(info->generation));
      }
      return StartOver();
    }
    case End::kUndo: {
      if (open_) {
        BALLAST_RETURN_IF_ERROR(ExpectCode(absl::StatusCode::kFailedPrecondition,
                                           stage_.job().UndoStep().status(), "undo in a step"));
      }
      BALLAST_RETURN_IF_ERROR(AbortNow(/*at_decision=*/false));
      return UndoNow();
    }
    default:
      return AbortNow(/*at_decision=*/false);
  }
}

absl::Status EnginePlayer::UndoNow() {
  const std::optional<uint64_t> expected = stage_.model().undoable_step();
  const absl::StatusOr<uint64_t> undone = stage_.job().UndoStep();
  if (!expected.has_value()) {
    return ExpectCode(absl::StatusCode::kFailedPrecondition, undone.status(), "undo");
  }
  BALLAST_RETURN_IF_ERROR(undone.status());
  if (*undone != *expected) return Wrong("undid step ", *undone, ", expected ", *expected);
  ++stage_.tally().undone;
  stage_.Undone();
  step_ = *undone + 1;  // Nothing of it, or of what comes later, has been told to anybody.
  BALLAST_RETURN_IF_ERROR(StartOver());
  return ExpectCode(absl::StatusCode::kFailedPrecondition, stage_.job().UndoStep().status(),
                    "a second undo");
}

absl::Status EnginePlayer::AbortNow(bool at_decision) {
  const bool gives_up = GivesUp();
  const absl::StatusOr<uint64_t> aborted = stage_.job().AbortStep();
  if (!open_ || (at_decision && !aborted.ok())) {
    BALLAST_RETURN_IF_ERROR(
        ExpectCode(absl::StatusCode::kFailedPrecondition, aborted.status(), "abort-step"));
    if (!open_) return absl::OkStatus();
    (void)ranks_[0].ear->AwaitDirectionsOrCommit(step_);
    in_directions_ = ranks_[0].ear->AwaitsOrthogonal(step_);
    if (in_directions_) BALLAST_RETURN_IF_ERROR(PlayDirections());
    return FinishCommit();
  }
  BALLAST_RETURN_IF_ERROR(aborted.status());
  if (*aborted != step_) return Wrong("aborted step ", *aborted, ", expected ", step_);
  // It may have come in a second round.
  if (at_decision && ranks_[0].ear->AwaitsOrthogonal(step_)) return FinishCommit();
  ++(at_decision ? stage_.tally().aborted_at_decision : stage_.tally().aborted);
  return gives_up ? FinishGivenUp(/*replaced=*/-1) : StartOver();
}

// A new process takes the rank of one that is still there (`restart`: whose stream has ended). Only
// a rank whose stream has ended without a part in the step is free.
absl::Status EnginePlayer::TakeRank(bool restart) {
  const int rank = attempt_->end_rank;
  Rank& side = ranks_[rank];
  const bool free = (restart || side.away) && !side.begun && side.try_number == 0;
  if (restart) side.stream.reset();
  const bool gives_up = GivesUp();
  const std::string old_process = side.process_id;
  side.process_id = absl::StrCat("process", ++processes_);
  side.generation = 0;
  const absl::StatusOr<Attachment> attached =
      stage_.job().Attach({.rank = rank, .process_id = side.process_id});
  BALLAST_RETURN_IF_ERROR(attached.status());
  if (attached->generation != (free || gives_up ? generation_ : generation_.Next())) {
    return Wrong("a new process of rank ", rank, " got generation ", ToString(attached->generation),
                 " after ", ToString(generation_));
  }
  ++stage_.tally().replaced;
  LoseMemory(rank);
  if (!free) {
    // The slow old process wants its stream back, and must not get it.
    BALLAST_RETURN_IF_ERROR(
        ExpectCode(absl::StatusCode::kAborted,
                   stage_.job()
                       .Attach({.rank = rank, .process_id = old_process, .generation = generation_})
                       .status(),
                   "the old process attaches for its old stream"));
    if (!gives_up) return StartOver();
    if (side.stream != nullptr) BALLAST_RETURN_IF_ERROR(ExpectAborted(*side.stream, rank));
    ghosts_.push_back(std::move(side.stream));
    if (ghosts_.back() == nullptr) ghosts_.pop_back();
    return FinishGivenUp(rank);
  }
  BALLAST_RETURN_IF_ERROR(
      ExpectCode(absl::StatusCode::kAborted,
                 stage_.job()
                     .Attach({.rank = rank, .process_id = old_process, .generation = generation_})
                     .status(),
                 "a process that has left attaches for its old stream"));
  BALLAST_RETURN_IF_ERROR(Open(rank, /*over=*/false));
  return open_ ? AbortNow(/*at_decision=*/false) : absl::OkStatus();
}

// The generation has risen: every stream is at its end, and every rank opens its own again.
absl::Status EnginePlayer::StartOver() {
  const Generation old_generation = std::exchange(generation_, generation_.Next());
  for (int rank = 0; rank < history_.job.world_size; ++rank) {
    Rank& side = ranks_[rank];
    if (side.stream != nullptr && !side.away) {
      BALLAST_RETURN_IF_ERROR(ExpectAborted(*side.stream, rank));
      BALLAST_RETURN_IF_ERROR(ExpectCode(absl::StatusCode::kAborted, side.ear->detached(),
                                         absl::StrCat("the end of rank ", rank, "'s stream")));
      BALLAST_RETURN_IF_ERROR(side.ear->fault());
      if (side.ear->committed_step() >= step_) return Wrong("an aborted step was committed");
      if (!side.ear->outcomes().empty() && side.ear->outcomes().back().step >= step_) {
        return Wrong("an aborted step was decided");
      }
      BALLAST_RETURN_IF_ERROR(ExpectCode(absl::StatusCode::kAborted,
                                         stage_.job()
                                             .OpenStream({.uid = stage_.job().uid(),
                                                          .rank = rank,
                                                          .process_id = side.process_id,
                                                          .generation = old_generation,
                                                          .orthogonalizes = true},
                                                         std::make_shared<RecordingListener>(false))
                                             .status(),
                                         "opening a stream of the older generation"));
    }
    LoseMemory(rank);
    ghosts_.push_back(std::move(side.stream));
    if (ghosts_.back() == nullptr) ghosts_.pop_back();
  }
  for (int rank = 0; rank < history_.job.world_size; ++rank) {
    ranks_[rank].begun = false;
    ranks_[rank].try_number = 0;
    BALLAST_RETURN_IF_ERROR(Open(rank, /*over=*/false));
  }
  if (history_.seed % 2 == 0) BALLAST_RETURN_IF_ERROR(stage_.CheckAllState());
  return stage_.CheckShards();
}

}  // namespace ballast::histories
