// The second round of a step whose ranks give O, and what goes wrong meanwhile.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/reason.h"
#include "cpu_optimizer_service/common/status.h"
#include "tests/histories/engine/engine_player.h"
#include "tests/histories/random.h"

namespace ballast::histories {

absl::Status EnginePlayer::PlayDirections() {
  for (Rank& side : ranks_) {
    side.begun = side.sealed = false;
    side.try_number = 0;
  }
  for (int rank = 0; rank < history_.job.world_size; ++rank) {
    if (ranks_[rank].away) BALLAST_RETURN_IF_ERROR(Open(rank, /*over=*/false));
  }
  BALLAST_RETURN_IF_ERROR(ReadDirections());
  Random random(attempt_->round_seed);
  std::vector<int> chunks(orthogonal_.size());
  for (size_t chunk = 0; chunk < chunks.size(); ++chunk) chunks[chunk] = static_cast<int>(chunk);
  random.Shuffle(chunks);
  for (int turn = attempt_->round_seed == 0 ? 0 : random.Below(4); turn > 0; --turn) {
    for (int i = random.Below(static_cast<int>(chunks.size())); i > 0; --i) {
      BALLAST_RETURN_IF_ERROR(Give(chunks[random.Below(static_cast<int>(chunks.size()))]));
    }
    // Perhaps those were all.
    if (!ranks_[0].ear->AwaitsOrthogonal(step_) ||
        stage_.job().Status().phase != JobPhase::kDirections) {
      break;
    }
    BALLAST_RETURN_IF_ERROR(Disturb(random.Below(7), random.Below(history_.job.world_size),
                                    chunks[random.Below(static_cast<int>(chunks.size()))]));
  }
  for (const int chunk : chunks) {
    BALLAST_RETURN_IF_ERROR(Give(chunk));
  }
  for (const Rank& side : ranks_) {
    if (!side.ear->AwaitCommit(step_)) return Wrong("step ", step_, " was not committed");
  }
  return absl::OkStatus();
}

absl::Status EnginePlayer::Give(int chunk) {
  if (orthogonal_[chunk].empty()) return absl::OkStatus();
  std::vector<uint16_t> values = orthogonal_[chunk];
  VaryOrthogonal(given_variant_, values);
  const absl::Span<const std::byte> bytes(reinterpret_cast<const std::byte*>(values.data()),
                                          values.size() * sizeof(uint16_t));
  const size_t cut = bytes.size() / 3;
  const absl::Span<const std::byte> pieces[] = {bytes.subspan(0, cut), bytes.subspan(cut)};
  const int rank = stage_.layout().chunks()[chunk].rank;
  const Rank& side = ranks_[rank];
  const RankHolder holder = {
      .rank = rank, .process_id = side.process_id, .generation = generation_};
  if (side.memory != nullptr && (chunk + given_variant_) % 2 == 0) {
    const auto shared = stage_.job().ShareDirections(step_, chunk, side.process_id);
    // The round may be over.
    if (!shared.ok() && ReasonOf(shared.status()) != reason::kOtherStep) return shared.status();
    side.memory->WriteGradient(chunk, bytes);
    const absl::Status given = stage_.job().GiveOrthogonal(holder, step_, chunk, {});
    // The engine may have lost the memory with its process.
    if (!absl::IsUnavailable(given)) return given;
  }
  return stage_.job().GiveOrthogonal(holder, step_, chunk, pieces);
}

// What follows is not to be taken back by a death.
bool EnginePlayer::IsAliveToTheEnd() { return !may_die_ || !stage_.deaths().Hide(); }

absl::Status EnginePlayer::Disturb(int kind, int rank, int chunk) {
  Rank& side = ranks_[rank];
  switch (kind) {
    case 0:
    case 1:
      ++stage_.tally().cuts;
      return Open(rank, /*over=*/kind == 0);
    case 2: {  // Another process, or another session of the same one.
      if (!IsAliveToTheEnd()) return absl::OkStatus();
      if (chunk % 2 == 0) side.process_id = absl::StrCat("process", ++processes_);
      BALLAST_ASSIGN_OR_RETURN(const Attachment attached,
                               stage_.job().Attach({.rank = rank, .process_id = side.process_id}));
      if (attached.generation != generation_.Next()) {
        return Wrong("a new session of rank ", rank, " got generation ",
                     ToString(attached.generation));
      }
      ++stage_.tally().replaced;
      return StartRoundAgain();
    }
    case 3: {
      if (!IsAliveToTheEnd()) return absl::OkStatus();
      BALLAST_ASSIGN_OR_RETURN(const uint64_t aborted, stage_.job().AbortStep());
      if (aborted != step_) return Wrong("aborted step ", aborted, ", expected ", step_);
      ++stage_.tally().made_by_service;
      variant_ = 0;  // The service's.
      given_variant_ = 2;
      return absl::OkStatus();
    }
    case 4:
      BALLAST_RETURN_IF_ERROR(ExpectCode(absl::StatusCode::kFailedPrecondition,
                                         side.stream->BeginStep({step_ + 1, 0}, {}),
                                         "a begin in a second round"));
      return ExpectCode(absl::StatusCode::kFailedPrecondition,
                        side.stream->Discard({step_ + 1, 0}).status(),
                        "a discard in a second round");
    case 5: {
      const RankHolder holder = {
          .rank = rank, .process_id = side.process_id, .generation = generation_};
      const bool is_own = stage_.layout().chunks()[chunk].rank == rank;
      const bool is_of_step = orthogonal_[chunk].empty();
      const absl::Span<const std::byte> nothing;
      const absl::Status given =
          stage_.job().GiveOrthogonal(holder, step_ + 1, chunk, {&nothing, 1});
      BALLAST_RETURN_IF_ERROR(
          ExpectCode(absl::StatusCode::kInvalidArgument, given, "O of the wrong size"));
      if (is_own || is_of_step) return absl::OkStatus();
      const std::vector<std::byte> bytes(orthogonal_[chunk].size() * sizeof(uint16_t));
      const absl::Span<const std::byte> piece(bytes);
      return ExpectCode(absl::StatusCode::kInvalidArgument,
                        stage_.job().GiveOrthogonal(holder, step_, chunk, {&piece, 1}),
                        "O of another rank's chunk");
    }
    default:
      if (history_.job.keep_previous) return absl::OkStatus();
      return ExpectCode(absl::StatusCode::kFailedPrecondition, stage_.job().UndoStep().status(),
                        "undo in a second round");
  }
}

// The generation has risen: what was given counts no more, and may be something else now.
absl::Status EnginePlayer::StartRoundAgain() {
  variant_ = ++given_variant_;
  generation_ = generation_.Next();
  for (int rank = 0; rank < history_.job.world_size; ++rank) {
    Rank& side = ranks_[rank];
    if (side.stream != nullptr) BALLAST_RETURN_IF_ERROR(ExpectAborted(*side.stream, rank));
    BALLAST_RETURN_IF_ERROR(side.ear->fault());
    LoseMemory(rank);
    ghosts_.push_back(std::move(side.stream));
    if (ghosts_.back() == nullptr) ghosts_.pop_back();
  }
  for (int rank = 0; rank < history_.job.world_size; ++rank) {
    BALLAST_RETURN_IF_ERROR(Open(rank, /*over=*/false));
  }
  return ReadDirections();
}

absl::Status EnginePlayer::ReadDirections() {
  BALLAST_ASSIGN_OR_RETURN(orthogonal_, stage_.MakeOrthogonal());
  return absl::OkStatus();
}

}  // namespace ballast::histories
