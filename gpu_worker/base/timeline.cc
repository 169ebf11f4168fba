#include "gpu_worker/base/timeline.h"

#include <algorithm>
#include <charconv>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "cpu_optimizer_service/common/system/atomic_file.h"
#include "cpu_optimizer_service/common/system/chrome_trace_writer.h"

namespace ballast::worker {
namespace {

using Json = ChromeTraceWriter::Json;

constexpr Track kTracks[] = {
    Track::kStep,   Track::kCompute,       Track::kReduce,  Track::kCopy,   Track::kSend,
    Track::kUpdate, Track::kOrthogonalize, Track::kReceive, Track::kGather, Track::kStall};

const char* Name(Track track) {
  switch (track) {
    case Track::kStep:
      return "step";
    case Track::kCompute:
      return "compute";
    case Track::kReduce:
      return "reduce";
    case Track::kCopy:
      return "copy";
    case Track::kSend:
      return "send";
    case Track::kUpdate:
      return "update";
    case Track::kOrthogonalize:
      return "orthogonalize";
    case Track::kReceive:
      return "receive";
    case Track::kGather:
      return "gather";
    case Track::kStall:
      return "stall";
  }
  return "";
}

double Microseconds(Timeline::Clock::duration duration) {
  return std::chrono::duration<double, std::micro>(duration).count();
}

// Numbers of tracks in the file begin with 1.
int Number(Track track) { return static_cast<int>(track) + 1; }

// A span's name, made without the heap: a profiler's ranges have theirs made whether or not a
// profiler is there to read it, which no call tells.
class SpanName {
 public:
  SpanName(Track track, const SpanOf& of) {
    Append(Name(track));
    if (track == Track::kStep) Append(" ", of.step);
    if (of.micro_step >= 0) Append(" micro-step ", of.micro_step);
    if (of.bucket >= 0) Append(" bucket ", of.bucket);
    if (of.chunk >= 0) Append(" chunk ", of.chunk);
    *end_ = '\0';
  }
  SpanName(const SpanName&) = delete;
  SpanName& operator=(const SpanName&) = delete;
  const char* c_str() const { return text_; }

 private:
  void Append(absl::string_view text) { end_ = std::copy(text.begin(), text.end(), end_); }
  template <typename Integer>
  void Append(absl::string_view what, Integer number) {
    Append(what);
    end_ = std::to_chars(end_, text_ + sizeof(text_), number).ptr;
  }

  char text_[128];  // The longest, with all numbers at their largest, has 83.
  char* end_ = text_;
};

Json Arguments(const SpanOf& of) {
  Json arguments = {{"step", of.step}};
  if (of.micro_step >= 0) arguments["micro_step"] = of.micro_step;
  if (of.bucket >= 0) arguments["bucket"] = of.bucket;
  if (of.chunk >= 0) arguments["chunk"] = of.chunk;
  return arguments;
}

}  // namespace

void Timeline::Add(Track track, const SpanOf& of, Clock::time_point begin, Clock::time_point end) {
  MutexLock lock(mutex_);
  if (spans_.size() >= options_.most_spans) {
    ++dropped_;
    return;
  }
  // Spans are kept as numbers; their text is made by ToJson, after the training.
  spans_.push_back({.track = track, .of = of, .begin = begin, .end = end});
}

std::string Timeline::ToJson() const {
  const ChromeTraceWriter writer(options_.rank,
                                 absl::StrCat("ballast-worker rank ", options_.rank));
  std::string text = writer.Head();
  for (const Track track : kTracks) text += writer.Track(Number(track), Name(track), Number(track));
  MutexLock lock(mutex_);
  for (const Span& span : spans_) {
    // Times are not counted from the start of the run: on this clock the files of all processes of
    // a host show one time.
    text +=
        writer.Slice(Number(span.track), {.name = SpanName(span.track, span.of).c_str(),
                                          .category = Name(span.track),
                                          .begin_us = Microseconds(span.begin.time_since_epoch()),
                                          .duration_us = Microseconds(span.end - span.begin),
                                          .arguments = Arguments(span.of)});
  }
  return text + ChromeTraceWriter::Tail({{"rank", options_.rank}, {"dropped_spans", dropped_}});
}

absl::Status Timeline::Write(const std::string& path) const {
  // The file appears whole or not at all: no viewer opens half of a JSON file.
  const absl::Status written = WriteAtomically({{path, ToJson()}});
  if (written.ok()) return written;
  return absl::UnavailableError(absl::StrCat(written.message(), " (--trace names the file)"));
}

void TimelineScope::Begin() {
  if (timeline_->options_.profiler.begin != nullptr) {
    timeline_->options_.profiler.begin(SpanName(track_, of_).c_str());
  }
  // The span lies inside the profiler's range, here and in End: what the profiler's calls take is
  // not part of it.
  if (timeline_->keeps_spans()) begin_ = Timeline::Clock::now();
}

void TimelineScope::End() {
  if (timeline_->keeps_spans()) timeline_->Add(track_, of_, begin_, Timeline::Clock::now());
  if (timeline_->options_.profiler.end != nullptr) timeline_->options_.profiler.end();
}

}  // namespace ballast::worker
