// A timeline of some steps of a job: what happened to each chunk, when, and on which thread. Off
// unless somebody asks for it; then each event costs two readings of the clock and a slot in a table
// of fixed size. The clock is CLOCK_MONOTONIC, so that a worker on the same host can lay its own
// timeline beside it.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_TRACE_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_TRACE_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "cpu_optimizer_service/common/mutex.h"

namespace ballast {

enum class TraceEventKind : uint8_t {
  kArrived,    // A contribution, from its coming to its being held (and added).
  kSummed,     // The sums of squares of a chunk.
  kGuessed,    // An update ahead of the decision.
  kDecided,    // From the last seal to the decision; no chunk.
  kUpdated,    // An update after the decision.
  kSent,       // A chunk's weights, from their turn until the transport has taken them.
  kCommitted,  // An instant; no chunk.
  kBegun,      // An instant, when the first rank began the step; no chunk.
};

struct TraceEvent {
  TraceEventKind kind = TraceEventKind::kArrived;
  uint32_t thread = 0;  // Small numbers, in order of first appearance in the process.
  int32_t chunk = -1;   // -1: none.
  uint64_t step = 0;
  int64_t begin_ns = 0;
  int64_t end_ns = 0;
};

int64_t TraceNow();  // CLOCK_MONOTONIC in nanoseconds.

struct Trace {
  std::vector<TraceEvent> events;  // By begin_ns.
  uint64_t dropped_events = 0;     // That found no room.
};

// Thread-safe.
class TraceRecorder {
 public:
  // Whether events of `step` are wanted. One relaxed load while nothing is being traced.
  bool wants(uint64_t step) const {
    const uint64_t first = first_step_.load(std::memory_order_relaxed);
    return first != 0 && step >= first && step <= last_step_.load(std::memory_order_relaxed);
  }
  // Records an event that ends now, if it is wanted.
  void Record(TraceEventKind kind, uint64_t step, int chunk, int64_t begin_ns);

  // From now on the events of steps [first_step, first_step + steps) are wanted, at most
  // `max_events` of them. RESOURCE_EXHAUSTED if a trace is being taken already.
  absl::Status Start(uint64_t first_step, uint32_t steps, int64_t max_events);
  // The last step of the trace that is being taken, or 0.
  uint64_t last_step() const { return last_step_.load(std::memory_order_relaxed); }
  // Ends the trace and returns it.
  Trace Stop();

 private:
  std::atomic<uint64_t> first_step_ = 0;  // 0: nothing is being traced.
  std::atomic<uint64_t> last_step_ = 0;
  Mutex mutex_;
  std::vector<TraceEvent> events_ ABSL_GUARDED_BY(mutex_);
  int64_t max_events_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t dropped_events_ ABSL_GUARDED_BY(mutex_) = 0;
};

// Records an event that lasts as long as this does.
class TraceSpan {
 public:
  TraceSpan(TraceRecorder& recorder, TraceEventKind kind, uint64_t step, int chunk)
      : recorder_(recorder),
        kind_(kind),
        step_(step),
        chunk_(chunk),
        begin_ns_(recorder.wants(step) ? TraceNow() : 0) {}
  ~TraceSpan() {
    if (begin_ns_ != 0) recorder_.Record(kind_, step_, chunk_, begin_ns_);
  }
  TraceSpan(const TraceSpan&) = delete;
  TraceSpan& operator=(const TraceSpan&) = delete;

 private:
  TraceRecorder& recorder_;
  const TraceEventKind kind_;
  const uint64_t step_;
  const int chunk_;
  const int64_t begin_ns_;
};

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_TRACE_H_
