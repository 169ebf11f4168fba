#include "cpu_optimizer_service/host/trace.h"

#include <algorithm>
#include <ctime>
#include <utility>

namespace ballast {
namespace {

uint32_t ThisThread() {
  static std::atomic<uint32_t> threads = 0;
  thread_local const uint32_t number = threads.fetch_add(1);
  return number;
}

}  // namespace

int64_t TraceNow() {
  timespec now = {};
  clock_gettime(CLOCK_MONOTONIC, &now);
  // 0 says that nothing is wanted (TraceRecorder::Begin).
  return std::max<int64_t>(1, int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec);
}

void TraceRecorder::Record(TraceEventKind kind, uint64_t step, int chunk, int64_t begin_ns) {
  if (begin_ns == 0 || !wants(step)) return;
  Add({.kind = kind,
       .thread = ThisThread(),
       .chunk = chunk,
       .step = step,
       .begin_ns = begin_ns,
       .end_ns = TraceNow()});
  // Counted after it was added: whoever sees all_sent() stops the trace, and would lose it
  // otherwise.
  if (kind == TraceEventKind::kSent && step == last_step()) sent_.fetch_add(1);
}

void TraceRecorder::Mark(TraceEventKind kind, uint64_t step) {
  if (!wants(step)) return;
  if (kind == TraceEventKind::kBegun && step == last_step()) {
    to_send_.store(0);  // What an aborted attempt was to send went with its streams.
    sent_.store(0);
  }
  const int64_t now_ns = TraceNow();
  Add({.kind = kind, .thread = ThisThread(), .step = step, .begin_ns = now_ns, .end_ns = now_ns});
}

void TraceRecorder::Add(const TraceEvent& event) {
  Part& part = parts_[event.thread % kParts];
  MutexLock lock(part.mutex);
  if (!wants(event.step)) return;  // Stop has been here, and what is added now would be left over.
  // It goes below 0 where there is no room, so that no thread has to look and take in two steps.
  if (room_.fetch_sub(1, std::memory_order_relaxed) > 0) {
    part.events.push_back(event);
  } else {
    ++part.dropped_events;
  }
}

absl::Status TraceRecorder::Start(uint64_t first_step, uint32_t steps, int64_t max_events) {
  MutexLock lock(mutex_);
  if (first_step_.load() != 0) {
    return absl::ResourceExhaustedError("a trace of this job is being taken; wait for its end");
  }
  room_.store(max_events);
  to_send_.store(0);
  sent_.store(0);
  last_step_.store(first_step + steps - 1);
  // Last, because nothing is wanted while it is 0.
  first_step_.store(first_step);
  return absl::OkStatus();
}

Trace TraceRecorder::Stop() {
  Trace trace;
  MutexLock lock(mutex_);
  // Before the parts are emptied: who adds an event looks again under the part's lock (Add).
  first_step_.store(0);
  last_step_.store(0);
  for (Part& part : parts_) {
    std::vector<TraceEvent> events;  // Freed before the next part is copied.
    {
      MutexLock part_lock(part.mutex);
      events = std::exchange(part.events, {});
      trace.dropped_events += std::exchange(part.dropped_events, 0);
    }
    trace.events.insert(trace.events.end(), events.begin(), events.end());
  }
  // Parts are in no order; what began at once stays in the order in which one thread recorded it.
  std::stable_sort(
      trace.events.begin(), trace.events.end(),
      [](const TraceEvent& a, const TraceEvent& b) { return a.begin_ns < b.begin_ns; });
  return trace;
}

}  // namespace ballast
