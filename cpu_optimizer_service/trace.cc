#include "cpu_optimizer_service/trace.h"

#include <ctime>

#include <algorithm>
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
  return int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

void TraceRecorder::Record(TraceEventKind kind, uint64_t step, int chunk, int64_t begin_ns) {
  if (!wants(step)) return;
  const TraceEvent event = {.kind = kind,
                            .thread = ThisThread(),
                            .chunk = chunk,
                            .step = step,
                            .begin_ns = begin_ns,
                            .end_ns = TraceNow()};
  MutexLock lock(mutex_);
  if (static_cast<int64_t>(events_.size()) < max_events_) {
    events_.push_back(event);
  } else {
    ++dropped_events_;
  }
}

absl::Status TraceRecorder::Start(uint64_t first_step, uint32_t steps, int64_t max_events) {
  MutexLock lock(mutex_);
  if (first_step_.load() != 0) {
    return absl::ResourceExhaustedError("a trace of this job is being taken; wait for its end");
  }
  events_.clear();
  events_.reserve(max_events);  // Not while events are recorded.
  max_events_ = max_events;
  dropped_events_ = 0;
  last_step_.store(first_step + steps - 1);
  first_step_.store(first_step);
  return absl::OkStatus();
}

Trace TraceRecorder::Stop() {
  Trace trace;
  {
    MutexLock lock(mutex_);
    first_step_.store(0);
    last_step_.store(0);
    trace.events = std::exchange(events_, {});
    trace.dropped_events = dropped_events_;
    max_events_ = 0;
  }
  std::sort(trace.events.begin(), trace.events.end(),
            [](const TraceEvent& a, const TraceEvent& b) { return a.begin_ns < b.begin_ns; });
  return trace;
}

}  // namespace ballast
