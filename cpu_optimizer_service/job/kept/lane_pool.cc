#include "cpu_optimizer_service/job/kept/lane_pool.h"

#include "absl/algorithm/container.h"
#include "cpu_optimizer_service/common/system/ordered_stores.h"
#include "cpu_optimizer_service/host/kept_record.h"

namespace ballast {
namespace {

auto IsOf(int chunk, uint64_t tag) {
  return [chunk, tag](const RedoLane* lane) {
    return lane->tag == tag && RedoWord::Unpack(lane->word).chunk == static_cast<uint32_t>(chunk);
  };
}

}  // namespace

void LanePool::Use(absl::Span<RedoLane> lanes) {
  MutexLock lock(mutex_);
  for (RedoLane& lane : lanes) (lane.word == 0 ? free_ : left_).push_back(&lane);
}

RedoLane* LanePool::Take(int chunk, uint64_t tag, bool may_wait) {
  RedoLane* lane = nullptr;
  {
    MutexLock lock(mutex_);
    if (const auto left = absl::c_find_if(left_, IsOf(chunk, tag)); left != left_.end()) {
      lane = *left;
      left_.erase(left);
      return lane;
    }
    while (may_wait && free_.empty()) lane_free_.Wait(mutex_);
    if (free_.empty()) return nullptr;
    lane = free_.back();
    free_.pop_back();
  }
  // The tag before the word: with the word the lane is in use.
  lane->tag = tag;
  StoreWord(lane->word, RedoWord{.chunk = static_cast<uint32_t>(chunk)}.Pack());
  Stored(taken_);
  return lane;
}

void LanePool::Give(RedoLane* lane) {
  // Free for a later process before another thread of this one can take it.
  StoreWord(lane->word, 0);
  Stored(freed_);
  {
    MutexLock lock(mutex_);
    free_.push_back(lane);
  }
  lane_free_.NotifyAll();
}

bool LanePool::HasLeft(int chunk, uint64_t tag) const {
  MutexLock lock(mutex_);
  return absl::c_any_of(left_, IsOf(chunk, tag));
}

bool LanePool::AllLeft(absl::FunctionRef<bool(const RedoLane&)> is_so) const {
  MutexLock lock(mutex_);
  return absl::c_all_of(left_, [&](const RedoLane* lane) { return is_so(*lane); });
}

void LanePool::KeepLeft(absl::FunctionRef<bool(const RedoLane&)> is_wanted) {
  MutexLock lock(mutex_);
  std::erase_if(left_, [&](RedoLane* lane) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (is_wanted(*lane)) return false;
    lane->word = 0;
    free_.push_back(lane);
    return true;
  });
  lane_free_.NotifyAll();
}

}  // namespace ballast
