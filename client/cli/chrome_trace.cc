#include "client/cli/chrome_trace.h"

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
    return absl::InvalidArgumentError(
        absl::StrCat("an event ends ", event.begin_ns() - event.end_ns(), " ns before it begins"));
  }
  if (!HasChunk(event.kind())) return absl::OkStatus();
  if (event.chunk() < 0 || event.chunk() >= static_cast<int>(layout.chunks().size())) {
    return absl::InvalidArgumentError(absl::StrCat("an event names chunk ", event.chunk(),
                                                   ", but the job has ", layout.chunks().size(),
                                                   " chunks"));
  }
  return absl::OkStatus();
}

bool SentTogether(const v1::TraceEvent& a, const v1::TraceEvent& b, const Layout& layout) {
  return a.begin_ns() == b.begin_ns() && a.step() == b.step() &&
         layout.chunks()[a.chunk()].rank == layout.chunks()[b.chunk()].rank;
}

ChromeTrace::ChromeTrace(std::string job, const Layout& layout)
    : job_(std::move(job)),
      layout_(layout),
      writer_(kProcess, absl::StrCat("ballast job ", job_)) {}

std::string ChromeTrace::Add(const v1::TraceEvent& event) {
  std::string text;
  // SENT events are kept until one of another message comes: only then it is known which chunks the
  // message had.
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
  // The last message has no other one behind it that would end it.
  AppendSent(text);
  return text + ChromeTraceWriter::Tail({{"job", job_}, {"dropped_events", dropped_events}});
}

int ChromeTrace::TrackNumber(const Track& track, std::string& text) {
  int& number = tracks_[track];
  // 0: the map has just made the entry. Numbers begin at 1.
  if (number == 0) {
    number = static_cast<int>(tracks_.size());
    const std::string name = track.first == TrackKind::kSteps ? "steps"
                             : track.first == TrackKind::kThread
                                 ? absl::StrCat("service thread ", track.second)
                                 : absl::StrCat("sending to rank ", track.second);
    text += writer_.Track(number, name, static_cast<int>(track.first));
  }
  return number;
}

void ChromeTrace::AppendSlice(int track, const ChromeTraceWriter::Event& event, std::string& text) {
  text += writer_.Slice(track, event);
  ++events_;
}

void ChromeTrace::AppendStep(const v1::TraceEvent& event, std::string& text) {
  const int track = TrackNumber({TrackKind::kSteps, 0}, text);
  const Json arguments = {{"step", event.step()}};
  const auto slice = [&](const std::string& name, int64_t begin_ns) {
    AppendSlice(track,
                {.name = name,
                 .category = "step",
                 .begin_us = Microseconds(begin_ns),
                 .duration_us = Microseconds(event.end_ns() - begin_ns),
                 .arguments = arguments},
                text);
  };
  if (event.kind() == v1::BEGUN) begun_ = event;
  if (event.kind() == v1::DECIDED) {
    slice(absl::StrCat("deciding step ", event.step()), event.begin_ns());
  }
  // An attempt that was aborted has no end, and the next attempt has a beginning of its own.
  // A step that had begun before the trace has no BEGUN at all.
  const bool whole = begun_.kind() == v1::BEGUN && begun_.step() == event.step();
  if (event.kind() == v1::COMMITTED && whole) {
    slice(absl::StrCat("step ", event.step()), begun_.begin_ns());
  }
  const std::string what = Name(event.kind());
  text += writer_.Instant(track, {.name = absl::StrCat("step ", event.step(), " ", what),
                                  .category = what,
                                  .begin_us = Microseconds(event.end_ns()),
                                  .arguments = arguments});
  ++events_;
}

void ChromeTrace::AppendChunk(const v1::TraceEvent& event, std::string& text) {
  const int track = TrackNumber({TrackKind::kThread, event.thread()}, text);
  AppendSlice(track,
              {.name = absl::StrCat(Name(event.kind()), " chunk ", event.chunk()),
               .category = Name(event.kind()),
               .begin_us = Microseconds(event.begin_ns()),
               .duration_us = Microseconds(event.end_ns() - event.begin_ns()),
               .arguments = {{"step", event.step()},
                             {"chunk", event.chunk()},
                             {"rank", layout_.chunks()[event.chunk()].rank},
                             {"parameter", FirstParameter(event.chunk())}}},
              text);
}

void ChromeTrace::AppendSent(std::string& text) {
  if (sent_.empty()) return;
  const v1::TraceEvent& first = sent_.front();
  const int rank = layout_.chunks()[first.chunk()].rank;
  Json arguments = {{"step", first.step()},
                    {"chunk", first.chunk()},
                    {"rank", rank},
                    {"parameter", FirstParameter(first.chunk())},
                    {"thread", first.thread()}};
  if (sent_.size() > 1) {
    Json& chunks = arguments["chunks"] = Json::array();
    for (const v1::TraceEvent& event : sent_) chunks.push_back(event.chunk());
  }
  const int track = TrackNumber({TrackKind::kRank, rank}, text);
  AppendSlice(track,
              {.name = absl::StrCat("sent ", ChunkNames(sent_)),
               .category = "sent",
               .begin_us = Microseconds(first.begin_ns()),
               .duration_us = Microseconds(first.end_ns() - first.begin_ns()),
               .arguments = std::move(arguments)},
              text);
  sent_.clear();
}

std::string ChromeTrace::FirstParameter(int chunk) const {
  const std::vector<ChunkPiece> pieces = layout_.Pieces(chunk);
  return pieces.empty() ? "" : layout_.spec().parameters[pieces.front().parameter].name;
}

}  // namespace ballast::client::cli
