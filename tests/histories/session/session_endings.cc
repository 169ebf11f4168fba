// How an attempt ends for its sessions: from the seals to the commit, or broken off.
#include <algorithm>
#include <cstring>
#include <map>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/check.h"
#include "cpu_optimizer_service/common/reason.h"
#include "cpu_optimizer_service/common/status.h"
#include "tests/histories/session/session_player.h"

namespace ballast::histories {

bool SessionPlayer::NeverWhole(uint32_t try_number) const {
  const Attempt& attempt = tries_->attempt(try_number);
  if (stage_.model().Refusal(attempt).has_value()) return true;
  for (int rank = 0; rank < history_.job.world_size; ++rank) {
    if (stage_.model().Refusal(attempt, rank, attempt_->micro_steps).has_value()) return true;
  }
  return false;
}

absl::Status SessionPlayer::CatchUp(int rank) {
  Rank& side = ranks_[rank];
  for (; side.try_number < last_try(); ++side.try_number) {
    BALLAST_RETURN_IF_ERROR(side.session->Discard());
  }
  side.tail = tries_->CallsOf(rank, last_try());
  BALLAST_RETURN_IF_ERROR(side.session->BeginStep(ScriptOf(side.tail.front()).Settings()));
  side.tail.erase(side.tail.begin());
  return absl::OkStatus();
}

absl::StatusOr<client::StepDecision> SessionPlayer::SealAndVote(int rank) {
  Rank& side = ranks_[rank];
  StepVote vote = attempt_->vote;
  if (rank == votes_otherwise_) vote.clipping = {.max_norm = vote.clipping.max_norm + 1};
  absl::StatusOr<client::StepDecision> decision;
  if (Looks(*attempt_, rank)) {
    const absl::StatusOr<StepNorm> norm = side.session->Seal(attempt_->micro_steps);
    BALLAST_RETURN_IF_ERROR(norm.status());
    side.ending.norm = *norm;
    bool first = true;
    for (int other = 0; other < rank; ++other) first = first && !Looks(*attempt_, other);
    if (spike_ && first && side.try_number < last_try()) {
      return WithReason(absl::FailedPreconditionError("a spike"), reason::kDiscardAndRedo);
    }
    decision = side.session->Vote(vote);
  } else {
    decision = side.session->Seal(attempt_->micro_steps, vote);
  }
  // Whose refusal was lost with its stream has said its vote again, and voids the others' once more.
  for (int round = 0; round < 4 && ReasonOf(decision.status()) == reason::kVoteAgain; ++round) {
    decision = side.session->Vote(attempt_->vote);
  }
  return decision;
}

SessionPlayer::Ending SessionPlayer::PlayTail(int rank) {
  Rank& side = ranks_[rank];
  for (size_t i = 0; i < side.tail.size(); ++i) {
    if (side.tail[i].kind != CallKind::kSeal) {
      if (const absl::Status status = Make(side.tail[i]); !status.ok()) return {.status = status};
      continue;
    }
    const absl::StatusOr<client::StepDecision> decision = SealAndVote(rank);
    if (ReasonOf(decision.status()) == reason::kDiscardAndRedo && side.try_number < last_try()) {
      if (const absl::Status status = CatchUp(rank); !status.ok()) return {.status = status};
      return PlayTail(rank);
    }
    const bool last = i + 1 == side.tail.size();
    if (absl::IsFailedPrecondition(decision.status()) && !last) continue;
    if (!decision.ok()) return {.status = decision.status()};
    if (!last) return {.status = Wrong("a seal was taken before all was sent")};
    absl::Status status = decision->applied ? Orthogonalize(rank) : absl::OkStatus();
    if (status.ok()) status = side.session->ReceiveWeights();
    return {.status = status, .decision = *decision, .norm = side.ending.norm};
  }
  return {.status = Wrong("no seal")};
}

absl::Status SessionPlayer::Orthogonalize(int rank) {
  if (history_.job.newton_schulz == Orthogonalizer::kService) return absl::OkStatus();
  client::Session& session = *ranks_[rank].session;
  std::map<int, std::vector<std::byte>> directions;
  BALLAST_ASSIGN_OR_RETURN(const std::vector<HyperParameters> values,
                           session.ReadDirections([&](int chunk, absl::Span<const std::byte> read) {
                             directions[chunk].assign(read.begin(), read.end());
                           }));
  // Until this rank has given its part the round goes on.
  if (values.empty() || directions.empty()) return absl::OkStatus();
  const auto made = stage_.MakeOrthogonal();
  // Where it was aborted meanwhile, anything can be given.
  if (!made.ok() && ReasonOf(made.status()) != reason::kOtherStep) return made.status();
  const auto orthogonal = made.value_or(std::vector<std::vector<uint16_t>>());
  return session.GiveOrthogonal([&](int chunk, absl::Span<std::byte> out) {
    if (!made.ok()) return void(std::ranges::fill(out, std::byte{0}));
    const auto& of_chunk = orthogonal[chunk + stage_.layout().first_of_rank(rank)];
    Check(directions.contains(chunk) && out.size() == of_chunk.size() * sizeof(uint16_t),
          "a rank gives what it has read");
    std::memcpy(out.data(), of_chunk.data(), out.size());
  });
}

void SessionPlayer::MakePayloads(const std::vector<Call>& calls) {
  for (const Call& call : calls) {
    if (call.kind == CallKind::kContribute) ScriptOf(call).Payload(call.chunk, call.segment);
  }
}

absl::Status SessionPlayer::PlaySeals() {
  BALLAST_RETURN_IF_ERROR(stage_.Settle());
  // Nobody has sealed, so nothing is decided, and what came ahead is nobody's weights.
  for (int rank = 0; rank < history_.job.world_size; ++rank) {
    BALLAST_RETURN_IF_ERROR(CheckWeights(rank));
  }
  const bool never_whole = NeverWhole();
  spike_ = attempt_->spikes > 0 && attempt_->end == End::kCommit && !never_whole &&
           !NeverWhole(live_ + 1);
  for (int rank = 0; rank < history_.job.world_size; ++rank) {
    MakePayloads(ranks_[rank].tail);
    if (ranks_[rank].try_number < last_try()) MakePayloads(tries_->CallsOf(rank, last_try()));
  }
  const Generation generation = stage_.job().Status().generation;
  if (!std::exchange(live_begun_, true)) stage_.model().Begin(live());
  stage_.Expose();
  std::vector<std::thread> threads;
  for (int rank = 0; rank < history_.job.world_size; ++rank) {
    threads.emplace_back([this, rank, never_whole] {
      Rank& side = ranks_[rank];
      side.ending = PlayTail(rank);
      // The others would wait for this one for ever.
      if (never_whole) Abort().IgnoreError();
      wires_.Release();
    });
  }
  absl::Status late;
  for (int rank = 0; rank < history_.job.world_size; ++rank) {
    if (late_[rank] || wires_.AwaitSealHandled(rank)) continue;
    late = Wrong("the seal of rank ", rank, " has not come");
  }
  wires_.Release();
  bool aborted = false;
  if (attempt_->end == End::kAbortAtDecision) {
    const absl::Status status = Abort();
    if (!status.ok()) {
      late.Update(ExpectCode(absl::StatusCode::kFailedPrecondition, status, "abort"));
    }
  }
  for (std::thread& thread : threads) thread.join();
  BALLAST_RETURN_IF_ERROR(late);
  BALLAST_RETURN_IF_ERROR(stage_.Settle());
  if (attempt_->end == End::kAbortAtDecision) {
    const JobStatus status = stage_.job().Status();
    aborted = status.generation != generation ||
              (status.committed_step == stage_.next_step() &&
               status.recent_steps.back().outcome.skip_cause == SkipCause::kNotKept);
  }
  if (std::exchange(spike_, false)) {
    ++stage_.tally().spikes;
    ++live_;
    stage_.model().Begin(live());
  }
  // Whether all had begun when it was aborted is the service's to know.
  const bool came_to_nothing = aborted || never_whole;
  if (came_to_nothing && stage_.job().Status().generation == generation) {
    if (history_.job.on_abort == OnAbort::kRedo) return Wrong("an aborted step was not redone");
    return CheckGivenUp(/*replaced=*/-1);
  }
  return Judge(aborted);
}

absl::Status SessionPlayer::Judge(bool aborted) {
  if (!aborted && !NeverWhole()) return CheckCommitted();
  ++(NeverWhole() ? stage_.tally().spoilt : stage_.tally().aborted_at_decision);
  for (int rank = 0; rank < history_.job.world_size; ++rank) {
    const absl::Status& status = ranks_[rank].ending.status;
    const bool refused = NeverWhole() && absl::IsFailedPrecondition(status);
    if (refused || absl::IsAborted(status)) continue;
    return Wrong("the step came to nothing, and rank ", rank, " ended it with ", status.ToString());
  }
  return StartOver();
}

absl::Status SessionPlayer::CheckCommitted() {
  // Before the model goes on.
  for (const Rank& side : ranks_) {
    if (!side.ending.norm.has_value()) continue;
    BALLAST_RETURN_IF_ERROR(stage_.CheckNorm(*side.ending.norm, live()));
  }
  const ModelOutcome expected = stage_.model().Commit(live());
  for (int rank = 0; rank < history_.job.world_size; ++rank) {
    const Rank& side = ranks_[rank];
    BALLAST_RETURN_IF_ERROR(Annotate(side.ending.status, absl::StrCat("rank ", rank)));
    if (!side.lending->AwaitAllBack()) {
      return Wrong("the step is committed, and ", side.lending->lent(),
                   " payloads are not released");
    }
    const client::StepDecision& came = *side.ending.decision;
    StepOutcome outcome = {.step = came.step,
                           .decision = {.apply = came.applied,
                                        .norm = came.norm,
                                        .clip_coefficient = came.clip_coefficient,
                                        .multipliers = expected.decision.multipliers},
                           .skip_reason = came.skip_reason,
                           .unused_parameters = came.unused_parameters};
    BALLAST_RETURN_IF_ERROR(stage_.CheckOutcome(outcome, expected, live()));
    if (side.session->committed_step() != stage_.model().state().committed_step) {
      return Wrong("rank ", rank, " stands at step ", side.session->committed_step());
    }
    BALLAST_RETURN_IF_ERROR(CheckWeights(rank));
  }
  const Script& script = tries_->script(live_);
  int64_t summed = 0;
  for (int chunk = 0; chunk < static_cast<int>(stage_.layout().chunks().size()); ++chunk) {
    int payloads = 0;
    for (int segment = 0; segment < script.SegmentCount(chunk); ++segment) {
      payloads += !script.IsEmpty(chunk, segment);
    }
    summed += payloads > 1;
  }
  return stage_.CheckCommit(live(), expected, summed);
}

bool SessionPlayer::GivesUp() const {
  // The record of a skip is the lead's, so its ranks have to be in the live try.
  if (stage_.has_members() && !live_begun_) return false;
  return history_.job.on_abort == OnAbort::kSkip &&
         std::all_of(ranks_.begin(), ranks_.end(), [](const Rank& side) { return side.begun; });
}

absl::Status SessionPlayer::CheckGivenUp(int replaced) {
  const ModelOutcome expected = stage_.model().GiveUp(live());
  for (int rank = 0; rank < history_.job.world_size; ++rank) {
    Rank& side = ranks_[rank];
    if (rank == replaced) {
      BALLAST_RETURN_IF_ERROR(OpenSession(rank));
      continue;
    }
    if (!side.ending.status.ok() || !side.ending.decision.has_value()) {
      const absl::StatusOr<client::StepDecision> decision =
          side.session->Seal(attempt_->micro_steps, {});
      BALLAST_RETURN_IF_ERROR(Annotate(decision.status(), absl::StrCat("rank ", rank)));
      BALLAST_RETURN_IF_ERROR(side.session->ReceiveWeights());
      side.ending.decision = *decision;
    }
    const client::StepDecision& came = *side.ending.decision;
    const StepOutcome outcome = {.step = came.step,
                                 .decision = {.apply = came.applied,
                                              .norm = came.norm,
                                              .clip_coefficient = came.clip_coefficient},
                                 .skip_reason = came.skip_reason,
                                 .unused_parameters = came.unused_parameters};
    BALLAST_RETURN_IF_ERROR(stage_.CheckOutcome(outcome, expected, live()));
    if (!side.lending->AwaitAllBack()) {
      return Wrong("the step was skipped, and ", side.lending->lent(),
                   " payloads are not released");
    }
    if (side.session->committed_step() != stage_.model().state().committed_step) {
      return Wrong("rank ", rank, " stands at step ", side.session->committed_step());
    }
    BALLAST_RETURN_IF_ERROR(CheckWeights(rank));
  }
  return stage_.CheckCommit(live(), expected, 0);
}

// ---------------------------------------------------------------- attempts that come to nothing

bool SessionPlayer::AnyBegun() const {
  return std::any_of(ranks_.begin(), ranks_.end(), [](const Rank& side) { return side.begun; });
}

absl::Status SessionPlayer::Abort() {
  const int lead = stage_.spec().lead();
  for (;;) {
    if (stage_.has_members()) BALLAST_RETURN_IF_ERROR(stage_.linked().Settle());
    const absl::Status aborted =
        stage_
            .Ask<uint64_t>(
                lead, [](Job& job, Done<uint64_t> done) { (void)job.AbortStep(std::move(done)); })
            .status();
    if (!absl::IsUnavailable(aborted)) return aborted;
  }
}

bool SessionPlayer::MayBeRedone() const {
  return stage_.has_members() &&
         std::any_of(attempt_->events.begin(), attempt_->events.end(), [](const Event& event) {
           return event.kind == EventKind::kLinkCut || event.kind == EventKind::kDeath;
         });
}

absl::Status SessionPlayer::BeginSeals() {
  if (!stage_.has_members() || may_die_) return absl::OkStatus();
  std::vector<int> seal;
  for (int rank = 0; rank < history_.job.world_size; ++rank) {
    Rank& side = ranks_[rank];
    const bool has_calls = std::any_of(calls_.begin(), calls_.end(),
                                       [rank](const Call& call) { return call.rank == rank; });
    const bool ends = attempt_->end == End::kRestart && attempt_->end_rank == rank;
    if (side.tail.empty() || has_calls || ends || late_[rank] || side.try_number != live_) continue;
    seal.push_back(rank);
    MakePayloads(side.tail);
  }
  for (const int rank : seal) {
    seals_.emplace_back([this, rank] { ranks_[rank].ending = PlayTail(rank); });
  }
  for (const int rank : seal) {
    if (!wires_.AwaitSealHandled(rank)) return Wrong("the seal of rank ", rank, " has not come");
  }
  return absl::OkStatus();
}

void SessionPlayer::JoinSeals() {
  for (std::thread& thread : seals_) thread.join();
  seals_.clear();
}

absl::Status SessionPlayer::BreakOff() {
  absl::Status status = BeginSeals();
  if (status.ok()) status = BreakOffNow();
  if (!status.ok()) Abort().IgnoreError();  // Otherwise they would wait for long.
  JoinSeals();
  return status;
}

absl::Status SessionPlayer::BreakOffNow() {
  wires_.Release();
  for (int rank = 0; rank < history_.job.world_size; ++rank) {
    if (ranks_[rank].begun && !wires_.AwaitBegun(rank, ranks_[rank].try_number)) {
      return Wrong("rank ", rank, " has not begun");
    }
  }
  BALLAST_RETURN_IF_ERROR(stage_.Settle());
  if (attempt_->end == End::kLoad) {
    BALLAST_ASSIGN_OR_RETURN(const std::optional<CheckpointInfo> info, stage_.Load());
    if (!info.has_value()) return AbortNow();
    JoinSeals();
    for (int rank = 0; rank < history_.job.world_size; ++rank) {
      BALLAST_RETURN_IF_ERROR(ExpectEnded(rank));
    }
    return StartOver();
  }
  if (attempt_->end == End::kAbort) return AbortNow();
  if (attempt_->end == End::kUndo) {
    BALLAST_RETURN_IF_ERROR(AbortNow());
    return UndoNow();
  }
  return TakeRank(attempt_->end == End::kRestart);
}

absl::Status SessionPlayer::AbortNow() {
  bool gives_up = GivesUp();
  const Generation generation = stage_.job().Status().generation;
  stage_.Expose();
  const absl::Status aborted = Abort();
  BALLAST_RETURN_IF_ERROR(stage_.Settle());
  if (aborted.ok()) JoinSeals();
  if (!AnyBegun()) {
    return ExpectCode(absl::StatusCode::kFailedPrecondition, aborted, "abort-step");
  }
  const bool raised = stage_.job().Status().generation != generation;
  // The answer to one that was carried out may be lost.
  if (!may_die_) BALLAST_RETURN_IF_ERROR(aborted);
  ++stage_.tally().aborted;
  if (raised && MayBeRedone()) gives_up = false;
  if (raised == gives_up) return Wrong("an aborted step was ", raised ? "redone" : "not redone");
  if (gives_up) return CheckGivenUp(/*replaced=*/-1);
  for (int rank = 0; rank < history_.job.world_size; ++rank) {
    BALLAST_RETURN_IF_ERROR(ExpectEnded(rank));
  }
  return StartOver();
}

absl::Status SessionPlayer::UndoNow() {
  for (const auto& [snapshot, state] : snapshots_) {
    BALLAST_RETURN_IF_ERROR(stage_.CheckSnapshots(snapshot, state));
  }
  snapshots_.clear();  // Readers are waited for.
  const std::optional<uint64_t> expected = stage_.model().undoable_step();
  const JobStatus before = stage_.job().Status();
  PlanLinkCuts(3);
  const absl::StatusOr<uint64_t> undone =
      stage_.AskLead<uint64_t>([&](Job& job, Done<uint64_t> done) {
        (void)job.UndoStep({.step = before.committed_step, .generation = before.generation},
                           std::move(done));
      });
  if (!expected.has_value()) {
    return ExpectCode(absl::StatusCode::kFailedPrecondition, undone.status(), "undo");
  }
  BALLAST_RETURN_IF_ERROR(undone.status());
  if (*undone != *expected) return Wrong("undid step ", *undone, ", expected ", *expected);
  ++stage_.tally().undone;
  stage_.Undone();
  for (int rank = 0; rank < history_.job.world_size; ++rank) {
    ranks_[rank].begun = false;
    BALLAST_RETURN_IF_ERROR(ExpectEnded(rank));
  }
  return StartOver();
}

// The session does not go on, whatever is tried.
absl::Status SessionPlayer::ExpectEnded(int rank) {
  Rank& side = ranks_[rank];
  if (side.session == nullptr) return absl::OkStatus();
  const absl::Status begun = side.begun ? absl::OkStatus() : side.session->BeginStep({});
  const absl::Status status =
      begun.ok() ? side.session->Seal(attempt_->micro_steps, {}).status() : begun;
  return ExpectCode(absl::StatusCode::kAborted, status,
                    absl::StrCat("the old session of rank ", rank));
}

absl::Status SessionPlayer::TakeRank(bool restart) {
  Rank& side = ranks_[attempt_->end_rank];
  bool gives_up = GivesUp();
  if (restart) side.session.reset();
  const Generation generation = stage_.job().Status().generation;
  side.process_id = absl::StrCat("process", ++processes_);
  absl::Status attached;
  do {
    stage_.Expose();
    attached = stage_
                   .Ask<Attachment>(stage_.spec().home(attempt_->end_rank),
                                    [&](Job& job, Done<Attachment> done) {
                                      (void)job.Attach({.rank = attempt_->end_rank,
                                                        .process_id = side.process_id},
                                                       std::move(done));
                                    })
                   .status();
    BALLAST_RETURN_IF_ERROR(stage_.Settle());
  } while (stage_.has_members() && absl::IsUnavailable(attached));
  BALLAST_RETURN_IF_ERROR(attached);
  ++stage_.tally().replaced;
  // A rank that had no part in the step and whose stream was broken just now was free.
  const JobStatus now = stage_.job().Status();
  const bool raised = now.generation != generation;
  const bool skipped = now.committed_step == stage_.next_step();
  if (raised && MayBeRedone()) gives_up = skipped;
  if (raised || skipped) JoinSeals();
  if (skipped && raised && may_die_) {
    // The old process has come back from a death in between, and was replaced once more.
    const ModelOutcome expected = stage_.model().GiveUp(live());
    BALLAST_RETURN_IF_ERROR(StartOver());
    return stage_.CheckCommit(live(), expected, 0);
  }
  if (raised && gives_up) return Wrong("a step was redone that all ranks had begun");
  if (side.begun && !raised && !gives_up) {
    return Wrong("a new process of rank ", attempt_->end_rank,
                 raised ? " raised" : " did not raise", " the generation");
  }
  // Of a skip by other members it may hear before it is replaced.
  if (!gives_up || !stage_.has_members()) BALLAST_RETURN_IF_ERROR(ExpectEnded(attempt_->end_rank));
  if (gives_up) {
    return CheckGivenUp(attempt_->end_rank);
  }
  if (raised) {
    for (int rank = 0; rank < history_.job.world_size; ++rank) {
      BALLAST_RETURN_IF_ERROR(ExpectEnded(rank));
    }
  } else if (AnyBegun()) {
    BALLAST_RETURN_IF_ERROR(Abort());
    BALLAST_RETURN_IF_ERROR(stage_.Settle());
    JoinSeals();
  }
  return StartOver();
}

}  // namespace ballast::histories
