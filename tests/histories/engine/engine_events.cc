// What goes wrong between the calls.
#include <utility>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/status.h"
#include "tests/histories/engine/engine_player.h"

namespace ballast::histories {

absl::Status EnginePlayer::Happen(const Event& event, size_t next_call) {
  Rank& side = ranks_[event.rank];
  switch (event.kind) {
    case EventKind::kRepeat:
      if (next_call > 0) {
        repeats_.emplace_back(next_call + event.pick % 6, calls_[next_call - 1]);
      }
      return absl::OkStatus();
    case EventKind::kCut:
      return side.away ? absl::OkStatus() : Cut(event);
    case EventKind::kAway:
      // Who is away cannot vote. Rank 0 is to hear of directions.
      if (event.rank == 0 && history_.job.newton_schulz == Orthogonalizer::kWorkers) {
        return absl::OkStatus();
      }
      if (side.sealed && !side.away && !Looks(*attempt_, event.rank) && votes_otherwise_ == -1) {
        side.stream.reset();
        side.away = true;
        ++stage_.tally().cuts;
      }
      return absl::OkStatus();
    case EventKind::kGap:
    case EventKind::kOverlap:
    case EventKind::kForeignChunk:
    case EventKind::kWrongSize:
    case EventKind::kWrongStep:
    case EventKind::kOtherSettings:
      return side.away ? absl::OkStatus() : SendWrong(event);
    case EventKind::kEarlySeal:
      if (!side.begun || side.away || !WhatIsMissing(event.rank, attempt_->micro_steps)) {
        return absl::OkStatus();
      }
      return Seal({.kind = CallKind::kSeal, .rank = event.rank}, attempt_->micro_steps);
    case EventKind::kSealTakenBack:
      if (!side.sealed || side.away) return absl::OkStatus();
      calls_.push_back(
          {.kind = CallKind::kSeal, .rank = event.rank, .try_number = side.try_number});
      return Seal(Call(calls_.back()), attempt_->micro_steps + 1 + event.pick % 2);
    case EventKind::kOperator:
      return stage_.ChangeGroup(event.pick % static_cast<int>(history_.job.groups.size()),
                                event.changes);
    case EventKind::kSnapshot: {
      BALLAST_ASSIGN_OR_RETURN(Snapshot snapshot, stage_.TakeSnapshot());
      snapshots_.push_back({std::move(snapshot), stage_.model().state()});
      return absl::OkStatus();
    }
    case EventKind::kReadShards:
      return stage_.CheckShards();
    case EventKind::kSave:
      return stage_.Save();
    case EventKind::kTellWaiting:
      return TellWaiting();
    case EventKind::kGhost:
      if (ghosts_.empty()) return absl::OkStatus();
      return ExpectAborted(*ghosts_[event.pick % ghosts_.size()], event.rank);
    case EventKind::kDiscard:
      return side.away ? absl::OkStatus() : Discard(event.rank);
    case EventKind::kEarlyVote:
    case EventKind::kBadVote:
      return side.away ? absl::OkStatus() : VoteWrongly(event);
    case EventKind::kDeath:
      ArmDeath(event);
      return absl::OkStatus();
    case EventKind::kWithhold:  // The script's.
    case EventKind::kLate:
    case EventKind::kLinkCut:
    case EventKind::kOtherVote:  // Of the whole attempt.
      return absl::OkStatus();
  }
  return absl::OkStatus();
}

absl::Status EnginePlayer::Cut(const Event& event) {
  ++stage_.tally().cuts;
  if (event.pick % 3 == 0) DropMemory(event.rank);
  return Open(event.rank, /*over=*/event.pick % 2 == 0);
}

// What the service says it holds, to a stream that is opened now.
absl::Status EnginePlayer::CheckPosition(int rank) const {
  const Rank& side = ranks_[rank];
  const RankPosition& position = side.stream->position();
  if (position.generation != generation_ ||
      position.committed_step != stage_.model().state().committed_step + (in_directions_ ? 1 : 0) ||
      position.awaits_orthogonal != in_directions_) {
    return Wrong("rank ", rank, " opens in generation ", ToString(position.generation), " at step ",
                 position.committed_step);
  }
  if (position.attempt != side.try_number) {
    return Wrong("rank ", rank, " opens in attempt ", position.attempt, ", expected ",
                 side.try_number);
  }
  if (position.open_step != (side.begun ? step_ : 0)) {
    return Wrong("rank ", rank, " opens in step ", position.open_step);
  }
  if (!side.begun) return absl::OkStatus();
  if (position.micro_steps_ended != side.micro_steps_ended) {
    return Wrong("rank ", rank, " opens with ", position.micro_steps_ended,
                 " micro-steps ended, expected ", side.micro_steps_ended);
  }
  size_t delivered = 0;
  for (const int chunk : stage_.layout().chunks_of_rank(rank)) {
    if (next_micro_step_[chunk] == 0) continue;
    if (delivered >= position.delivered.size() || position.delivered[delivered].chunk != chunk ||
        position.delivered[delivered].next_micro_step != next_micro_step_[chunk]) {
      return Wrong("rank ", rank, " opens, and what was delivered of chunk ", chunk, " is not ",
                   next_micro_step_[chunk]);
    }
    ++delivered;
  }
  if (delivered == position.delivered.size()) return absl::OkStatus();
  return Wrong("rank ", rank, " opens with ", position.delivered.size(), " chunks, expected ",
               delivered);
}

absl::Status EnginePlayer::SendWrong(const Event& event) {
  Rank& side = ranks_[event.rank];
  const auto expect = [&](absl::StatusCode code, const absl::Status& status, const char* what) {
    ++stage_.tally().refused_calls;
    return ExpectCode(code, status, absl::StrCat("rank ", event.rank, " ", what));
  };
  if (event.kind == EventKind::kOtherSettings) {
    // Who begins a try first, or one that comes to nothing, may bring any.
    if (!live_begun_ || side.try_number != live_) return absl::OkStatus();
    StepSettings settings = tries_->script(live_).Settings();
    switch (event.pick % 3) {
      case 0:
        settings.scale.loss_scale *= 2;
        break;
      case 1:
        settings.scale.divisors.assign(history_.job.groups.size(), 3.25);
        break;
      case 2:
        settings.overrides[0].lr = 123.0;
        break;
    }
    return expect(absl::StatusCode::kFailedPrecondition,
                  side.stream->BeginStep(At(event.rank), settings), "begins with other settings");
  }
  const auto chunks = stage_.layout().chunks();
  if (chunks.empty()) return absl::OkStatus();
  if (event.kind == EventKind::kForeignChunk) {
    const int chunk = event.pick % static_cast<int>(chunks.size());
    if (chunks[chunk].rank == event.rank) return absl::OkStatus();
    return expect(absl::StatusCode::kInvalidArgument,
                  side.stream->Contribute({.step = step_, .chunk = chunk, .empty = true}).status(),
                  "sends a chunk of another rank");
  }
  const auto own = stage_.layout().chunks_of_rank(event.rank);
  if (own.empty()) return absl::OkStatus();
  const int chunk = own[event.pick % own.size()];
  const uint32_t next = next_micro_step_[chunk];
  Contribution wrong = {.step = step_,
                        .attempt = side.try_number,
                        .chunk = chunk,
                        .micro_step_begin = next,
                        .micro_step_end = next + 1};
  const Chunk& place = chunks[chunk];
  const std::vector<std::byte> bytes(
      place.elements * SizeBytes(history_.job.groups[place.group].wire_dtype), std::byte{1});
  absl::Span<const std::byte> piece(bytes);
  wrong.payload = {&piece, 1};
  absl::StatusCode code = absl::StatusCode::kFailedPrecondition;
  switch (event.kind) {
    case EventKind::kGap:
      ++wrong.micro_step_begin;
      ++wrong.micro_step_end;
      break;
    case EventKind::kOverlap:
      if (next == 0) return absl::OkStatus();
      --wrong.micro_step_begin;
      break;
    case EventKind::kWrongStep:
      // What comes late for a step that was skipped because of an abort is dropped in silence.
      wrong.step += event.pick % 2 == 0 || history_.job.on_abort == OnAbort::kSkip ? 1 : -1;
      break;
    default:
      piece.remove_suffix(1);
      code = absl::StatusCode::kInvalidArgument;
      break;
  }
  return expect(code, side.stream->Contribute(wrong).status(), "sends what cannot be taken");
}

absl::Status EnginePlayer::TellWaiting() {
  std::vector<int> awaited;
  bool any_sealed = false;
  for (int rank = 0; rank < history_.job.world_size; ++rank) {
    any_sealed |= ranks_[rank].sealed;
    if (!ranks_[rank].sealed) awaited.push_back(rank);
  }
  stage_.job().TellWaiting();
  if (!any_sealed) return absl::OkStatus();
  for (int rank = 0; rank < history_.job.world_size; ++rank) {
    if (!ranks_[rank].sealed || ranks_[rank].away) continue;
    if (ranks_[rank].ear->waiting() != awaited) {
      return Wrong("rank ", rank, " was not told who is awaited");
    }
  }
  return absl::OkStatus();
}

}  // namespace ballast::histories
