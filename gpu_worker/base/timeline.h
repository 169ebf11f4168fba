// What a rank did when: spans of its threads and of its GPU on one clock, for --trace.
//
//   Timeline timeline({.rank = 0});
//   { TimelineScope scope(&timeline, Track::kReceive, {.step = 7}); ... }     // on this thread
//   timeline.Add(Track::kReduce, {.step = 7, .bucket = 3}, begin, end);      // measured elsewhere
//   timeline.Write("trace.json");
//
// The clock is CLOCK_MONOTONIC, which is also that of `ballast trace`: with a service on the same
// host both files show one time. Tracks may hold spans that overlap.
//
// Memory is bounded: what comes after `most_spans` is counted and not kept. Code that takes a
// Timeline* takes a null one, too: nothing is recorded then.
//
// Thread-safe.
#ifndef BALLAST_GPU_WORKER_BASE_TIMELINE_H_
#define BALLAST_GPU_WORKER_BASE_TIMELINE_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "cpu_optimizer_service/common/system/mutex.h"

namespace ballast::worker {

// In the order in which they are shown.
enum class Track : uint8_t {
  kStep,     // A whole step.
  kCompute,  // Forward and backward.
  kReduce,   // Reduce-scatter of a bucket.
  kCopy,     // Between device and host.
  kSend,     // Handing over gradients, and waiting for the decision.
  kUpdate,   // The optimizer's arithmetic, as the optimizer tells it.
  kReceive,  // Waiting for new weights.
  kGather,   // All-gather of a bucket.
  kStall,    // A GPU's wait for a bucket's weights, in a pass.
};

// What a span is about; -1: not said.
struct SpanOf {
  uint64_t step = 0;
  int micro_step = -1;
  int bucket = -1;
  int chunk = -1;
};

// Ranges as a profiler of the GPU's maker shows them (cuda/nvtx.h); both of one thread, nested.
struct ProfilerRanges {
  void (*begin)(const char* name) = nullptr;
  void (*end)() = nullptr;
};

struct TimelineOptions {
  int rank = 0;
  size_t most_spans = size_t{1} << 20;  // 0: ranges for the profiler only.
  ProfilerRanges profiler;
};

class Timeline {
 public:
  using Clock = std::chrono::steady_clock;

  explicit Timeline(const TimelineOptions& options) : options_(options) {}

  void Add(Track track, const SpanOf& of, Clock::time_point begin, Clock::time_point end);
  // Whether spans are kept: code that measures only for them may ask.
  bool keeps_spans() const { return options_.most_spans > 0; }

  // The format that ui.perfetto.dev and chrome://tracing open, times in microseconds.
  std::string ToJson() const;
  // UNAVAILABLE, naming the file and the reason.
  absl::Status Write(const std::string& path) const;

 private:
  friend class TimelineScope;
  struct Span {
    Track track;
    SpanOf of;
    Clock::time_point begin;
    Clock::time_point end;
  };

  const TimelineOptions options_;
  mutable Mutex mutex_;
  std::vector<Span> spans_ ABSL_GUARDED_BY(mutex_);
  uint64_t dropped_ ABSL_GUARDED_BY(mutex_) = 0;
};

// A span of the calling thread, from construction to destruction. Allocates nothing but what keeps
// the span.
class TimelineScope {
 public:
  TimelineScope(Timeline* timeline, Track track, const SpanOf& of)
      : timeline_(timeline), track_(track), of_(of) {
    if (timeline_ != nullptr) Begin();
  }
  ~TimelineScope() {
    if (timeline_ != nullptr) End();
  }
  TimelineScope(const TimelineScope&) = delete;
  TimelineScope& operator=(const TimelineScope&) = delete;

 private:
  void Begin();
  void End();

  Timeline* const timeline_;
  const Track track_;
  const SpanOf of_;
  Timeline::Clock::time_point begin_;
};

}  // namespace ballast::worker

#endif  // BALLAST_GPU_WORKER_BASE_TIMELINE_H_
