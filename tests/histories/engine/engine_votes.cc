// What the ranks do when all have sealed: they look at the norm, discard for it, vote, and vote
// again.
#include <chrono>
#include <limits>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/status.h"
#include "tests/histories/engine/engine_player.h"
#include "tests/histories/random.h"

namespace ballast::histories {

StepVote EnginePlayer::VoteOf(int rank) const {
  StepVote vote = live().vote;
  if (rank == votes_otherwise_) vote.clipping = {.max_norm = vote.clipping.max_norm + 1};
  return vote;
}

std::optional<StepVote> EnginePlayer::VoteWithSeal(int rank) const {
  if (Looks(*attempt_, rank)) return std::nullopt;
  return VoteOf(rank);
}

// A stream may break here, too: it says its seal again, and is told again.
absl::Status EnginePlayer::LookAtNorm(int rank) {
  Rank& side = ranks_[rank];
  for (const bool cut : {Mix(attempt_->order_seed + rank) % 5 == 0, false}) {
    const std::optional<StepNorm> norm = side.ear->AwaitNorm(At(rank));
    if (!norm.has_value()) return Wrong("rank ", rank, " was not told the norm");
    BALLAST_RETURN_IF_ERROR(stage_.CheckNorm(*norm, live()));
    if (!cut) return absl::OkStatus();
    ++stage_.tally().cuts;
    BALLAST_RETURN_IF_ERROR(Open(rank, /*over=*/rank % 2 == 0));
    BALLAST_ASSIGN_OR_RETURN(
        const auto refusal, side.stream->Seal(At(rank), attempt_->micro_steps, VoteWithSeal(rank)));
    if (refusal.has_value()) return Wrong("a seal said again: ", refusal->status.ToString());
  }
  return absl::OkStatus();
}

absl::Status EnginePlayer::PlayVotes() {
  if (attempt_->looks == 0 && votes_otherwise_ == -1) return absl::OkStatus();
  int last = -1;  // To vote.
  for (int rank = 0; rank < history_.job.world_size; ++rank) {
    if (!Looks(*attempt_, rank)) continue;
    BALLAST_RETURN_IF_ERROR(LookAtNorm(rank));
    last = rank;
  }
  for (int rank = 0; rank <= last; ++rank) {
    if (!Looks(*attempt_, rank)) continue;
    if (rank != last) {  // The last word counts.
      BALLAST_RETURN_IF_ERROR(ranks_[rank].stream->Vote(At(rank), {.apply = false}));
    }
    BALLAST_RETURN_IF_ERROR(ranks_[rank].stream->Vote(At(rank), VoteOf(rank)));
  }
  return votes_otherwise_ == -1 ? absl::OkStatus() : VoteAgain();
}

absl::Status EnginePlayer::VoteAgain() {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::minutes(1);
  for (int rank = 0; rank < history_.job.world_size; ++rank) {
    Rank& side = ranks_[rank];
    while (side.ear->vote_refusals() <= side.vote_refusals) {
      if (side.ear->IsDead()) return absl::UnavailableError("dead");
      if (std::chrono::steady_clock::now() > deadline) {
        return Wrong("rank ", rank, " was not told that votes differ");
      }
      std::this_thread::yield();
    }
    ++side.vote_refusals;
  }
  ++stage_.tally().refused_votes;
  votes_otherwise_ = -1;
  for (int rank = 0; rank < history_.job.world_size; ++rank) {
    BALLAST_RETURN_IF_ERROR(ranks_[rank].stream->Vote(At(rank), VoteOf(rank)));
  }
  return absl::OkStatus();
}

bool EnginePlayer::SpikeIsDue() const {
  return live_ < attempt_->spikes && attempt_->end != End::kAbortAtDecision;
}

// The norm is seen, the attempt is discarded on all ranks, and nothing has moved.
absl::Status EnginePlayer::DiscardForSpike() {
  int first = -1;
  for (int rank = 0; rank < history_.job.world_size; ++rank) {
    if (!Looks(*attempt_, rank)) continue;
    BALLAST_RETURN_IF_ERROR(LookAtNorm(rank));
    if (first == -1) first = rank;
  }
  ++stage_.tally().spikes;
  BALLAST_RETURN_IF_ERROR(stage_.CheckAllState());
  whole_ = false;
  return Discard(first);
}

absl::Status EnginePlayer::VoteWrongly(const Event& event) {
  Rank& side = ranks_[event.rank];
  // Of a try that comes to nothing the rank is told so.
  if (!open_ || side.try_number != live_) return absl::OkStatus();
  // A service that has taken the step over cannot know whether the norm was told.
  if (event.kind == EventKind::kEarlyVote && taken_over_step_ == step_ && side.sealed) {
    return absl::OkStatus();
  }
  ++stage_.tally().refused_calls;
  if (event.kind == EventKind::kEarlyVote) {
    return ExpectCode(absl::StatusCode::kFailedPrecondition,
                      side.stream->Vote(At(event.rank), live().vote), "a vote before the norm");
  }
  if (!live_begun_) return absl::OkStatus();
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const int groups = static_cast<int>(history_.job.groups.size());
  const std::vector<StepVote> bad = {
      {.clipping = {.max_norm = -1}},
      {.clipping = {.max_norm = nan}},
      {.clipping = {.multipliers = std::vector<double>(groups, nan)}},
      {.clipping = {.multipliers = std::vector<double>(groups, -1)}},
      {.clipping = {.multipliers = std::vector<double>(groups + 1, 1)}},
      {.clipping = {.max_norm = 1, .multipliers = std::vector<double>(groups, 1)}},
      {.overrides = {{groups, {.lr = 1e-3}}}},
      {.overrides = {{0, {.lr = -1}}}},
      {.trainer_state = std::string(kMaxTrainerStateBytes + 1, 's')},
  };
  return ExpectCode(absl::StatusCode::kInvalidArgument,
                    side.stream->Vote(At(event.rank), bad[event.pick % bad.size()]), "a bad vote");
}

}  // namespace ballast::histories
