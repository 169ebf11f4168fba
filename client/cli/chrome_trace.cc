#include "client/cli/chrome_trace.h"

#include <nlohmann/json.hpp>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"

namespace ballast::client::cli {
namespace {

constexpr int kProcess = 1;

double Microseconds(int64_t ns) { return static_cast<double>(ns) / 1000; }

bool HasChunk(v1::TraceEventKind kind) {
  return kind != v1::BEGUN && kind != v1::DECIDED && kind != v1::COMMITTED;
}

// "chunk 7", "chunks 7 to 9", "7 chunks".
std::string ChunkNames(const std::vector<v1::TraceEvent>& events) {
  const int first = events.front().chunk();
  if (events.size() == 1) return absl::StrCat("chunk ", first);
  for (size_t i = 0; i < events.size(); ++i) {
    if (events[i].chunk() != first + static_cast<int>(i)) {
      return absl::StrCat(events.size(), " chunks");
    }
  }
  return absl::StrCat("chunks ", first, " to ", events.back().chunk());
}

// Names that are not UTF-8 are replaced.
std::string OneLine(const nlohmann::ordered_json& json) {
  return json.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
}

}  // namespace

std::string Name(v1::TraceEventKind kind) {
  return absl::AsciiStrToLower(v1::TraceEventKind_Name(kind));
}

bool KnowsKind(const v1::TraceEvent& event) {
  return event.kind() != v1::TRACE_EVENT_KIND_UNSPECIFIED &&
         v1::TraceEventKind_IsValid(event.kind());
}

absl::Status CheckEvent(const v1::TraceEvent& event, const Layout& layout) {
  if (event.end_ns() < event.begin_ns()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "an event that ends ", event.begin_ns() - event.end_ns(), " ns before it begins"));
  }
  if (!HasChunk(event.kind())) return absl::OkStatus();
  if (event.chunk() < 0 || event.chunk() >= static_cast<int>(layout.chunks().size())) {
    return absl::InvalidArgumentError(absl::StrCat("an event of chunk ", event.chunk(),
                                                   ", of a job that has ", layout.chunks().size()));
  }
  return absl::OkStatus();
}

bool SentTogether(const v1::TraceEvent& a, const v1::TraceEvent& b, const Layout& layout) {
  return a.begin_ns() == b.begin_ns() && a.step() == b.step() &&
         layout.chunks()[a.chunk()].rank == layout.chunks()[b.chunk()].rank;
}

ChromeTrace::ChromeTrace(std::string job, const Layout& layout)
    : job_(std::move(job)), layout_(layout) {}

std::string ChromeTrace::Head() const {
  const Json process = {{"name", "process_name"},
                        {"ph", "M"},
                        {"pid", kProcess},
                        {"args", {{"name", absl::StrCat("ballast job ", job_)}}}};
  return absl::StrCat("{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n", OneLine(process));
}

std::string ChromeTrace::Add(const v1::TraceEvent& event) {
  std::string text;
  const bool same_message =
      event.kind() == v1::SENT && !sent_.empty() && SentTogether(sent_.front(), event, layout_);
  if (!same_message) AppendSent(text);
  if (event.kind() == v1::SENT) {
    sent_.push_back(event);
  } else if (HasChunk(event.kind())) {
    AppendChunk(event, text);
  } else {
    AppendStep(event, text);
  }
  return text;
}

std::string ChromeTrace::Tail(uint64_t dropped_events) {
  std::string text;
  AppendSent(text);
  return absl::StrCat(text, "\n],\"otherData\":",
                      OneLine({{"job", job_}, {"dropped_events", dropped_events}}), "}\n");
}

void ChromeTrace::AppendOn(const Track& track, Json event, std::string& text) {
  int& number = tracks_[track];
  if (number == 0) {
    number = static_cast<int>(tracks_.size());
    const auto describe = [&](const char* what, Json args) {
      const Json line = {{"name", what},
                         {"ph", "M"},
                         {"pid", kProcess},
                         {"tid", number},
                         {"args", std::move(args)}};
      absl::StrAppend(&text, ",\n", OneLine(line));
    };
    const std::string name = track.first == TrackKind::kSteps ? "steps"
                             : track.first == TrackKind::kThread
                                 ? absl::StrCat("service thread ", track.second)
                                 : absl::StrCat("sending to rank ", track.second);
    describe("thread_name", {{"name", name}});
    describe("thread_sort_index", {{"sort_index", static_cast<int>(track.first)}});
  }
  event["pid"] = kProcess;
  event["tid"] = number;
  absl::StrAppend(&text, ",\n", OneLine(event));
}

void ChromeTrace::AppendInstant(const v1::TraceEvent& event, const std::string& what, int64_t at_ns,
                                std::string& text) {
  AppendOn({TrackKind::kSteps, 0},
           {{"name", absl::StrCat("step ", event.step(), " ", what)},
            {"cat", what},
            {"ph", "i"},
            {"s", "p"},  // A line through the whole process.
            {"ts", Microseconds(at_ns)},
            {"args", {{"step", event.step()}}}},
           text);
}

void ChromeTrace::AppendStep(const v1::TraceEvent& event, std::string& text) {
  const auto slice = [&](const std::string& name, int64_t begin_ns) {
    AppendOn({TrackKind::kSteps, 0},
             {{"name", name},
              {"cat", "step"},
              {"ph", "X"},
              {"ts", Microseconds(begin_ns)},
              {"dur", Microseconds(event.end_ns() - begin_ns)},
              {"args", {{"step", event.step()}}}},
             text);
  };
  if (event.kind() == v1::BEGUN) begun_ = event;
  if (event.kind() == v1::DECIDED) {
    slice(absl::StrCat("deciding step ", event.step()), event.begin_ns());
  }
  // An attempt that was aborted has no end, and the next has a beginning of its own.
  const bool whole = begun_.kind() == v1::BEGUN && begun_.step() == event.step();
  if (event.kind() == v1::COMMITTED && whole) {
    slice(absl::StrCat("step ", event.step()), begun_.begin_ns());
  }
  AppendInstant(event, Name(event.kind()), event.end_ns(), text);
}

void ChromeTrace::AppendChunk(const v1::TraceEvent& event, std::string& text) {
  AppendOn({TrackKind::kThread, event.thread()},
           {{"name", absl::StrCat(Name(event.kind()), " chunk ", event.chunk())},
            {"cat", Name(event.kind())},
            {"ph", "X"},
            {"ts", Microseconds(event.begin_ns())},
            {"dur", Microseconds(event.end_ns() - event.begin_ns())},
            {"args",
             {{"step", event.step()},
              {"chunk", event.chunk()},
              {"rank", layout_.chunks()[event.chunk()].rank},
              {"parameter", FirstParameter(event.chunk())}}}},
           text);
}

void ChromeTrace::AppendSent(std::string& text) {
  if (sent_.empty()) return;
  const v1::TraceEvent& first = sent_.front();
  const int rank = layout_.chunks()[first.chunk()].rank;
  Json args = {{"step", first.step()},
               {"chunk", first.chunk()},
               {"rank", rank},
               {"parameter", FirstParameter(first.chunk())},
               {"thread", first.thread()}};
  if (sent_.size() > 1) {
    Json& chunks = args["chunks"] = Json::array();
    for (const v1::TraceEvent& event : sent_) chunks.push_back(event.chunk());
  }
  AppendOn({TrackKind::kRank, rank},
           {{"name", absl::StrCat("sent ", ChunkNames(sent_))},
            {"cat", "sent"},
            {"ph", "X"},
            {"ts", Microseconds(first.begin_ns())},
            {"dur", Microseconds(first.end_ns() - first.begin_ns())},
            {"args", std::move(args)}},
           text);
  sent_.clear();
}

std::string ChromeTrace::FirstParameter(int chunk) const {
  const std::vector<ChunkPiece> pieces = layout_.Pieces(chunk);
  return pieces.empty() ? "" : layout_.spec().parameters[pieces.front().parameter].name;
}

}  // namespace ballast::client::cli
