// The service's process dies, and the next one goes on with what it had.
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
  carried_out_ = may_be_decided && stage_.job().Status().committed_step == step_;
  stage_.tally().carried_out += carried_out_;
  if (told && !carried_out_) {
    return Wrong("step ", step_, " was told to be decided, and is not after a death");
  }
  for (int rank = 0; rank < history_.job.world_size; ++rank) {
    Rank& side = ranks_[rank];
    side.away = carried_out_;  // It opens once the model has come as far.
    if (carried_out_) continue;
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
