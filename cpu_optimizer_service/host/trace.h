// A timeline of some steps of a job: the events of each chunk, with time and thread. Off unless
// requested. Then each event costs two readings of the clock and a slot in a table of bounded size.
// The clock is CLOCK_MONOTONIC, so that a worker on the same host can lay its own timeline beside
// it.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_HOST_TRACE_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_HOST_TRACE_H_

#include <array>
#include <atomic>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "cpu_optimizer_service/common/system/mutex.h"
#include "cpu_optimizer_service/host/memory_budget.h"

namespace ballast {

enum class TraceEventKind : uint8_t {
  kArrived,     // A contribution, from its arrival until it is stored (and added).
  kSummed,      // The sums of squares of a chunk.
  kSpeculated,  // A provisional update, before the decision.
  kDecided,     // From the last seal to the decision; no chunk.
  kUpdated,     // An update after the decision.
  kSent,        // A chunk's weights, from their turn until the transport has taken them.
  kCommitted,   // An instant; no chunk.
  kBegun,       // An instant, when the first rank began the step; no chunk.
};

struct TraceEvent {
  TraceEventKind kind = TraceEventKind::kArrived;
  uint32_t thread = 0;  // Small numbers, in order of first appearance in the process.
  int32_t chunk = -1;   // -1: none.
  uint64_t step = 0;
  int64_t begin_ns = 0;
  int64_t end_ns = 0;
};

int64_t TraceNow();  // CLOCK_MONOTONIC in nanoseconds; never 0.

struct Trace {
  std::vector<TraceEvent> events;    // By begin_ns.
  uint64_t dropped_events = 0;       // Events without room.
  MemoryBudget::Reservation memory;  // For the events; the budget outlives it.
};

// Thread-safe. If a step is aborted and repeated, both are recorded under the same number: each
// attempt starts with a kBegun.
class TraceRecorder {
 public:
  // Whether events of `step` are wanted. One relaxed load while there is no trace.
  bool wants(uint64_t step) const {
    const uint64_t first = first_step_.load(std::memory_order_relaxed);
    return first != 0 && step >= first && step <= last_step_.load(std::memory_order_relaxed);
  }
  // The time now if events of `step` are wanted; else 0.
  int64_t Begin(uint64_t step) const { return wants(step) ? TraceNow() : 0; }
  // Records an event that ends now, if it is wanted and begin_ns is not 0.
  void Record(TraceEventKind kind, uint64_t step, int chunk, int64_t begin_ns);
  // Records an instant without a chunk, if it is wanted.
  void Mark(TraceEventKind kind, uint64_t step);

  // Weights of `step` wait to be sent: a kSent follows, unless their stream ends.
  void WillSend(uint64_t step) {
    if (wants(step) && step == last_step()) to_send_.fetch_add(1);
  }
  // Whether all weights of the last step have been sent, which ends after its commit.
  bool all_sent() const { return sent_.load() >= to_send_.load(); }

  // From now on the events of steps [first_step, first_step + steps) are wanted, at most
  // `max_events` of them. RESOURCE_EXHAUSTED during another trace.
  absl::Status Start(uint64_t first_step, uint32_t steps, int64_t max_events);
  // Ends the trace and returns it; nothing is recorded afterwards.
  Trace Stop();

 private:
  // Threads record into separate parts, so that they do not contend.
  static constexpr uint32_t kParts = 32;
  struct alignas(64) Part {
    Mutex mutex;
    std::vector<TraceEvent> events ABSL_GUARDED_BY(mutex);
    uint64_t dropped_events ABSL_GUARDED_BY(mutex) = 0;
  };

  uint64_t last_step() const { return last_step_.load(std::memory_order_relaxed); }
  void Add(const TraceEvent& event);

  std::atomic<uint64_t> first_step_ = 0;  // 0: no trace.
  std::atomic<uint64_t> last_step_ = 0;
  std::atomic<int64_t> room_ = 0;     // For how many more events.
  std::atomic<int64_t> to_send_ = 0;  // Of the last step, in its latest attempt.
  std::atomic<int64_t> sent_ = 0;
  Mutex mutex_;  // Of Start and Stop.
  std::array<Part, kParts> parts_;
};

// Records an event that spans this object's life.
class TraceSpan {
 public:
  TraceSpan(TraceRecorder& recorder, TraceEventKind kind, uint64_t step, int chunk)
      : recorder_(recorder),
        kind_(kind),
        step_(step),
        chunk_(chunk),
        begin_ns_(recorder.Begin(step)) {}
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

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_HOST_TRACE_H_
