#include "server/status/job_json.h"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "cpu_optimizer_service/common/system/version.h"
#include "cpu_optimizer_service/kernels/kernels.h"
#include "server/status/process_facts.h"

namespace ballast::server {
namespace {

using nlohmann::json;

// What the page shows of large jobs: those that others wait for come first.
constexpr size_t kMostRanks = 256;
constexpr size_t kMostGroups = 256;
constexpr size_t kMostAwaited = 16;
constexpr size_t kNormsAtAGlance = 48;

// Microseconds are enough for a chart, and a third of the digits.
double Rounded(double seconds) { return std::round(seconds * 1e6) / 1e6; }

json OrNull(const std::optional<double>& seconds) {
  return seconds.has_value() ? json(Rounded(*seconds)) : json();
}

json MemoryJson(const JobStatus& status) {
  return {{"state", status.memory.state_bytes},
          {"gradients", status.memory.gradient_bytes},
          {"accumulators", status.memory.accumulator_bytes},
          {"second_versions", status.memory.speculation_bytes},
          {"previous_versions", status.memory.previous_bytes},
          {"other", status.memory.other_bytes},
          {"shared", status.rank_memory_bytes}};
}

json RankJson(int rank, const RankProgress& progress, bool awaited) {
  return {{"rank", rank},
          {"attached", progress.attached},
          {"awaited", awaited},
          {"process", progress.process_id},
          {"begun", progress.begun},
          {"attempt", progress.attempt},
          {"micro_steps_ended", progress.micro_steps_ended},
          {"sealed", progress.sealed},
          {"chunks", progress.chunks},
          {"chunks_complete", progress.chunks_complete},
          {"missing_parameters", progress.missing_parameters},
          {"shared_memory", progress.shared_memory}};
}

json RanksJson(const JobStatus& status) {
  std::vector<bool> awaited(status.ranks.size());
  // Awaited ranks come first, others fill the room that is left; then all are in their order again.
  std::vector<int> order = AwaitedRanks(status);
  for (const int rank : order) awaited[rank] = true;
  for (int rank = 0; rank < static_cast<int>(awaited.size()); ++rank) {
    if (order.size() >= kMostRanks) break;
    if (!awaited[rank]) order.push_back(rank);
  }
  order.resize(std::min(order.size(), kMostRanks));
  std::sort(order.begin(), order.end());
  json ranks = json::array();
  for (const int rank : order) ranks.push_back(RankJson(rank, status.ranks[rank], awaited[rank]));
  return ranks;
}

json SavesJson(const JobStatus& status) {
  json saves = json::array();
  for (const SaveProgress& save : status.saves) {
    saves.push_back({{"directory", save.directory},
                     {"step", save.step},
                     {"seconds", Rounded(save.seconds)},
                     {"seconds_since_progress", Rounded(save.seconds_since_progress)},
                     {"written_bytes", save.written_bytes},
                     {"size_bytes", save.size_bytes},
                     {"holds_back_decisions", save.holds_back_decisions},
                     {"makes_memory", save.makes_memory}});
  }
  return saves;
}

json ActivityJson(const Activity& activity) {
  return {{"job", activity.job},
          {"line", ToLine(activity)},
          {"done", activity.done_bytes},
          {"total", activity.total_bytes}};
}

json ActivitiesJson(const std::vector<Activity>& activities) {
  json all = json::array();
  for (const Activity& activity : activities) all.push_back(ActivityJson(activity));
  return all;
}

json GroupJson(const Job& job, const JobStatus& status, size_t group) {
  const GroupSpec& spec = job.spec().groups[group];
  const HyperParameters& values = status.hyper_parameters[group];
  return {{"name", spec.name},
          {"wire_dtype", Name(spec.wire_dtype)},
          {"return_dtype", Name(spec.return_dtype)},
          {"lr", values.lr},
          {"beta1", values.beta1},
          {"beta2", values.beta2},
          {"eps", values.eps},
          {"weight_decay", values.weight_decay},
          {"decoupled_weight_decay", values.decoupled_weight_decay},
          {"bias_correction", values.bias_correction},
          {"amsgrad", values.amsgrad},
          {"maximize", values.maximize},
          {"parameters", 0},
          {"elements", 0}};
}

json GroupsJson(const Job& job, const JobStatus& status) {
  json groups = json::array();
  for (size_t group = 0; group < std::min(job.spec().groups.size(), kMostGroups); ++group) {
    groups.push_back(GroupJson(job, status, group));
  }
  std::vector<int64_t> parameters(job.spec().groups.size());
  std::vector<int64_t> elements(job.spec().groups.size());
  for (size_t p = 0; p < job.spec().layout.parameters.size(); ++p) {
    const ParameterSpec& parameter = job.spec().layout.parameters[p];
    ++parameters[parameter.group];
    // Of a frozen parameter the service has no elements (layout.h).
    if (parameter.trainable) {
      elements[parameter.group] += job.layout().place(static_cast<int>(p)).elements;
    }
  }
  for (size_t group = 0; group < groups.size(); ++group) {
    groups[group]["parameters"] = parameters[group];
    groups[group]["elements"] = elements[group];
  }
  return groups;
}

json CheckpointJson(const Engine& engine, const Job& job) {
  if (engine.checkpoints() == nullptr) return nullptr;
  const auto found = engine.checkpoints()->Find(job.spec().name);
  if (!found.has_value()) return nullptr;
  const CheckpointDirectory::Total total = engine.checkpoints()->TotalOf(job.spec().name);
  return {{"directory", found->directory},
          {"step", found->step},
          {"of_this_job", found->uid == job.uid()},
          {"all", total.checkpoints},
          {"all_bytes", total.bytes}};
}

// What the list of jobs and a job's own page have in common.
json GlanceJson(const Job& job, const JobStatus& status) {
  std::vector<int> awaited = AwaitedRanks(status);
  const size_t awaited_ranks = awaited.size();
  // How many there are in all is in awaited_ranks.
  awaited.resize(std::min(awaited.size(), kMostAwaited));
  const auto attached = std::count_if(status.ranks.begin(), status.ranks.end(),
                                      [](const RankProgress& rank) { return rank.attached; });
  return {{"name", job.spec().name},
          {"uid", job.uid()},
          {"phase", NameOf(status.phase)},
          {"problem", status.problem},
          {"generation", ToString(status.generation)},
          {"committed_step", status.committed_step},
          {"applied_steps", status.applied_steps},
          {"skipped_steps", status.skipped_steps},
          {"clipped_steps", status.statistics.clipped_steps},
          {"world_size", status.ranks.size()},
          {"attached", attached},
          {"awaited", awaited},
          {"awaited_ranks", awaited_ranks},
          {"seconds_open", OrNull(status.seconds_open)},
          {"seconds_since_first_seal", OrNull(status.seconds_since_first_seal)},
          {"memory_bytes", status.memory.total_bytes() + status.rank_memory_bytes},
          {"last_step_seconds", status.recent_steps.empty()
                                    ? json()
                                    : json(Rounded(status.recent_steps.back().times.total()))},
          {"saves", SavesJson(status)},
          {"activities", ActivitiesJson(status.activities)}};
}

}  // namespace

json ServiceJson(const Engine& engine, const Server& server, const ServiceHistory& history,
                 const Viewer& viewer) {
  const ProcessFacts facts = ReadProcessFacts();
  const TaskPool::Use use = engine.tasks().use();
  json jobs = json::array();
  for (const std::shared_ptr<Job>& job : engine.ListJobs()) {
    if (!MaySee(viewer, *job)) continue;
    const JobStatus status = job->Status();
    json& glance = jobs.emplace_back(GlanceJson(*job, status));
    json norms = json::array();
    const size_t steps = status.recent_steps.size();
    for (size_t i = steps - std::min(steps, kNormsAtAGlance); i < steps; ++i) {
      norms.push_back(status.recent_steps[i].outcome.decision.norm);
    }
    glance["norms"] = std::move(norms);
  }
  // Of jobs that are being created, too, which are in no other list; all those of no job only where
  // the viewer may look at all jobs.
  json activities = json::array();
  for (const Activity& activity : engine.ListActivities()) {
    if (viewer.has_value() && !viewer->MayUse(activity.job)) continue;
    activities.push_back(ActivityJson(activity));
  }
  return {{"version", BallastVersion()},
          {"activities", std::move(activities)},
          {"kernel", KernelTarget()},
          {"instance", engine.instance_id()},
          {"process", getpid()},
          {"started", facts.start_time_seconds},
          {"deaths", history.deaths},
          {"ready", server.serving()},
          {"addresses", server.addresses()},
          {"resident_bytes", facts.resident_bytes},
          {"cpu_seconds", facts.cpu_seconds},
          {"memory",
           {{"limit", engine.memory().limit_bytes()}, {"used", engine.memory().used_bytes()}}},
          {"updates",
           {{"threads", engine.tasks().threads()},
            {"tasks", use.tasks},
            {"busy_seconds", Rounded(use.busy_seconds)}}},
          {"checkpoint_directory",
           engine.checkpoints() == nullptr ? json() : json(engine.checkpoints()->path())},
          {"jobs", std::move(jobs)}};
}

json JobJson(const Engine& engine, const Job& job) {
  // One copy, made under the job's lock: all that is taken from it is of one instant.
  const JobStatus status = job.Status();
  json to = GlanceJson(job, status);
  to["max_norm"] = status.recent_steps.empty() ? 0 : status.recent_steps.back().voted.max_norm;
  to["parameters"] = job.spec().layout.parameters.size();
  to["chunks"] = job.layout().chunks().size();
  to["memory"] = MemoryJson(status);
  to["ranks"] = RanksJson(status);
  to["groups"] = GroupsJson(job, status);
  to["traffic"] = {{"gradients", status.traffic.gradient_bytes_in_messages},
                   {"gradients_shared", status.traffic.gradient_bytes_in_place},
                   {"weights", status.traffic.weight_bytes_in_messages},
                   {"weights_shared", status.traffic.weight_bytes_in_place}};
  to["speculation"] = {{"asked", job.spec().update_mode == UpdateMode::kSpeculate},
                       {"refused", status.speculation_refused},
                       {"speculated", status.speculation.speculated},
                       {"published", status.speculation.published},
                       {"redone", status.speculation.redone},
                       {"paused", status.speculation_paused}};
  to["checkpoint"] = CheckpointJson(engine, job);
  return to;
}

}  // namespace ballast::server
