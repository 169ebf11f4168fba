// The service's process dies, and the next one goes on with what it had.
#include <algorithm>
#include <cstdint>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/status.h"
#include "tests/histories/engine/engine_player.h"

namespace ballast::histories {

void EnginePlayer::ArmDeath(const Event& event) {
  if (!may_die_) return;
  stage_.deaths().Arm(1 + event.pick % 16, event.pick % 8 == 0 ? 1 + event.pick / 8 % 16 : 0);
}

bool EnginePlayer::DiesIn(const std::function<void()>& calls) {
  if (may_die_) stage_.deaths().Expose();
  calls();
  return may_die_ && stage_.deaths().Hide();
}

// To a worker it is a stream that broke: it attaches and opens again, and learns what the service
// has. That is all that it had been told was taken; of the call under way it may be either.
absl::Status EnginePlayer::TakeOver(bool may_be_decided, const UnderWay& under_way) {
  // Readers' calls end with the service, which held what they read for them to the end.
  for (const OpenSnapshot& open : snapshots_) {
    BALLAST_RETURN_IF_ERROR(stage_.CheckSnapshot(open.snapshot, open.state));
  }
  snapshots_.clear();
  ghosts_.clear();
  bool told = false;
  for (Rank& side : ranks_) {
    side.stream.reset();
    BALLAST_RETURN_IF_ERROR(side.ear->fault());
    const std::vector<StepOutcome> outcomes = side.ear->outcomes();
    told |= !outcomes.empty() && outcomes.back().step == step_;
  }
  BALLAST_RETURN_IF_ERROR(stage_.TakeOver());
  taken_over_step_ = step_;
  const JobStatus status = stage_.job().Status();
  in_directions_ = may_be_decided && status.phase == JobPhase::kDirections;
  carried_out_ = may_be_decided && !in_directions_ && status.committed_step == step_;
  first_round_taken_over_ |= in_directions_;
  stage_.tally().carried_out += carried_out_;
  if (told && !carried_out_ && !in_directions_) {
    return Wrong("step ", step_, " was told to be decided, and is not after a death");
  }
  for (int rank = 0; rank < history_.job.world_size; ++rank) {
    Rank& side = ranks_[rank];
    side.away = carried_out_;  // It opens once the model has come as far.
    if (carried_out_) continue;
    if (in_directions_) {
      side.begun = side.sealed = false;
      side.try_number = 0;
    }
    if (std::exchange(side.sealed, false)) {  // Seals are said again.
      calls_.push_back({.kind = CallKind::kSeal, .rank = rank, .try_number = side.try_number});
    }
    BALLAST_RETURN_IF_ERROR(Annotate(Open(rank, /*over=*/false, under_way), "after a death"));
  }
  return absl::OkStatus();
}

absl::Status EnginePlayer::UploadWeights() {
  if (may_die_) stage_.deaths().Disarm();
  for (const Event& event : history_.attempts.front().events) {
    if (event.kind == EventKind::kDeath && event.pick % 4 == 1) ArmDeath(event);
  }
  absl::Status uploaded;
  while (DiesIn([&] { uploaded = stage_.UploadWeights(); })) {
    BALLAST_RETURN_IF_ERROR(TakeOver(/*may_be_decided=*/false));
  }
  return uploaded;
}

absl::Status EnginePlayer::WriteState() {
  StateWrite write = WriteOf(history_.job, *attempt_, stage_.model().state().committed_step);
  const bool all_there =
      std::none_of(ranks_.begin(), ranks_.end(), [](const Rank& side) { return side.away; });
  if (write.parameters.empty() || !all_there) return absl::OkStatus();
  write.number = stage_.job().Status().state_writes + 1;
  for (const Event& event : attempt_->events) {
    if (event.kind == EventKind::kDeath && event.pick % 4 == 2) ArmDeath(event);
  }
  absl::Status written;
  while (DiesIn([&] { written = BringWrite(write); })) {
    BALLAST_RETURN_IF_ERROR(TakeOver(/*may_be_decided=*/false));
  }
  BALLAST_RETURN_IF_ERROR(written);
  if (may_die_) stage_.deaths().Disarm();
  ++stage_.tally().written;
  stage_.model().Write(*attempt_);
  return stage_.CheckAllState();
}

absl::Status EnginePlayer::BringWrite(const StateWrite& write) {
  int ended = 0;
  absl::Status told;
  bool is_refused = false;
  bool is_under_way = false;  // After a death it may be done.
  for (int rank = 0; rank < history_.job.world_size; ++rank) {
    // Who does not wait for the others is told so, and so are those who have brought their parts:
    // they bring them again.
    if (is_under_way && !std::exchange(is_refused, true)) {
      BALLAST_RETURN_IF_ERROR(ExpectCode(absl::StatusCode::kFailedPrecondition,
                                         ranks_[rank].stream->BeginStep(step_, {}),
                                         "a begin before a write of state"));
      BALLAST_RETURN_IF_ERROR(ExpectCode(absl::StatusCode::kFailedPrecondition, told,
                                         "a part of a write that cannot be whole"));
      rank = 0;
    }
    BALLAST_ASSIGN_OR_RETURN(
        const Job::StateWriter writer,
        stage_.job().BeginStateWrite(
            {.rank = rank, .process_id = ranks_[rank].process_id, .generation = generation_},
            write));
    is_under_way = writer.id != 0;
    for (const int chunk : ChunksOf(write, stage_.layout())) {
      const Chunk& of = stage_.layout().chunks()[chunk];
      if (of.rank != rank) continue;
      std::vector<float> values(write.planes.size() * of.elements, 0.0f);
      for (const ChunkPiece& piece : stage_.layout().Pieces(chunk)) {
        for (size_t i = 0; i < write.planes.size() * piece.elements; ++i) {
          const size_t plane = i / piece.elements;
          const int64_t at = static_cast<int64_t>(i % piece.elements);
          values[plane * of.elements + piece.chunk_offset + at] =
              WrittenValue(*attempt_, write.planes[plane], history_.job.parameters[piece.parameter],
                           piece.parameter_offset + at);
        }
      }
      const absl::Span<const std::byte> bytes(reinterpret_cast<const std::byte*>(values.data()),
                                              values.size() * sizeof(float));
      BALLAST_RETURN_IF_ERROR(stage_.job().WriteStateChunk(writer, chunk, {&bytes, 1}));
    }
    (void)stage_.job().EndStateWrite(writer, [&](const absl::StatusOr<bool>& done) {
      ended += done.ok() ? 1 : 0;
      told = done.status();
    });
  }
  return ended == history_.job.world_size ? absl::OkStatus()
                                          : Wrong("a write of state has not ended");
}

absl::Status EnginePlayer::SealAll() {
  for (int rank = 0; rank < history_.job.world_size; ++rank) {
    Rank& side = ranks_[rank];
    BALLAST_ASSIGN_OR_RETURN(
        const auto refusal, side.stream->Seal(At(rank), attempt_->micro_steps, VoteWithSeal(rank)));
    if (refusal.has_value()) return Wrong("a seal after a death: ", refusal->status.ToString());
    side.sealed = true;
  }
  return absl::OkStatus();
}

}  // namespace ballast::histories
