// The ranks of a job: each one's process, stream and shared memory.
//
// A process takes a rank by attaching. It keeps the rank until its stream has ended and no step in
// progress needs it, until another process takes it, or until the generation rises.
//
// Thread-compatible: the job's lock guards it. This class calls no listener and unmaps no memory: a
// move returns what it releases, for the caller to handle outside the lock.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_JOB_CORE_RANK_TABLE_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_JOB_CORE_RANK_TABLE_H_

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cpu_optimizer_service/common/job_spec.h"
#include "cpu_optimizer_service/common/step_settings.h"
#include "cpu_optimizer_service/gradients/rank_memory.h"
#include "cpu_optimizer_service/job/rank_stream.h"

namespace ballast {

using Listeners = std::vector<std::shared_ptr<RankListener>>;
using RankMemories = std::vector<std::shared_ptr<const RankMemory>>;

// What a new generation or a new holder releases.
struct Detached {
  Listeners listeners;
  RankMemories memories;
};

// Identifies a stream to the calls that come through it.
struct StreamKey {
  int rank = 0;
  uint64_t stream = 0;
};

struct RankEntry {
  std::string process_id;       // Empty: the rank is free.
  std::string last_process_id;  // The process that took it last, also if it is free.
  uint64_t stream = 0;          // Number of its stream; 0: none.
  std::shared_ptr<RankListener> listener;
  UpdateMode update_mode = UpdateMode::kWait;  // Of its stream, as the next.
  bool weights_in_place = false;
  VoteRefusals vote_refusals;  // That it was told.
  bool left = false;           // Its stream ended during a step; free once the step is over.
  std::shared_ptr<const RankMemory> memory;  // Shared with its process. Nullable.
  int64_t memory_bytes = 0;
  // The memory with the gradients of the step in progress: the same one, unless that has been
  // dropped.
  std::shared_ptr<const RankMemory> lender;

  // Where updated weights are written; null if they go through the stream.
  std::shared_ptr<const RankMemory> WeightsMemory() const {
    return weights_in_place ? memory : nullptr;
  }
};

class RankTable {
 public:
  explicit RankTable(int world_size) : ranks_(world_size) {}

  int size() const { return static_cast<int>(ranks_.size()); }
  const RankEntry& operator[](int rank) const { return ranks_[rank]; }

  bool IsCurrent(const StreamKey& key) const { return ranks_[key.rank].stream == key.stream; }
  bool IsHeldBy(int rank, const std::string& process_id) const {
    return !process_id.empty() && ranks_[rank].process_id == process_id;
  }
  // Whether another process holds the rank.
  bool IsTakenFrom(int rank, const std::string& process_id) const {
    return !ranks_[rank].process_id.empty() && ranks_[rank].process_id != process_id;
  }
  Listeners ByRank() const;              // Null for a rank without a stream.
  RankMemories WeightsMemories() const;  // By rank; see WeightsMemory.

  // A process takes the rank. If another one had it last, that one's shared memory is dropped.
  void Take(int rank, const std::string& process_id, Detached& detached);
  // The rank loses its listener and its stream.
  void TakeListener(int rank, Listeners& listeners);
  StreamKey OpenStream(int rank, std::shared_ptr<RankListener> listener, UpdateMode update_mode,
                       bool weights_in_place);
  // The rank's own stream has ended. The rank is free now, or, `in_step`, once the step is over.
  std::shared_ptr<RankListener> CloseStream(int rank, bool in_step);
  // Its stream is told that all votes of this attempt are void.
  void RefuseVote(int rank, StepAttempt at) { ranks_[rank].vote_refusals.Add(at); }
  // Whether a vote is one of those, cast when this many refusals had been heard.
  bool IsRefused(int rank, StepAttempt at, uint32_t refusals_heard) const {
    return refusals_heard < ranks_[rank].vote_refusals.Of(at);
  }

  std::shared_ptr<const RankMemory> GiveMemory(int rank, std::shared_ptr<const RankMemory> memory,
                                               int64_t size_bytes);
  // Null if the rank has another memory now.
  std::shared_ptr<const RankMemory> DropMemory(int rank, const RankMemory* memory);
  void Lend(int rank) { ranks_[rank].lender = ranks_[rank].memory; }
  // The step reads no more of the rank's gradients. May be null.
  std::shared_ptr<const RankMemory> TakeLender(int rank) {
    return std::exchange(ranks_[rank].lender, nullptr);
  }

  // As an earlier process of the service left it: free, with its shared memory (nullable).
  void Restore(int rank, const std::string& last_process_id,
               std::shared_ptr<const RankMemory> memory, int64_t size_bytes) {
    ranks_[rank].last_process_id = last_process_id;
    ranks_[rank].memory = std::move(memory);
    ranks_[rank].memory_bytes = size_bytes;
  }

  // All ranks are free, without streams and without memory; what lends to the step stays for
  // TakeLenders.
  Detached FreeAll();
  // The step is over: ranks whose stream has ended are free, and nothing lends any more.
  RankMemories TakeLenders();
  void FreeLeft();

 private:
  std::vector<RankEntry> ranks_;
  uint64_t last_stream_ = 0;
};

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_JOB_CORE_RANK_TABLE_H_
