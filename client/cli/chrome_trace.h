// A trace's events as JSON for ui.perfetto.dev and chrome://tracing: one process for the job, with
// a track for its steps, one for each thread of the service, and one for each rank that gets
// weights. Times are the service's CLOCK_MONOTONIC in microseconds.
//
//   ChromeTrace trace(job, layout);
//   file.Append(trace.Head());
//   for (event : events) file.Append(trace.Add(event));
//   file.Append(trace.Tail(dropped_events));
#ifndef BALLAST_CLIENT_CLI_CHROME_TRACE_H_
#define BALLAST_CLIENT_CLI_CHROME_TRACE_H_

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "ballast/v1/diagnostics.pb.h"
#include "cpu_optimizer_service/common/layout.h"
#include "cpu_optimizer_service/common/system/chrome_trace_writer.h"

namespace ballast::client::cli {

// "arrived", "summed", ...; "" for an unknown kind.
std::string Name(v1::TraceEventKind kind);

// False for an event of a newer service, which this client cannot show.
bool KnowsKind(const v1::TraceEvent& event);

// For an event of a known kind. INVALID_ARGUMENT if it ends before it begins, or if its kind has a
// chunk and the layout does not have that chunk.
absl::Status CheckEvent(const v1::TraceEvent& event, const Layout& layout);

// Whether the weights of two chunks were sent in one message. Both events are SENT and have passed
// CheckEvent.
bool SentTogether(const v1::TraceEvent& a, const v1::TraceEvent& b, const Layout& layout);

// Events are added in order of begin_ns, after CheckEvent.
class ChromeTrace {
 public:
  // `layout` is the job's, and outlives it.
  ChromeTrace(std::string job, const Layout& layout);

  std::string Head() const { return writer_.Head(); }
  std::string Add(const v1::TraceEvent& event);
  std::string Tail(uint64_t dropped_events);
  // In the file so far, without the descriptions of its tracks. A step has more events than the
  // service sends. The weights of a message are one.
  int64_t events() const { return events_; }

 private:
  using Json = ChromeTraceWriter::Json;

  // In the displayed order.
  enum class TrackKind { kSteps, kThread, kRank };
  using Track = std::pair<TrackKind, int64_t>;  // The kind, and the number of the thread or rank.

  // The track's number in the file. Describes a new track in `text`.
  int TrackNumber(const Track& track, std::string& text);
  void AppendSlice(int track, const ChromeTraceWriter::Event& event, std::string& text);
  void AppendStep(const v1::TraceEvent& event, std::string& text);
  void AppendChunk(const v1::TraceEvent& event, std::string& text);
  // Weights sent in one message are one event.
  void AppendSent(std::string& text);
  std::string FirstParameter(int chunk) const;

  const std::string job_;
  const Layout& layout_;
  const ChromeTraceWriter writer_;
  int64_t events_ = 0;
  std::map<Track, int> tracks_;       // Their numbers in the file.
  v1::TraceEvent begun_;              // The latest BEGUN.
  std::vector<v1::TraceEvent> sent_;  // SENT events of one message, not written yet.
};

}  // namespace ballast::client::cli

#endif  // BALLAST_CLIENT_CLI_CHROME_TRACE_H_
