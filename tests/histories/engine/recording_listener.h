// What a rank hears from the engine, checked for order as it comes.
#ifndef BALLAST_TESTS_HISTORIES_ENGINE_RECORDING_LISTENER_H_
#define BALLAST_TESTS_HISTORIES_ENGINE_RECORDING_LISTENER_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "cpu_optimizer_service/common/system/mutex.h"
#include "cpu_optimizer_service/job/job.h"
#include "tests/histories/engine/deaths.h"

namespace ballast::histories {

// Thread-safe.
class RecordingListener final : public RankListener {
 public:
  // Whether its stream may be given provisional weights.
  // `dead`: from when on the service is, so that nothing that it says is heard; null: never.
  explicit RecordingListener(bool speculates, DeathFlag dead = nullptr)
      : speculates_(speculates), dead_(std::move(dead)) {}

  // Whether what is sent from now on may_guess that nothing more comes, so that provisional weights
  // may be followed by others.
  void MayGuess(bool may_guess);

  void OnWaiting(uint64_t step, const std::vector<int>& ranks, const std::string& why) override;
  void OnSealRefused(uint64_t step, const SealRefusal& refusal) override;
  void OnNorm(const StepNorm& norm) override;
  void OnVoteRefused(StepAttempt at, const absl::Status& why) override;
  void OnProvisionalWeights(uint64_t step, int chunk, WeightBuffer shard) override;
  void OnDecision(const StepOutcome& outcome, absl::Span<const int> dropped_chunks) override;
  void OnWeights(uint64_t step, int chunk, WeightBuffer shard) override;
  void OnDirections(uint64_t step) override;
  void OnCommitted(uint64_t step, double update_seconds, const std::string& left) override;
  void OnDetached(const absl::Status& status) override;

  bool IsDead() const { return dead_ != nullptr && *dead_; }
  // The rank has discarded what it gave: weights that came ahead are nobody's.
  void Discarded();
  // Its stream was opened while the directions of the committed step were being orthogonalized.
  void OpenedInDirections(uint64_t step);
  // False if the service is dead, or it has not come within a minute: something hangs.
  bool AwaitCommit(uint64_t step);
  // The same of that, or of OnDirections.
  bool AwaitDirectionsOrCommit(uint64_t step);
  bool AwaitsOrthogonal(uint64_t step) const;  // OnDirections was the last of those.

  // Nullopt if the service is dead, or it has not come within a minute.
  std::optional<StepNorm> AwaitNorm(StepAttempt at);
  int64_t vote_refusals() const;
  // What was wrong with what came, or OK.
  absl::Status fault() const;
  uint64_t committed_step() const;
  int64_t refusals() const;
  std::vector<int> waiting() const;
  absl::Status detached() const;
  std::vector<StepOutcome> outcomes() const;
  // Of the last applied step. Chunks that came without their bytes are to be read.
  std::map<int, std::vector<std::byte>> shards() const;
  std::set<int> unread_chunks() const;

 private:
  void Complain(const std::string& what) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Whether what comes now is of a dead service. Who waits for it is woken.
  bool Ignores() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const bool speculates_;
  const DeathFlag dead_;
  mutable Mutex mutex_;
  CondVar changed_;
  absl::Status fault_ ABSL_GUARDED_BY(mutex_);
  uint64_t decided_step_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t committed_step_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t directions_step_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t refusals_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t vote_refusals_ ABSL_GUARDED_BY(mutex_) = 0;
  bool may_guess_ ABSL_GUARDED_BY(mutex_) = false;
  std::optional<StepNorm> norm_ ABSL_GUARDED_BY(mutex_);
  std::vector<int> waiting_ ABSL_GUARDED_BY(mutex_);
  absl::Status detached_ ABSL_GUARDED_BY(mutex_);
  std::vector<StepOutcome> outcomes_ ABSL_GUARDED_BY(mutex_);
  std::map<int, std::vector<std::byte>> provisional_ ABSL_GUARDED_BY(mutex_);
  std::map<int, std::vector<std::byte>> shards_ ABSL_GUARDED_BY(mutex_);
  std::set<int> unread_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace ballast::histories

#endif  // BALLAST_TESTS_HISTORIES_ENGINE_RECORDING_LISTENER_H_
