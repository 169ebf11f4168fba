// A rank's timeline: spans of its threads and of its GPU on one clock, for --trace.
//
//   Timeline timeline({.rank = 0});
//   { TimelineScope scope(&timeline, Track::kReceive, {.step = 7}); ... }     // on this thread
//   timeline.Add(Track::kReduce, {.step = 7, .bucket = 3}, begin, end);      // measured elsewhere
//   timeline.Write("trace.json");
//
// The clock is CLOCK_MONOTONIC, as in `ballast trace`: with a service on the same host both files
// show the same time. Spans of a track may overlap.
//
// Memory is bounded: spans beyond `most_spans` are counted and dropped. Code that takes a Timeline*
// also takes null: then it records nothing.
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

// In the displayed order.
enum class Track : uint8_t {
  kStep,           // A whole step.
  kCompute,        // Forward and backward.
  kReduce,         // Reduce-scatter of a bucket.
  kCopy,           // Between device and host.
  kSend,           // Handing over gradients, and waiting for the decision.
  kUpdate,         // The optimizer's arithmetic, by the optimizer's report.
  kOrthogonalize,  // Muon's second round: from the directions until O is given.
  kReceive,        // Waiting for new weights.
  kGather,         // All-gather of a bucket.
  kStall,          // A GPU's wait for a bucket's weights, in a pass.
};

// A span's subject; -1: unknown.
struct SpanOf {
  uint64_t step = 0;
  int micro_step = -1;
  int bucket = -1;
  int chunk = -1;
};

// Ranges for the GPU vendor's profiler (cuda/nvtx.h); both of one thread, nested.
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
  // Whether spans are kept: for code that measures only for them.
  bool keeps_spans() const { return options_.most_spans > 0; }

  // JSON for ui.perfetto.dev and chrome://tracing, times in microseconds.
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

// A span of the calling thread, from construction to destruction. Allocates only the span's memory.
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
