#include "server/status/state_json.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <future>
#include <memory>
#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/status.h"

namespace ballast::server {
namespace {

using nlohmann::json;

constexpr size_t kMostParameters = 200;
constexpr size_t kMostEvents = 20000;
// A browser waits for the answer, on one of a few threads.
constexpr std::chrono::seconds kSnapshotPatience{3};

json ParameterJson(const Job& job, int index) {
  const ParameterSpec& spec = job.spec().layout.parameters[index];
  return {{"name", spec.name},
          {"shape", spec.shape},
          {"group", job.spec().groups[spec.group].name},
          {"trainable", spec.trainable},
          {"elements", job.layout().place(index).elements}};
}

absl::StatusOr<Snapshot> TakeSnapshotSoon(Job& job, int parameter) {
  // Shared, because the thread that sets it may still be in set_value when this one goes on.
  const auto taken = std::make_shared<std::promise<absl::StatusOr<Snapshot>>>();
  std::future<absl::StatusOr<Snapshot>> result = taken->get_future();
  const Pending pending = job.TakeSnapshot({parameter}, [taken](absl::StatusOr<Snapshot> snapshot) {
    taken->set_value(std::move(snapshot));
  });
  if (result.wait_for(kSnapshotPatience) != std::future_status::ready) pending.Cancel();
  // Cancelled, it has been answered, or it is being answered now.
  absl::StatusOr<Snapshot> snapshot = result.get();
  if (absl::IsCancelled(snapshot.status())) {
    return absl::UnavailableError(absl::StrCat("job ", job.spec().name,
                                               " did not stand still within ",
                                               kSnapshotPatience.count(), " s; try again"));
  }
  return snapshot;
}

const char* NameOf(TraceEventKind kind) {
  switch (kind) {
    case TraceEventKind::kArrived:
      return "arrived";
    case TraceEventKind::kSummed:
      return "summed";
    case TraceEventKind::kSpeculated:
      return "speculated";
    case TraceEventKind::kDecided:
      return "decided";
    case TraceEventKind::kUpdated:
      return "updated";
    case TraceEventKind::kSent:
      return "sent";
    case TraceEventKind::kCommitted:
      return "committed";
    case TraceEventKind::kBegun:
      return "begun";
  }
  return "other";
}

}  // namespace

json ParametersJson(const Job& job, const std::string& match) {
  const std::vector<ParameterSpec>& parameters = job.spec().layout.parameters;
  json found = json::array();
  size_t matches = 0;
  for (size_t p = 0; p < parameters.size(); ++p) {
    if (!absl::StrContains(parameters[p].name, match)) continue;
    if (++matches <= kMostParameters) found.push_back(ParameterJson(job, static_cast<int>(p)));
  }
  return {{"parameters", std::move(found)}, {"matches", matches}, {"all", parameters.size()}};
}

absl::StatusOr<json> DistributionJson(Job& job, const std::string& parameter) {
  const int index = job.layout().FindParameter(parameter);
  if (index < 0) {
    return absl::NotFoundError(absl::StrCat("job ", job.spec().name, " has no parameter '",
                                            parameter,
                                            "'; /api/parameters names those that it has"));
  }
  BALLAST_ASSIGN_OR_RETURN(const Snapshot snapshot, TakeSnapshotSoon(job, index));
  json to = ParameterJson(job, index);
  to["step"] = snapshot.step();
  to["update_count"] = snapshot.update_count(index);
  to["planes"] = json::array();
  // Of a frozen parameter the service has no state.
  if (!job.spec().layout.parameters[index].trainable) return to;
  for (const Plane plane :
       {Plane::kMaster, Plane::kExpAvg, Plane::kExpAvgSq, Plane::kMaxExpAvgSq}) {
    // The last plane is there with amsgrad only.
    if (!snapshot.has_plane(index, plane)) continue;
    const PlaneSummary summary =
        Summarize(snapshot, index, job.layout().place(index).elements, plane);
    // The first decade is that of PlaneSummary::magnitude_histogram.
    to["planes"].push_back({{"plane", Name(plane)},
                            {"norm", summary.norm},
                            {"mean", summary.mean},
                            {"min", summary.min},
                            {"max", summary.max},
                            {"zeros", summary.zeros},
                            {"non_finite", summary.non_finite},
                            {"first_decade", -12},
                            {"counts", summary.magnitude_histogram}});
  }
  return to;
}

absl::StatusOr<json> TimelineJson(Job& job, int patience_seconds) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(patience_seconds);
  BALLAST_ASSIGN_OR_RETURN(
      const Trace trace, job.TraceSteps(1, [&] { return std::chrono::steady_clock::now() < end; }));
  const auto committed = [](const TraceEvent& event) {
    return event.kind == TraceEventKind::kCommitted;
  };
  // TraceSteps also returns, with what there is, when the time is over or the job is closed.
  if (std::none_of(trace.events.begin(), trace.events.end(), committed)) {
    return absl::UnavailableError(absl::StrCat("no step of job ", job.spec().name,
                                               " began and was committed within ", patience_seconds,
                                               " s"));
  }
  // There is one: at least that of the commit.
  const int64_t origin = trace.events.front().begin_ns;
  const size_t kept = std::min(trace.events.size(), kMostEvents);
  json events = json::array();
  for (size_t i = 0; i < kept; ++i) {
    const TraceEvent& event = trace.events[i];
    // A row of columns: kind, thread, chunk, begin and end in microseconds.
    events.push_back({NameOf(event.kind), event.thread, event.chunk,
                      (event.begin_ns - origin) / 1000, (event.end_ns - origin) / 1000});
  }
  return json{{"step", trace.events.front().step},
              {"events", std::move(events)},
              {"dropped", trace.dropped_events + trace.events.size() - kept}};
}

}  // namespace ballast::server
