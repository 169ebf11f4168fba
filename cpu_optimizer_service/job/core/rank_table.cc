#include "cpu_optimizer_service/job/core/rank_table.h"

#include <utility>

namespace ballast {

Listeners RankTable::ByRank() const {
  Listeners listeners;
  for (const RankEntry& rank : ranks_) listeners.push_back(rank.listener);
  return listeners;
}

RankMemories RankTable::WeightsMemories() const {
  RankMemories memories;
  for (const RankEntry& rank : ranks_) memories.push_back(rank.WeightsMemory());
  return memories;
}

void RankTable::Take(int index, const std::string& process_id, Detached& detached) {
  RankEntry& rank = ranks_[index];
  if (rank.last_process_id != process_id && rank.memory != nullptr) {
    detached.memories.push_back(std::move(rank.memory));
  }
  rank.process_id = process_id;
  rank.last_process_id = process_id;
  rank.left = false;
}

void RankTable::TakeListener(int index, Listeners& listeners) {
  RankEntry& rank = ranks_[index];
  if (rank.listener != nullptr) listeners.push_back(std::move(rank.listener));
  rank.listener = nullptr;
  rank.stream = 0;
}

StreamKey RankTable::OpenStream(int index, std::shared_ptr<RankListener> listener,
                                UpdateMode update_mode, bool weights_in_place) {
  RankEntry& rank = ranks_[index];
  rank.listener = std::move(listener);
  // Never a number that was given before: calls of a stream that was replaced must not be taken for
  // those of a later one (IsCurrent).
  rank.stream = ++last_stream_;
  rank.vote_refusals = {};
  rank.update_mode = update_mode;
  rank.weights_in_place = weights_in_place;
  rank.left = false;
  return {.rank = index, .stream = rank.stream};
}

std::shared_ptr<RankListener> RankTable::CloseStream(int index, bool in_step) {
  RankEntry& rank = ranks_[index];
  rank.stream = 0;
  // A rank that has no part in the step in progress is free at once, so that a restart between
  // steps disturbs no other rank.
  // In the middle of a step the rank stays taken: its gradients are in the step, and another
  // process that takes the rank must not add to them (IsTakenFrom).
  if (!in_step) rank.process_id.clear();
  rank.left = in_step;
  return std::exchange(rank.listener, nullptr);
}

std::shared_ptr<const RankMemory> RankTable::GiveMemory(int index,
                                                        std::shared_ptr<const RankMemory> memory,
                                                        int64_t size_bytes) {
  ranks_[index].memory_bytes = size_bytes;
  return std::exchange(ranks_[index].memory, std::move(memory));
}

std::shared_ptr<const RankMemory> RankTable::DropMemory(int index, const RankMemory* memory) {
  if (ranks_[index].memory.get() != memory) return nullptr;
  return std::exchange(ranks_[index].memory, nullptr);
}

Detached RankTable::FreeAll() {
  Detached detached;
  for (int index = 0; index < size(); ++index) {
    TakeListener(index, detached.listeners);
    RankEntry& rank = ranks_[index];
    rank.process_id.clear();
    rank.left = false;
    detached.memories.push_back(std::exchange(rank.memory, nullptr));
  }
  return detached;
}

RankMemories RankTable::TakeLenders() {
  RankMemories lenders;
  for (RankEntry& rank : ranks_) {
    // A lender that is still the rank's memory is not let go of by this.
    if (rank.lender != nullptr) lenders.push_back(std::exchange(rank.lender, nullptr));
  }
  return lenders;
}

void RankTable::FreeLeft() {
  for (RankEntry& rank : ranks_) {
    if (rank.left) rank.process_id.clear();
    rank.left = false;
  }
}

}  // namespace ballast
