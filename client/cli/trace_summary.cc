#include "client/cli/trace_summary.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/cli/chrome_trace.h"
#include "client/cli/cli_text.h"
#include "cpu_optimizer_service/common/dtype.h"

namespace ballast::client::cli {
namespace {

constexpr double kUnknown = std::numeric_limits<double>::quiet_NaN();

double Milliseconds(int64_t ns) { return static_cast<double>(ns) / 1e6; }

double SinceBegun(const TracedStep& step, int64_t ns) {
  return step.begun_ns == 0 || ns == 0 ? kUnknown : Milliseconds(ns - step.begun_ns);
}

double MegabytesPerSecond(int64_t bytes, int64_t busy_ns) {
  if (bytes == 0 || busy_ns == 0) return kUnknown;
  // Bytes a nanosecond are GB/s.
  return static_cast<double>(bytes) / static_cast<double>(busy_ns) * 1e3;
}

std::string Cell(double value, int decimals) {
  if (std::isnan(value)) return "-";
  return absl::StrFormat("%.*f", decimals, value);
}

// The names of the busy times, in the table and in JSON.
struct BusyKind {
  v1::TraceEventKind kind;
  const char* title;
  const char* field;
};
constexpr BusyKind kBusyKinds[] = {
    {v1::ARRIVED, "arriving", "arriving_ms"},          {v1::SUMMED, "summing", "summing_ms"},
    {v1::SPECULATED, "speculating", "speculating_ms"}, {v1::DECIDED, "deciding", "deciding_ms"},
    {v1::UPDATED, "updating", "updating_ms"},          {v1::SENT, "sending", "sending_ms"}};

}  // namespace

bool TraceSummary::ThroughChannel(int rank) const {
  return rank >= static_cast<int>(shares_memory_.size()) || !shares_memory_[rank];
}

TracedStep& TraceSummary::StepOf(const v1::TraceEvent& event) {
  // The search goes from the end: an event belongs to the latest attempt at its step.
  const auto latest = std::find_if(steps_.rbegin(), steps_.rend(), [&](const TracedStep& step) {
    return step.step == event.step();
  });
  // A step that begins again was aborted: its next attempt has the same number and a row of its
  // own.
  if (event.kind() != v1::BEGUN && latest != steps_.rend()) return *latest;
  // A step that had begun before the trace comes here, too: its row has no begin.
  return steps_.emplace_back(TracedStep{.step = event.step()});
}

bool TraceSummary::InLastMessage(const v1::TraceEvent& sent) const {
  return last_sent_.kind() == v1::SENT && SentTogether(last_sent_, sent, layout_);
}

void TraceSummary::Add(const v1::TraceEvent& event) {
  TracedStep& step = StepOf(event);
  if (event.kind() != v1::SENT || !InLastMessage(event)) {
    step.busy_ns[event.kind()] += event.end_ns() - event.begin_ns();
  }
  if (event.kind() == v1::SENT) last_sent_ = event;
  if (event.kind() == v1::BEGUN) step.begun_ns = event.begin_ns();
  if (event.kind() == v1::DECIDED) step.decided_ns = event.end_ns();
  if (event.kind() == v1::COMMITTED) step.committed_ns = event.end_ns();
  if (event.kind() != v1::ARRIVED && event.kind() != v1::SENT) return;
  const Chunk& chunk = layout_.chunks()[event.chunk()];
  if (!ThroughChannel(chunk.rank)) return;
  const GroupSpec& group = spec_.groups[chunk.group];
  if (event.kind() == v1::ARRIVED) {
    step.arrived_bytes += chunk.elements * SizeBytes(group.wire_dtype);
  } else {
    step.sent_bytes += chunk.elements * SizeBytes(group.return_dtype);
  }
}

int64_t TraceSummary::begun() const {
  return std::count_if(steps_.begin(), steps_.end(),
                       [](const TracedStep& step) { return step.begun_ns != 0; });
}

int64_t TraceSummary::committed() const {
  return std::count_if(steps_.begin(), steps_.end(),
                       [](const TracedStep& step) { return step.committed_ns != 0; });
}

std::string TraceSummary::Text() const {
  std::vector<Table::Column> columns = {
      {"step", kRight}, {"decided", kRight}, {"committed", kRight}};
  for (const BusyKind& busy : kBusyKinds) columns.push_back({busy.title, kRight});
  columns.push_back({"MB/s in", kRight});
  columns.push_back({"MB/s out", kRight});
  Table table(std::move(columns));
  for (const TracedStep& step : steps_) {
    std::vector<std::string> cells = {absl::StrCat(step.step),
                                      Cell(SinceBegun(step, step.decided_ns), 1),
                                      Cell(SinceBegun(step, step.committed_ns), 1)};
    for (const BusyKind& busy : kBusyKinds) {
      cells.push_back(Cell(Milliseconds(step.busy_ns[busy.kind]), 1));
    }
    cells.push_back(Cell(MegabytesPerSecond(step.arrived_bytes, step.busy_ns[v1::ARRIVED]), 0));
    cells.push_back(Cell(MegabytesPerSecond(step.sent_bytes, step.busy_ns[v1::SENT]), 0));
    table.Add(std::move(cells));
  }
  return table.ToString();
}

nlohmann::ordered_json TraceSummary::ToJson() const {
  nlohmann::ordered_json steps = nlohmann::ordered_json::array();
  for (const TracedStep& step : steps_) {
    nlohmann::ordered_json row = {{"step", step.step},
                                  {"decided_ms", SinceBegun(step, step.decided_ns)},
                                  {"committed_ms", SinceBegun(step, step.committed_ns)}};
    for (const BusyKind& busy : kBusyKinds) row[busy.field] = Milliseconds(step.busy_ns[busy.kind]);
    row["arrived_bytes"] = step.arrived_bytes;
    row["sent_bytes"] = step.sent_bytes;
    steps.push_back(std::move(row));
  }
  return steps;
}

}  // namespace ballast::client::cli
