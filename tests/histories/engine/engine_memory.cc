// Memory that some ranks have in common with the engine.
#include <utility>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/status.h"
#include "tests/histories/engine/engine_player.h"

namespace ballast::histories {

// Where the service dies it would have to be in named memory, as the service's own is.
bool EnginePlayer::Shares(int rank) const {
  return !may_die_ && (history_.seed / 5 + rank) % 3 != 0;
}

absl::Status EnginePlayer::GiveMemory(int rank) {
  Rank& side = ranks_[rank];
  side.memory = std::make_shared<const HeapRankMemory>(stage_.layout(), stage_.job().spec(), rank);
  return Annotate(stage_.job().GiveRankMemory(
                      {.rank = rank, .process_id = side.process_id, .generation = side.generation},
                      side.memory),
                  absl::StrCat("giving rank ", rank, " memory"));
}

void EnginePlayer::LoseMemory(int rank) {
  Rank& side = ranks_[rank];
  side.weights_in_place = false;
  if (side.memory == nullptr) return;
  side.memory->Poison();
  lost_.push_back(std::move(side.memory));
  side.memory = nullptr;
  if (lost_.size() > 8) lost_.pop_front();
}

void EnginePlayer::DropMemory(int rank) {
  Rank& side = ranks_[rank];
  if (side.memory == nullptr) return;
  stage_.job().DropRankMemory(rank, side.memory.get());
  dropped_.push_back(std::move(side.memory));
  side.memory = nullptr;
}

absl::Status EnginePlayer::PoisonGradients() {
  for (const auto& memory : dropped_) memory->Poison();
  dropped_.clear();
  const JobStatus status = stage_.job().Status();
  for (int rank = 0; rank < history_.job.world_size; ++rank) {
    const HeapRankMemory* const memory = ranks_[rank].memory.get();
    if (status.ranks[rank].shared_memory != (memory != nullptr)) {
      return Wrong("rank ", rank, memory == nullptr ? " still shares memory" : " shares no memory");
    }
    if (memory == nullptr) continue;
    for (const int chunk : stage_.layout().chunks_of_rank(rank)) {
      memory->WriteGradient(
          chunk, std::vector<std::byte>(memory->gradient(chunk).size(), std::byte{0xff}));
    }
  }
  return absl::OkStatus();
}

absl::Status EnginePlayer::CheckWeightsInPlace(int rank) {
  const Rank& side = ranks_[rank];
  if (!side.weights_in_place) return absl::OkStatus();
  for (const int chunk : stage_.layout().chunks_of_rank(rank)) {
    const absl::Span<const std::byte> place = side.memory->weights(chunk);
    BALLAST_RETURN_IF_ERROR(Annotate(
        stage_.CheckShard(chunk, std::vector<std::byte>(place.begin(), place.end())), "in place"));
  }
  return absl::OkStatus();
}

bool EnginePlayer::GoesInPlace(const Call& call) const {
  if (ranks_[call.rank].memory == nullptr || ScriptOf(call).IsEmpty(call.chunk, call.segment)) {
    return false;
  }
  return (history_.seed + call.chunk + call.segment) % 4 != 0;
}

}  // namespace ballast::histories
