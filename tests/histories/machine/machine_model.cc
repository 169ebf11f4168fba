#include "tests/histories/machine/machine_model.h"

#include <algorithm>

namespace ballast::histories {

uint32_t MachineModel::live() const {
  uint32_t highest = 0;
  for (const Rank& rank : ranks) highest = std::max(highest, rank.attempt);
  return highest;
}

Said MachineModel::Begin(int r, uint64_t step, uint32_t attempt, int settings) {
  const bool is_next = step == committed + 1 && stage <= Stage::kOpen;
  if (!is_next || attempt != ranks[r].attempt) return Said::kError;
  stage = Stage::kOpen;
  if (attempt == live()) {
    if (settings_.value_or(settings) != settings) return Said::kError;
    settings_ = settings;
  }
  const bool again = std::exchange(ranks[r].begun, true);
  return again ? Said::kRepeat : Said::kTaken;
}

Said MachineModel::Contribute(int c, uint64_t step, uint32_t attempt, uint32_t begin, uint32_t end,
                              bool final, bool empty) {
  Chunk& chunk = chunks[c];
  const Rank& rank = ranks[chunk.rank];
  if (!IsOpen(step) || attempt > rank.attempt) return Said::kError;
  if (attempt < rank.attempt) return Said::kDropped;
  if (end <= chunk.next) return Said::kRepeat;
  if (chunk.closed || begin != chunk.next || !rank.begun || rank.sealed) return Said::kError;
  for (uint32_t m = begin; m < end && empty; ++m) chunk.empty.insert(m);
  chunk.next = end;
  chunk.closed = final;
  return Said::kTaken;
}

Said MachineModel::EndMicroStep(int r, uint64_t step, uint32_t attempt, uint32_t micro_step,
                                bool uses) {
  Rank& rank = ranks[r];
  if (!IsOpen(step) || attempt != rank.attempt) return Said::kError;
  if (rank.begun && micro_step < rank.ended) return Said::kRepeat;
  if (!rank.begun || rank.sealed || micro_step != rank.ended) return Said::kError;
  ++rank.ended;
  if (uses && attempt == live()) used_in_.insert(micro_step);
  return Said::kTaken;
}

Said MachineModel::Seal(int r, uint64_t step, uint32_t attempt, uint32_t n,
                        std::optional<int> vote) {
  Rank& rank = ranks[r];
  if (step > 0 && step == committed && n == last_micro_steps_) return Said::kTaken;
  if (stage > Stage::kOpen && step == committed + 1 && n == ranks[0].sealed) {
    if (stage != Stage::kVoting || rank.vote || !vote) return Said::kTaken;
    return TakeVote(r, *vote);
  }
  if (!IsOpen(step) || attempt > rank.attempt) return Said::kError;
  if (attempt < rank.attempt) return Said::kRefused;
  if (rank.sealed != n) {
    rank.sealed.reset();
    rank.vote.reset();
    if (rank.attempt != live()) return Said::kRefused;
    for (const Chunk& chunk : chunks) {
      if (chunk.rank == r && chunk.next != n) return Said::kRefused;
    }
  }
  if (!rank.begun || rank.ended != n) return Said::kRefused;
  rank.sealed = n;
  rank.vote = vote;
  bool agree = true;
  for (const Rank& other : ranks) {
    if (!other.sealed) return Said::kTaken;
    agree = agree && other.sealed == n;
  }
  for (const Chunk& chunk : chunks) {
    for (const uint32_t m : chunk.empty) agree = agree && !used_in_.contains(m);
  }
  if (agree) {
    stage = Stage::kSealed;
    return Said::kTaken;
  }
  for (Rank& other : ranks) other.sealed.reset(), other.vote.reset();
  return Said::kRefused;
}

bool MachineModel::VotesAgree() {
  const bool agree =
      std::ranges::all_of(ranks, [&](const Rank& rank) { return rank.vote == ranks[0].vote; });
  for (Rank& rank : ranks) {
    if (!agree) rank.vote.reset();
  }
  return agree;
}

Said MachineModel::TakeVote(int r, int vote) {
  ranks[r].vote = vote;
  for (const Rank& rank : ranks) {
    if (!rank.vote) return Said::kTaken;
  }
  if (VotesAgree()) stage = Stage::kSealed;
  return Said::kTaken;
}

Said MachineModel::Vote(int r, uint64_t step, uint32_t attempt, int vote) {
  Rank& rank = ranks[r];
  const bool decided = stage == Stage::kDecided && step == committed + 1;
  if (decided || (step == committed && step > 0)) {
    return (decided ? rank.vote : last_vote_) == vote ? Said::kTaken : Said::kError;
  }
  if (stage == Stage::kNone || step != committed + 1 || attempt != rank.attempt)
    return Said::kError;
  if (attempt != live()) return Said::kTaken;  // Its listener is told.
  const bool sealed = stage > Stage::kOpen;
  if (taken_over_ && rank.sealed && (!sealed || (!has_sums_ && !rank.vote))) {
    rank.vote = vote;
    return Said::kTaken;
  }
  if (sealed && rank.vote == vote) return Said::kTaken;
  return stage == Stage::kVoting ? TakeVote(r, vote) : Said::kError;
}

Said MachineModel::Discard(int r, uint64_t step, uint32_t attempt) {
  Rank& rank = ranks[r];
  if (step > 0 && step == committed + (stage == Stage::kDecided ? 1 : 0)) return Said::kDropped;
  if (step != committed + 1 || stage >= Stage::kDecided || stage == Stage::kSealed ||
      attempt > rank.attempt) {
    return Said::kError;
  }
  if (attempt < rank.attempt) return Said::kRepeat;
  stage = Stage::kOpen;
  has_sums_ = false;
  const bool was_live = rank.attempt == live();
  rank = {.attempt = rank.attempt + 1};
  for (Chunk& chunk : chunks) {
    if (chunk.rank == r) chunk = {.rank = r};
  }
  if (was_live) {
    settings_.reset();
    used_in_.clear();
    taken_over_ = false;
    for (Rank& other : ranks) other.sealed.reset(), other.vote.reset();
  }
  return Said::kTaken;
}

bool MachineModel::SumsAreKnown() {
  has_sums_ = true;
  const bool all =
      std::ranges::all_of(ranks, [](const Rank& rank) { return rank.vote.has_value(); });
  if (all && VotesAgree()) return true;
  stage = Stage::kVoting;
  return false;
}

void MachineModel::Commit() {
  last_micro_steps_ = *ranks[0].sealed;
  last_vote_ = ranks[0].vote;
  ++committed;
  Drop();
}

void MachineModel::Drop() {
  stage = Stage::kNone;
  settings_.reset();
  used_in_.clear();
  has_sums_ = taken_over_ = false;
  ranks.assign(ranks.size(), {});
  for (Chunk& chunk : chunks) chunk = {.rank = chunk.rank};
}

void MachineModel::Die() {
  if (stage == Stage::kNone) return;
  stage = Stage::kOpen;
  has_sums_ = false;
  taken_over_ = true;
  for (Rank& rank : ranks) rank.sealed.reset(), rank.vote.reset();
}

}  // namespace ballast::histories
