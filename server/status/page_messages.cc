#include "server/status/page_messages.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <future>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "cpu_optimizer_service/common/status.h"
#include "cpu_optimizer_service/common/system/version.h"
#include "cpu_optimizer_service/kernels/kernels.h"
#include "proto/convert.h"
#include "proto/message_json.h"
#include "server/find_job.h"
#include "server/jobs/job_message.h"
#include "server/jobs/state_service.h"
#include "server/jobs/trace_message.h"

namespace ballast::server {
namespace {

using std::chrono::steady_clock;

constexpr int kMostRanks = 256;
constexpr int kMostGroups = 256;
constexpr int kMostAwaited = 17;  // In the list of jobs, which names 16.
constexpr int kNormsAtAGlance = 48;
constexpr int kMostParameters = 200;
constexpr int kMostEvents = 20000;
// A browser waits for the answer, on one of a few threads.
constexpr std::chrono::seconds kSnapshotPatience{3};

template <typename Message>
void Keep(int from, int most, google::protobuf::RepeatedPtrField<Message>& list) {
  if (list.size() > most) list.DeleteSubrange(from, list.size() - most);
}

// Awaited ranks come first. Returns how many they are.
int AwaitedFirst(v1::Job& job) {
  auto& ranks = *job.mutable_ranks();
  const auto others = std::stable_partition(
      ranks.pointer_begin(), ranks.pointer_end(), [&job](const v1::RankProgress* rank) {
        return job.seconds_since_first_seal() > 0 &&
               !(job.phase() == v1::VOTING ? rank->voted() : rank->sealed());
      });
  return static_cast<int>(others - ranks.pointer_begin());
}

void KeepWhatIsShown(int steps, v1::Job& job) {
  job.clear_trainer_state();
  Keep(kMostGroups, kMostGroups, *job.mutable_groups());
  Keep(0, steps, *job.mutable_recent_steps());
  for (v1::StepRecord& step : *job.mutable_recent_steps()) {
    step.clear_hyper_parameters();
    step.clear_multipliers();
    step.clear_unused_parameters();
    step.mutable_voted()->clear_multipliers();
  }
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

}  // namespace

v1::ServiceDescription ProcessMessage(const Engine& engine, const Server& server,
                                      const ServiceHistory& history) {
  v1::ServiceDescription message;
  const ProcessFacts facts = ReadProcessFacts();
  message.set_version(BallastVersion());
  message.set_instance_id(engine.instance_id());
  message.set_process_id(getpid());
  message.set_start_time_seconds(facts.start_time_seconds);
  message.set_kernel(KernelTarget());
  for (const std::string& address : server.addresses()) message.add_addresses(address);
  message.set_cluster(server.ClusterLine());
  message.set_ready(server.serving());
  message.set_child_deaths(static_cast<int64_t>(history.deaths));
  message.set_resident_bytes(facts.resident_bytes);
  message.set_update_threads(engine.tasks().threads());
  message.set_update_busy_seconds(engine.tasks().use().busy_seconds);
  return message;
}

v1::ListJobsResponse JobsMessage(const Engine& engine, const Viewer& viewer) {
  v1::ListJobsResponse message;
  message.set_instance_id(engine.instance_id());
  message.set_memory_used_bytes(engine.memory().used_bytes());
  message.set_memory_limit_bytes(engine.memory().limit_bytes());
  for (const std::shared_ptr<Job>& job : engine.ListJobs()) {
    if (!MaySee(viewer, *job)) continue;
    v1::Job& glance = *message.add_jobs() = ToMessage(engine, *job, /*with_parameters=*/false);
    const int awaited = AwaitedFirst(glance);
    Keep(std::min(awaited, kMostAwaited), std::min(awaited, kMostAwaited), *glance.mutable_ranks());
    KeepWhatIsShown(kNormsAtAGlance, glance);
  }
  // Of jobs that are being created, too, which are in no other list; all those of no job only where
  // the viewer may look at all jobs.
  for (const Activity& activity : engine.ListActivities()) {
    if (viewer.has_value() && !viewer->MayUse(activity.job)) continue;
    *message.add_activities() = proto::ToProto(activity);
  }
  return message;
}

v1::Job JobMessage(const Engine& engine, const Job& job) {
  v1::Job message = ToMessage(engine, job, /*with_parameters=*/false);
  AddFoundCheckpoint(engine, job, message);
  AwaitedFirst(message);
  Keep(kMostRanks, kMostRanks, *message.mutable_ranks());
  KeepWhatIsShown(1, message);
  return message;
}

absl::StatusOr<std::string> ParametersJson(const Job& job, const std::string& match) {
  std::vector<std::string> found;
  int64_t matches = 0;
  for (const ParameterSpec& parameter : job.spec().layout.parameters) {
    if (!absl::StrContains(parameter.name, match) || ++matches > kMostParameters) continue;
    v1::Parameter message;
    message.set_name(proto::ParameterName(job.spec().name, parameter.name));
    message.mutable_shape()->Add(parameter.shape.begin(), parameter.shape.end());
    message.set_group(parameter.group);
    message.set_trainable(parameter.trainable);
    BALLAST_ASSIGN_OR_RETURN(found.emplace_back(), proto::ToJson(message));
  }
  return absl::StrCat("{\"parameters\": [", absl::StrJoin(found, ","), "], \"matches\": ", matches,
                      "}\n");
}

absl::StatusOr<v1::StateSummary> SummaryMessage(std::shared_ptr<Job> job,
                                                const std::string& parameter) {
  const int index = job->layout().FindParameter(parameter);
  if (index < 0) {
    return absl::NotFoundError(absl::StrCat("job ", job->spec().name, " has no parameter '",
                                            parameter,
                                            "'; /api/parameters names those that it has"));
  }
  BALLAST_ASSIGN_OR_RETURN(const Snapshot snapshot, TakeSnapshotSoon(*job, index));
  return SummaryOf({.job = std::move(job), .index = index}, snapshot);
}

absl::StatusOr<v1::TraceJobResponse> TraceMessage(std::shared_ptr<Job> job, int patience_seconds) {
  const auto end = steady_clock::now() + std::chrono::seconds(patience_seconds);
  BALLAST_ASSIGN_OR_RETURN(Trace trace,
                           job->TraceSteps(1, [&] { return steady_clock::now() < end; }));
  // TraceSteps also returns, with what there is, when the time is over or the job is closed.
  if (std::none_of(trace.events.begin(), trace.events.end(), [](const TraceEvent& event) {
        return event.kind == TraceEventKind::kCommitted;
      })) {
    return absl::UnavailableError(absl::StrCat("no step of job ", job->spec().name,
                                               " began and was committed within ", patience_seconds,
                                               " s"));
  }
  v1::TraceJobResponse all;
  TraceMessages messages(std::move(job), std::move(trace));
  for (v1::TraceJobResponse part; messages.Next(part); part.Clear()) all.MergeFrom(part);
  const int left_out = std::max(all.events_size() - kMostEvents, 0);
  Keep(kMostEvents, kMostEvents, *all.mutable_events());
  all.set_dropped_events(all.dropped_events() + left_out);
  return all;
}

}  // namespace ballast::server
