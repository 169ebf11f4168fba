// A step's computations on the engine's threads: sums of squares, provisional updates before the
// decision, updates after it, and the weights to send back.
//
// A queued task holds a ticket of its chunk's rank. When the rank's gradients are over or dropped,
// the ticket is void and the task does nothing.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_JOB_UPDATE_EXECUTOR_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_JOB_UPDATE_EXECUTOR_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "cpu_optimizer_service/gradients/norm_sums.h"
#include "cpu_optimizer_service/host/task_pool.h"
#include "cpu_optimizer_service/host/task_queue.h"
#include "cpu_optimizer_service/job/core/job_core.h"
#include "cpu_optimizer_service/job/core/job_memory.h"
#include "cpu_optimizer_service/job/core/rank_table.h"
#include "cpu_optimizer_service/job/kept/journal.h"
#include "cpu_optimizer_service/job/state/state_view.h"
#include "cpu_optimizer_service/job/step/chunk_update.h"
#include "cpu_optimizer_service/job/step/speculation.h"
#include "cpu_optimizer_service/job/step/step_decision.h"
#include "cpu_optimizer_service/job/step/step_machine.h"

namespace ballast {

// Everything that follows from a decision, so that it runs without the job's lock.
struct UpdatePlan {
  StepOutcome outcome;
  StepUpdate update;
  Listeners listeners;            // By rank. Nullable.
  RankMemories weights_in_place;  // By rank: where its weights go. Nullable.
  Speculation::Settled speculation;
  std::vector<bool> lacks_first_round;  // By rank, in a second round: its stream is a later one.
};

// What a second round does (second_round.h).
struct SecondRound {
  SecondDecision decision;
  std::vector<StateBounds> bounds;  // By group, of the state after it.
};

class Executor {
 public:
  // All outlive it.
  Executor(JobCore& core, JobMemory& memory, Journal& journal, const StateView& view,
           const RankTable& ranks, const StepMachine& machine);

  // A task of the job's own.
  void StartTask(std::function<void()> work, int node = TaskPool::kAnyNode);

  // ---- executor.cc: sums of squares
  // Input for a task that starts now.
  struct Ahead {
    std::shared_ptr<const StepUpdate> update;  // Null: no provisional update is wanted.
    uint64_t ticket = 0;
  };
  // The chunk's gradient changes: earlier computations of it no longer count. Precondition: no
  // provisional update of the chunk is running.
  Ahead Renew(int chunk) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // Computes the chunk's sums; returns their approximate part of the squared norm, unscaled and
  // divided. Only provisional updates depend on that.
  double ComputeSums(uint64_t step, int chunk, const StepUpdate* provisional);
  // The sums of a complete chunk gradient are computed. If a provisional update can run now, of any
  // chunk, the caller runs or starts it, outside the lock.
  std::optional<Speculation::Task> FinishSums(int chunk, double squared_norm)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // Starts a task that computes a chunk's sums, unless the ticket is void by then.
  void StartSums(uint64_t step, int chunk, uint64_t ticket);
  bool sums_are_current(int chunk) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock) {
    return sums_.current(chunk);
  }
  // For the decision: claims all sums that no task has begun. No provisional update begins any
  // more.
  std::vector<bool> ClaimSums() ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  void ComputeClaimed(const std::vector<bool>& claimed, uint64_t step);
  void FinishAllSums() ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock) { sums_.FinishAll(); }

  // ---- provisional.cc
  bool CanSpeculate() const { return memory_.need.speculation_bytes > 0; }
  // An attempt begins, with these terms.
  void Begin(const StepTerms& terms) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  void StartProvisional(Speculation::Task task);
  bool IsUpdatedAhead(int chunk) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock) {
    return speculation_.IsRunning(chunk);
  }
  // More of the chunk arrives. True: an update of its earlier gradient is running, and is useless.
  bool Supersede(int chunk) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock) {
    return speculation_.Supersede(chunk);
  }
  // Buffers have been released.
  void StartParked();
  int64_t chunks_paused() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock) {
    return speculation_.paused();
  }

  // ---- The end of work
  // No provisional update begins any more in this attempt.
  void StopSpeculating() ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock) { speculation_.Stop(); }
  // Queued updates do not begin any more: of the rank's chunks; of any.
  void Cancel(int rank) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  void CancelAll() ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // Drops everything that the rank gave. Precondition: no computation of it is running.
  void Forget(int rank) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  void ForgetAll() ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // The step is committed: drops its gradients, and keeps its old versions for the next step.
  void EndStep(std::vector<ChunkStore::Write> published) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);

  // ---- updates.cc
  // Settles the provisional updates. The table has no word of the versions that it drops.
  UpdatePlan MakePlan(Draft decided) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // The decision is stored. Tells the ranks, updates, and sends the weights; then calls `then`.
  void CarryOut(std::shared_ptr<UpdatePlan> plan, std::function<void()> then);
  // ---- second_round.cc, once a first round has ended
  // The chunk's directions, from its gradient and its state.
  void MakeDirections(const StepUpdate& update, int chunk);
  // Makes O of the directions, matrix after matrix; then calls `then` on an engine's thread, with the
  // largest magnitude of each matrix's O, by parameter.
  void Orthogonalize(std::shared_ptr<const StepUpdate> update,
                     std::function<void(std::vector<double> largest)> then);
  // What becomes of the matrices, by those magnitudes. `bounds`: by group, before the round; empty:
  // unknown. It may look at all weights of a matrix.
  SecondRound DecideSecond(const StepUpdate& update, const std::vector<StateBounds>& bounds,
                           const std::vector<double>& largest) const;
  // For the ranks that are there now. `streams`: by rank, the one that got the first round's weights.
  UpdatePlan MakeSecondPlan(StepUpdate update, const std::vector<uint64_t>& streams)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // Its decision is stored. Updates, and sends the weights; then calls `then`.
  void CarryOutSecond(std::shared_ptr<UpdatePlan> plan, std::function<void()> then);

  // For the chunk in state `from`; the caller sets the destinations.
  ChunkUpdate UpdateOf(const StepUpdate& update, int chunk, const Slot& from,
                       Round round = Round::kFirst) const;
  // For a step that an earlier process decided, from the state in which that left the chunk.
  void RollForward(const StepUpdate& update, int chunk, Round round);
  bool HasTwoRounds(int chunk) const;
  // The tag of an update's lane.
  static uint64_t LaneTag(uint64_t step, Round round);

 private:
  // Runs tasks of one chunk near its memory.
  void StartOfChunk(int chunk, std::function<void()> task);
  void RunSums(uint64_t step, int chunk, uint64_t ticket);

  std::optional<Speculation::Task> SpeculateIfWorthwhile(int chunk, double squared_norm)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // The one that has waited longest for a buffer, if there is a buffer for it.
  std::optional<Speculation::Task> NextParked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  void RunProvisional(Speculation::Task task);
  // The task's update is made, if possible. Returns the listener for its weights, until
  // StopSending. Nullable.
  std::shared_ptr<RankListener> FinishProvisional(const Speculation::Task& task,
                                                  const absl::StatusOr<ChunkStore::Write>& write);

  void UpdateTo(const StepUpdate& update, int chunk, const ChunkStore::Write& write,
                const WeightBuffer& weights, RedoLane* redo = nullptr, Round round = Round::kFirst);
  // Whether that round of the step leaves the chunk half new.
  bool IsHalf(const StepUpdate& update, int chunk, Round round) const;
  void Publish(const ChunkStore::Write& write, const StepUpdate& update, Round round);
  struct Orthogonalizing;
  void RunNextLoop(std::shared_ptr<Orthogonalizing> work);
  void BeginMatrix(Orthogonalizing& work);
  void EndMatrix(Orthogonalizing& work);
  void DecideMatrix(const StepUpdate& update, int parameter, double largest, double bound_before,
                    SecondRound& round) const;
  double LargestWeight(int parameter) const;  // Its magnitude.
  int64_t WeightBytes(int chunk) const;
  void CountWeights(int chunk, const WeightBuffer& weights) {
    core_.traffic.CountWeights(WeightBytes(chunk), weights.in_place());
  }
  WeightBuffer BufferFor(const UpdatePlan& plan, int chunk, bool gradient_may_go);
  void CarryOutChunk(const UpdatePlan& plan, int chunk);
  void ApplyToChunk(const UpdatePlan& plan, int chunk, Round round);
  void SendPublishedWeights(const UpdatePlan& plan, int chunk);

  JobCore& core_;
  JobMemory& memory_;
  Journal& journal_;
  const StateView& view_;
  const RankTable& ranks_;
  const StepMachine& machine_;
  TaskQueue tasks_;
  NormSums sums_ ABSL_GUARDED_BY(job_lock);
  Speculation speculation_ ABSL_GUARDED_BY(job_lock);
  std::vector<uint64_t> tickets_ ABSL_GUARDED_BY(job_lock);  // By rank: the valid one.
};

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_JOB_UPDATE_EXECUTOR_H_
