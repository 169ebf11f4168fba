// Memory that ranks share with this process: who has it, and for how long.
#include <utility>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/rank_memory_layout.h"
#include "cpu_optimizer_service/common/status.h"
#include "cpu_optimizer_service/job/job_impl.h"

namespace ballast {

int64_t JobImpl::RankMemoryBytes(int rank) const {
  return RankMemoryLayout(layout_, spec_.groups, rank).size_bytes();
}

absl::StatusOr<MemoryBudget::Reservation> JobImpl::ReserveRankMemory(int rank) {
  return environment_.budget->Reserve(
      RankMemoryBytes(rank),
      absl::StrCat("memory shared with rank ", rank, " of job ", spec_.name));
}

absl::Status JobImpl::GiveRankMemory(const RankHolder& holder,
                                     std::shared_ptr<const RankMemory> memory) {
  const int64_t size_bytes = RankMemoryBytes(holder.rank);
  std::shared_ptr<const RankMemory> replaced;  // Unmapped after the lock.
  MutexLock lock(mutex_);
  BALLAST_RETURN_IF_ERROR(WaitUntilDecided());
  BALLAST_RETURN_IF_ERROR(CheckUsable());
  BALLAST_RETURN_IF_ERROR(CheckGeneration(holder.generation));
  Rank& rank = ranks_[holder.rank];
  if (rank.process_id != holder.process_id) {
    return absl::AbortedError(absl::StrCat("rank ", holder.rank, " of job ", spec_.name,
                                           " is not held by this process; attach again"));
  }
  if (HasBegun(holder.rank)) {
    return absl::FailedPreconditionError(
        absl::StrCat("rank ", holder.rank, " of job ", spec_.name, " is in the middle of a step"));
  }
  replaced = std::exchange(rank.memory, std::move(memory));
  rank.memory_bytes = size_bytes;
  return absl::OkStatus();
}

void JobImpl::DropRankMemory(int index, const RankMemory* memory) {
  std::shared_ptr<const RankMemory> dropped;  // Unmapped after the lock.
  MutexLock lock(mutex_);
  Rank& rank = ranks_[index];
  if (rank.memory.get() == memory) dropped = std::move(rank.memory);
}

}  // namespace ballast
