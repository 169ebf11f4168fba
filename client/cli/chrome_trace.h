// The events of a trace as the JSON that ui.perfetto.dev and chrome://tracing open: one process for
// the job, a track for its steps, one for each thread of the service, and one for each rank that
// weights are sent to. Times are the service's CLOCK_MONOTONIC in microseconds.
//
//   ChromeTrace trace(job, layout);
//   file.Append(trace.Head());
//   for (event : events) file.Append(trace.Add(event));
//   file.Append(trace.Tail(dropped_events));
#ifndef BALLAST_CLIENT_CLI_CHROME_TRACE_H_
#define BALLAST_CLIENT_CLI_CHROME_TRACE_H_

#include <cstdint>
#include <map>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "ballast/v1/ballast.pb.h"
#include "cpu_optimizer_service/common/layout.h"

namespace ballast::client::cli {

// "arrived", "summed", ...; "" for a kind that is not known.
std::string Name(v1::TraceEventKind kind);

// False for an event of a newer service, which this client cannot show.
bool KnowsKind(const v1::TraceEvent& event);

// Of an event whose kind is known: INVALID_ARGUMENT unless it has a chunk of the layout if its kind
// has one, and does not end before it begins.
absl::Status CheckEvent(const v1::TraceEvent& event, const Layout& layout);

// Whether the weights of two chunks went in one message. Both have passed CheckEvent and are SENT.
bool SentTogether(const v1::TraceEvent& a, const v1::TraceEvent& b, const Layout& layout);

// What is given to Add has passed CheckEvent, and comes in order of begin_ns.
class ChromeTrace {
 public:
  // `layout` is the job's, and outlives it.
  ChromeTrace(std::string job, const Layout& layout);

  std::string Head() const;
  std::string Add(const v1::TraceEvent& event);
  std::string Tail(uint64_t dropped_events);

 private:
  using Json = nlohmann::ordered_json;

  // In the order in which they are shown.
  enum class TrackKind { kSteps, kThread, kRank };
  using Track = std::pair<TrackKind, int64_t>;  // With the number of the thread or rank.

  // Adds it to `text`, and before it the name of a track that is new.
  void AppendOn(const Track& track, Json event, std::string& text);
  void AppendInstant(const v1::TraceEvent& event, const std::string& what, int64_t at_ns,
                     std::string& text);
  void AppendStep(const v1::TraceEvent& event, std::string& text);
  void AppendChunk(const v1::TraceEvent& event, std::string& text);
  // Weights that went in one message are one event.
  void AppendSent(std::string& text);
  std::string FirstParameter(int chunk) const;

  const std::string job_;
  const Layout& layout_;
  std::map<Track, int> tracks_;       // And their numbers in the file.
  v1::TraceEvent begun_;              // The latest.
  std::vector<v1::TraceEvent> sent_;  // In one message.
};

}  // namespace ballast::client::cli

#endif  // BALLAST_CLIENT_CLI_CHROME_TRACE_H_
