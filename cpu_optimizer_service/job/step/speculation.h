// Updates before their decision, into second versions of the chunks, and how the decision settles
// them.
//
// A chunk's provisional update goes none -> queued -> running -> ready under the job's lock. Its
// arithmetic happens outside, in a version that nothing else reads. A decision and a clearing
// cancel queued ones, wait for running ones, and publish or drop ready ones. A further contribution
// to the chunk cancels or drops it. While that is pending, it is superseded, and its weights are
// not sent.
//
// An update without a buffer for its weights is parked: queued without a task, until there is a
// buffer. Computed without one, its weights could go only after the decision. If the wire is slower
// than the update, that would concern most of a large model. A waiting update runs as fast as the
// wire. So a rank that does not read stops only the speculation on its job's chunks: the decision
// cancels parked ones.
//
// Thread-compatible: the job's lock guards it.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_JOB_STEP_SPECULATION_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_JOB_STEP_SPECULATION_H_

#include <bit>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "absl/functional/function_ref.h"
#include "cpu_optimizer_service/common/job_spec.h"
#include "cpu_optimizer_service/common/layout.h"
#include "cpu_optimizer_service/common/step_record.h"
#include "cpu_optimizer_service/gradients/weight_buffer.h"
#include "cpu_optimizer_service/job/step/chunk_update.h"
#include "cpu_optimizer_service/job/step/step_agreement.h"
#include "cpu_optimizer_service/state/chunk_store.h"

namespace ballast {

// The step's update if the ranks vote as the step began, the norm is not clipped, and every
// parameter is used. Null if no provisional update can become the state.
std::shared_ptr<const StepUpdate> MakeProvisionalUpdate(const JobSpec& spec, const StepTerms& terms,
                                                        const std::vector<int64_t>& update_counts);

// By chunk: whether its provisional update, made or not, equals the decided one. `provisional` is
// its input; null: there is none.
std::vector<bool> ChunksAsSpeculated(const Layout& layout, const StepOutcome& outcome,
                                     const StepUpdate* provisional, const StepUpdate& decided);

// The rule that pauses speculation. A provisional update becomes the state if it was computed with
// the decided values. Then it hides the chunk's update and its way back under backward. Otherwise
// it costs another pass over the chunk's state. Each chunk remembers for its last 16 decided steps
// whether a provisional update would have failed, made or not. Speculation pauses when 4 of them
// failed, and resumes when at most 1 did. So a run that clips now and then keeps speculating. One
// that always clips, or a layer used every other step, soon stops. This affects only speed, never a
// bit.
class SpeculationHistory {
 public:
  static constexpr int kSteps = 16;
  static constexpr int kPauseAt = 4;
  static constexpr int kResumeAt = 1;

  void Record(bool held) {
    failed_ = static_cast<uint16_t>(failed_ << 1 | (held ? 0 : 1));
    const int failures = std::popcount(failed_);
    if (failures >= kPauseAt) paused_ = true;
    if (failures <= kResumeAt) paused_ = false;
  }
  bool paused() const { return paused_; }

 private:
  uint16_t failed_ = 0;  // Bit i: a provisional update failed, or would have failed, i decided
                         // steps ago.
  bool paused_ = false;
};
static_assert(SpeculationHistory::kSteps == 16);

class Speculation {
 public:
  // A provisional update that can run: it has a buffer for the weights.
  struct Task {
    int chunk = 0;
    std::shared_ptr<const StepUpdate> update;
    WeightBuffer weights;
  };
  // The decision's result for a step's provisional updates. All empty for a job that waits.
  struct Settled {
    // The rest of the work for a chunk: everything; sending the weights of a published update that
    // the rank's stream lacks; nothing.
    enum class Left : uint8_t { kUpdate, kSend, kNothing };
    std::vector<Left> left;                    // By chunk.
    std::vector<ChunkStore::Write> published;  // Updates that become the state.
    std::vector<std::vector<int>> dropped;     // By rank: chunks whose sent weights are void.
    int64_t chunks_left = 0;                   // Chunks whose `left` is not kNothing.
    SpeculationCounts counts;
  };

  explicit Speculation(const Layout& layout);

  // An attempt at a step begins. `update`: from MakeProvisionalUpdate, or null if no chunk is to be
  // updated before the decision. It is wrong if the norm exceeds max_norm; 0: no limit.
  void Begin(std::shared_ptr<const StepUpdate> update, double max_norm);
  // The current attempt's update at its begin; ready ones were computed with it.
  const StepUpdate* begun_with() const { return begun_with_.get(); }
  // The step's update; null: no more provisional updates in it.
  const std::shared_ptr<const StepUpdate>& update() const { return update_; }
  // The approximate squared norm of a complete chunk gradient, unscaled and divided. It may already
  // show that no provisional update of this step can become the state.
  void AddSquaredNorm(int chunk, double squared_norm);

  // True: the chunk's update is queued; the caller runs it (MakeTask) or parks it.
  bool Queue(int chunk);
  Task MakeTask(int chunk, WeightBuffer weights);
  void Park(int chunk) { parked_.push_back(chunk); }
  // The chunk parked first.
  std::optional<int> first_parked() const;
  void Unpark() { parked_.pop_front(); }
  // False: it was cancelled. A later step may have queued the chunk again, for another task.
  bool Run(const Task& task);
  // Whether the chunk's gradient is being read for its update.
  bool IsRunning(int chunk) const {
    return chunks_[chunk].state == State::kRunning || IsSuperseded(chunk);
  }
  void Finish(const ChunkStore::Write& write);
  // The ready weights are being sent to the rank's stream, until StopSending. Meanwhile no other
  // update of the chunk is queued, so that the last weights of a chunk are always newer.
  void StartSending(int chunk, uint64_t stream);
  void StopSending(int chunk) { chunks_[chunk].sending = false; }
  // The chunk's gradient was incomplete. Cancels or drops its update; true: an update was made.
  // Precondition: none is running.
  bool Drop(int chunk, ChunkStore& store);
  // Before that: cancels a queued one. True: one is running, and was not superseded yet.
  bool Supersede(int chunk);
  bool IsSuperseded(int chunk) const { return chunks_[chunk].state == State::kSuperseded; }
  // The chunk's spare version was being read: it is updated after the decision.
  void Fail(int chunk) { chunks_[chunk].state = State::kNone; }

  // Cancels queued and parked ones; none starts before the next Begin.
  void Stop();
  // Cancels queued and parked ones of a rank's chunks.
  void Cancel(int rank);
  // Drops ready ones. Precondition: stopped, and none is running.
  void DropAll(ChunkStore& store);
  // Drops ready ones of a rank's chunks. Precondition: cancelled, and none of them is running.
  void DropOfRank(int rank, ChunkStore& store);
  // Splits ready ones by `as_speculated`, and drops the others from `store`. `is_current(rank,
  // stream)`: whether the rank still has that stream. Precondition: as in DropAll.
  Settled Settle(ChunkStore& store, const std::vector<bool>& as_speculated, bool apply,
                 absl::FunctionRef<bool(int rank, uint64_t stream)> is_current, int world_size);
  // Takes back the memory of `published` for the next step.
  void Recycle(std::vector<ChunkStore::Write> published);

  // Chunks whose recent provisional updates failed too often.
  int64_t paused() const;

 private:
  enum class State : uint8_t { kNone, kQueued, kRunning, kSuperseded, kReady };
  struct Chunk {
    State state = State::kNone;
    std::shared_ptr<const StepUpdate> update;  // The one that is queued or running.
    uint64_t sent_stream = 0;                  // The stream with the ready weights; 0: none.
    uint64_t void_stream = 0;                  // A stream with weights of a dropped update.
    bool sending = false;
    double squared_norm = 0;  // The chunk's part of the step's.
    SpeculationHistory history;

    void Reset() { *this = Chunk{.sending = sending, .history = history}; }
  };

  const Layout& layout_;
  std::vector<Chunk> chunks_;
  std::vector<ChunkStore::Write> ready_;
  std::deque<int> parked_;
  std::shared_ptr<const StepUpdate> begun_with_;
  std::shared_ptr<const StepUpdate> update_;  // The same, or null.
  double max_norm_ = 0;
  double squared_norm_ = 0;  // The approximate sum over complete gradients.
};

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_JOB_STEP_SPECULATION_H_
