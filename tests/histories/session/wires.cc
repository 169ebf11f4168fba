#include "tests/histories/session/wires.h"

#include <algorithm>
#include <chrono>
#include <utility>

namespace ballast::histories {
namespace {

std::chrono::steady_clock::time_point InAMinute() {
  return std::chrono::steady_clock::now() + std::chrono::minutes(1);
}

}  // namespace

void Wires::Plan(std::vector<RankFaults> faults) {
  std::vector<std::unique_ptr<RankStream>> unseen;  // Ended without the lock.
  MutexLock lock(mutex_);
  unseen.swap(unseen_);
  for (size_t rank = 0; rank < ranks_.size(); ++rank) {
    ranks_[rank] = {};
    ranks_[rank].faults = std::move(faults[rank]);
  }
  released_ = false;
  changed_.NotifyAll();
}

void Wires::Release() {
  MutexLock lock(mutex_);
  released_ = true;
  changed_.NotifyAll();
}

bool Wires::AwaitBegun(int rank, uint32_t try_number) {
  const auto deadline = InAMinute();
  MutexLock lock(mutex_);
  // No try is below every one.
  while (ranks_[rank].begun < try_number) {
    if (!changed_.WaitUntil(mutex_, deadline)) return ranks_[rank].begun >= try_number;
  }
  return true;
}

bool Wires::AwaitSealHandled(int rank) {
  const auto deadline = InAMinute();
  MutexLock lock(mutex_);
  while (!ranks_[rank].seal_handled && !released_) {
    if (!changed_.WaitUntil(mutex_, deadline)) return ranks_[rank].seal_handled;
  }
  return true;
}

int64_t Wires::breaks() const {
  MutexLock lock(mutex_);
  return breaks_;
}
int64_t Wires::repeats() const {
  MutexLock lock(mutex_);
  return repeats_;
}

void Wires::AwaitPassage(const Rank& rank) {
  while (rank.faults.late && !released_) changed_.Wait(mutex_);
}

Wires::Fate Wires::GoesUp(int index, const v1::TrainRequest& message) {
  MutexLock lock(mutex_);
  Rank& rank = ranks_[index];
  AwaitPassage(rank);
  if (message.has_open()) return Fate::kPass;
  const int number = rank.up++;
  RankFaults& faults = rank.faults;
  const auto found = std::find_if(
      faults.breaks.begin(), faults.breaks.end(),
      [&](const Break& each) { return each.where != Break::kDown && each.message == number; });
  if (found != faults.breaks.end()) {
    const Break::Where where = found->where;
    faults.breaks.erase(found);
    ++breaks_;
    return where == Break::kUp         ? Fate::kBreakBefore
           : where == Break::kUpUnseen ? Fate::kBreakUnseen
                                       : Fate::kBreakAfter;
  }
  if (message.has_seal() && std::exchange(faults.breaks_at_seal, false)) {
    ++breaks_;
    return Fate::kBreakAfter;
  }
  if (message.has_gradient() && faults.repeats.erase(number) > 0) {
    ++repeats_;
    return Fate::kTwice;
  }
  return Fate::kPass;
}

void Wires::WasHandled(int index, const v1::TrainRequest& message) {
  MutexLock lock(mutex_);
  if (message.has_begin_step()) ranks_[index].begun = message.begin_step().attempt();
  if (message.has_seal()) ranks_[index].seal_handled = true;
  changed_.NotifyAll();
}

void Wires::WasOpened(int index, const RankPosition& position) {
  MutexLock lock(mutex_);
  if (position.open_step != 0) ranks_[index].begun = position.attempt;
  changed_.NotifyAll();
}

void Wires::KeepUnseen(std::unique_ptr<RankStream> stream) {
  MutexLock lock(mutex_);
  unseen_.push_back(std::move(stream));
}

bool Wires::ComesDown(int index) {
  MutexLock lock(mutex_);
  Rank& rank = ranks_[index];
  const int number = rank.down++;
  const bool lost = std::erase_if(rank.faults.breaks, [&](const Break& each) {
                      return each.where == Break::kDown && each.message == number;
                    }) > 0;
  breaks_ += lost;
  return !lost;
}

}  // namespace ballast::histories
