// Updates that are computed before their decision, into second versions of the chunks, and what the
// decision makes of them.
//
// A chunk's provisional update goes none -> queued -> running -> ready under the job's lock; its
// arithmetic happens outside, in a version that nothing else reads. A decision and a clearing
// cancel what is queued, wait for what is running, and publish or drop what is ready. A further
// contribution to the chunk cancels or drops it; while one is awaited for that, it is superseded,
// and its weights are not sent.
//
// An update whose weights need a buffer is parked: queued without a task, until there is a buffer.
// Computed without one, its weights could go only after the decision: where the wire is slower than
// the update that would be most of a large model, while an update that waits goes as fast as the
// wire does. A rank that does not read thereby stops the speculation on its job's chunks, and
// nothing else: the decision cancels what is parked.
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
#include "cpu_optimizer_service/job/step/step.h"
#include "cpu_optimizer_service/state/chunk_store.h"

namespace ballast {

// What the step's update will be if the ranks vote as the step began, the norm is not above what it
// is clipped to, and every parameter is used; null if no provisional update can become the state.
std::shared_ptr<const StepUpdate> MakeProvisionalUpdate(const JobSpec& spec, const StepTerms& terms,
                                                        const std::vector<int64_t>& update_counts);

// By chunk: whether a provisional update of it, made or not, is the decided one. `provisional` is
// what it is made with; null: none is.
std::vector<bool> ChunksAsSpeculated(const Layout& layout, const StepOutcome& outcome,
                                     const StepUpdate* provisional, const StepUpdate& decided);

// The rule by which speculation pauses. A provisional update becomes the state if it was computed
// with what is decided. One that does hides the chunk's update and its way back under backward; one
// that does not costs another pass over the chunk's state. Each chunk remembers of its last 16
// decided steps whether a provisional update would have failed, made or not. Speculation pauses
// when 4 of them failed and resumes when at most 1 did, so that a run that clips now and then goes
// on speculating, and one that clips always, or a layer used every other step, soon stops paying.
// Only speed depends on it, never a bit.
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
  uint16_t failed_ = 0;  // Bit i: a provisional update failed, or would have, i decided steps ago.
  bool paused_ = false;
};
static_assert(SpeculationHistory::kSteps == 16);

class Speculation {
 public:
  // A provisional update that can run: it has a place for the weights.
  struct Task {
    int chunk = 0;
    std::shared_ptr<const StepUpdate> update;
    WeightBuffer weights;
  };
  // What a decision makes of a step's provisional updates. All empty for a job that waits.
  struct Settled {
    // What is left to do for a chunk: all of it; to send the weights of a published update, which
    // the rank's stream does not have; nothing.
    enum class Left : uint8_t { kUpdate, kSend, kNothing };
    std::vector<Left> left;                    // By chunk.
    std::vector<ChunkStore::Write> published;  // Updates that become the state.
    std::vector<std::vector<int>>
        dropped;              // By rank: chunks whose sent weights are not the step's.
    int64_t chunks_left = 0;  // Whose `left` is not kNothing.
    SpeculationCounts counts;
  };

  explicit Speculation(const Layout& layout);

  // An attempt at a step begins. `update`: of MakeProvisionalUpdate, or null if no chunk is to be
  // updated ahead of the decision. It is wrong if the norm is above max_norm; 0: it never is.
  void Begin(std::shared_ptr<const StepUpdate> update, double max_norm);
  // What the attempt in progress was begun with; what is ready was computed with it.
  const StepUpdate* begun_with() const { return begun_with_.get(); }
  // That of the step in progress; null: no more provisional updates in it.
  const std::shared_ptr<const StepUpdate>& update() const { return update_; }
  // The squared norm of a chunk whose gradient is whole, about, as it will be unscaled and divided.
  // What has come so far may decide already that no provisional update of this step can become the
  // state.
  void AddSquaredNorm(int chunk, double squared_norm);

  // True: the chunk's update is queued; the caller runs it (MakeTask) or parks it.
  bool Queue(int chunk);
  Task MakeTask(int chunk, WeightBuffer weights);
  void Park(int chunk) { parked_.push_back(chunk); }
  // The chunk that was parked first.
  std::optional<int> first_parked() const;
  void Unpark() { parked_.pop_front(); }
  // False: it was cancelled, and the chunk may have been queued again, by a later step, for another
  // task.
  bool Run(const Task& task);
  // Whether the chunk's gradient is being read for its update.
  bool IsRunning(int chunk) const {
    return chunks_[chunk].state == State::kRunning || IsSuperseded(chunk);
  }
  void Finish(const ChunkStore::Write& write);
  // The weights of what is ready are being sent to the rank's stream, until StopSending. Meanwhile
  // no other update of the chunk is queued, so that the last weights of a chunk are always newer.
  void StartSending(int chunk, uint64_t stream);
  void StopSending(int chunk) { chunks_[chunk].sending = false; }
  // The chunk's gradient was not whole. Cancels or drops what there is; true: an update was made.
  // Precondition: none is running.
  bool Drop(int chunk, ChunkStore& store);
  // Before that: cancels what is queued. True: one is running, and was not superseded yet.
  bool Supersede(int chunk);
  bool IsSuperseded(int chunk) const { return chunks_[chunk].state == State::kSuperseded; }
  // The chunk's spare version was being read: it is updated after the decision.
  void Fail(int chunk) { chunks_[chunk].state = State::kNone; }

  // Cancels what is queued or parked; nothing more starts before the next Begin.
  void Stop();
  // Cancels what is queued or parked of a rank's chunks.
  void Cancel(int rank);
  // Drops what is ready. Precondition: stopped, and nothing is running.
  void DropAll(ChunkStore& store);
  // Drops what is ready of a rank's chunks. Precondition: cancelled, and none of them is running.
  void DropOfRank(int rank, ChunkStore& store);
  // Splits what is ready by `as_speculated`, and drops from `store` what is not the step's.
  // `is_current(rank, stream)`: whether the rank still has that stream. Precondition: as of DropAll.
  Settled Settle(ChunkStore& store, const std::vector<bool>& as_speculated, bool apply,
                 absl::FunctionRef<bool(int rank, uint64_t stream)> is_current, int world_size);
  // Takes back the memory of `published`, for the next step.
  void Recycle(std::vector<ChunkStore::Write> published);

  // Chunks whose provisional updates failed too often of late.
  int64_t paused() const;

 private:
  enum class State : uint8_t { kNone, kQueued, kRunning, kSuperseded, kReady };
  struct Chunk {
    State state = State::kNone;
    std::shared_ptr<const StepUpdate> update;  // The one that is queued or running.
    uint64_t sent_stream = 0;  // The stream that has the weights of what is ready; 0: none.
    uint64_t void_stream = 0;  // One that has those of an update that was dropped.
    bool sending = false;
    double squared_norm = 0;  // What the chunk has added to that of the step.
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
  double squared_norm_ = 0;  // That of whole gradients, about.
};

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_JOB_STEP_SPECULATION_H_
