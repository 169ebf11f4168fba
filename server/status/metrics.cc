#include "server/status/metrics.h"

#include <prometheus/metric_family.h>
#include <prometheus/text_serializer.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <ctime>
#include <deque>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "cpu_optimizer_service/common/system/version.h"
#include "cpu_optimizer_service/kernels/kernels.h"
#include "proto/status.h"
#include "server/jobs/job_message.h"
#include "server/listener.h"

namespace ballast::server {
namespace {

using prometheus::ClientMetric;
using prometheus::MetricType;
using Labels = std::vector<std::pair<std::string, std::string>>;

// A job may have thousands of groups, each of which would be series of its own.
constexpr size_t kMostLabelledGroups = 32;
constexpr size_t kMostLabelledMembers = 64;

const absl::Time kProgramStart = absl::Now();

int64_t Entries(const char* folder) {
  std::error_code ignored;
  return std::distance(std::filesystem::directory_iterator(folder, ignored), {});
}

// Families in the order of their first sample.
class Families {
 public:
  void Counter(const std::string& name, const char* help, const Labels& labels, double value) {
    Add(name, help, MetricType::Counter, labels).counter.value = value;
  }
  void Gauge(const std::string& name, const char* help, const Labels& labels, double value) {
    Add(name, help, MetricType::Gauge, labels).gauge.value = value;
  }
  void Histogram(const std::string& name, const char* help, const Labels& labels,
                 const DurationHistogram& durations) {
    ClientMetric::Histogram& to = Add(name, help, MetricType::Histogram, labels).histogram;
    to.sample_sum = durations.sum_seconds;
    for (size_t i = 0; i < durations.counts.size(); ++i) {
      // Ours are counts of each interval, and Prometheus' of all up to its bound.
      to.sample_count += durations.counts[i];
      if (i == DurationHistogram::kBounds.size()) break;  // The serializer adds +Inf.
      to.bucket.push_back(
          {.cumulative_count = to.sample_count, .upper_bound = DurationHistogram::kBounds[i]});
    }
  }

  std::string Text() const {
    // Named by its base: TextSerializer's own Serialize, which takes a stream, hides this one.
    return prometheus::TextSerializer().prometheus::Serializer::Serialize(
        {families_.begin(), families_.end()});
  }

 private:
  ClientMetric& Add(const std::string& name, const char* help, MetricType type,
                    const Labels& labels) {
    // The text format has all samples of a family together, and jobs come one after the other: so
    // each sample is put where its family is.
    const auto [found, is_new] = places_.try_emplace(name, families_.size());
    // A family's help is that of its first sample; others may leave it empty.
    if (is_new) families_.push_back({.name = name, .help = help, .type = type, .metric = {}});
    ClientMetric& metric = families_[found->second].metric.emplace_back();
    for (const auto& [label, value] : labels) metric.label.push_back({label, value});
    return metric;
  }

  std::deque<prometheus::MetricFamily> families_;
  std::map<std::string, size_t> places_;
};

const char* NameOfCause(SkipCause cause) {
  switch (cause) {
    case SkipCause::kOther:
      return "other";
    case SkipCause::kGradient:
      return "gradient";
    case SkipCause::kMultiplier:
      return "multiplier";
    case SkipCause::kState:
      return "state";
    case SkipCause::kAbandoned:
      return "abandoned";
    case SkipCause::kNotKept:
      return "not_kept";
  }
  return "other";
}

void AddProcess(Families& to) {
  const ProcessFacts facts = ReadProcessFacts();
  // Named as by Prometheus' own client libraries, where they have it, for ready-made dashboards.
  to.Counter("process_cpu_seconds_total", "User and system CPU time of the process.", {},
             facts.cpu_seconds);
  to.Gauge("process_start_time_seconds", "When the process started, since 1970.", {},
           facts.start_time_seconds);
  to.Gauge("process_resident_memory_bytes", "Resident memory of the process.", {},
           static_cast<double>(facts.resident_bytes));
  to.Gauge("process_virtual_memory_bytes", "Virtual memory of the process.", {},
           static_cast<double>(facts.virtual_bytes));
  to.Gauge("process_threads", "Threads of the process.", {}, static_cast<double>(facts.threads));
  to.Gauge("process_open_fds", "Open file descriptors.", {},
           static_cast<double>(facts.open_descriptors));
  to.Gauge("process_max_fds", "The most file descriptors that the process may open.", {},
           static_cast<double>(RaiseDescriptorLimit()));
}

void AddHistory(const ServiceHistory& history, Families& to) {
  to.Counter("ballast_child_deaths_total",
             "Processes of this service that have died, and whose jobs the next one took over.", {},
             static_cast<double>(history.deaths));
  to.Gauge("ballast_recovery_seconds", "What taking over jobs took when this process started.", {},
           history.recovery_seconds);
}

void AddService(const Engine& engine, const Server& server, Families& to) {
  to.Gauge("ballast_build_info", "1; which build this is.",
           {{"version", BallastVersion()}, {"kernel", KernelTarget()}}, 1);
  to.Gauge("ballast_ready", "1 while the service takes steps; 0 while it drains.", {},
           server.serving() ? 1 : 0);
  to.Gauge("ballast_memory_limit_bytes", "Memory for all jobs together.", {},
           static_cast<double>(engine.memory().limit_bytes()));
  to.Gauge("ballast_memory_used_bytes", "Memory that jobs have, or have reserved.", {},
           static_cast<double>(engine.memory().used_bytes()));
  for (const CallUse& use : server.calls()) {
    to.Gauge("ballast_calls", "Calls and streams in progress.", {{"kind", use.kind}},
             static_cast<double>(use.in_progress));
    to.Gauge("ballast_calls_limit", "The most of them; further ones are refused.",
             {{"kind", use.kind}}, static_cast<double>(use.most));
  }
  to.Gauge("ballast_update_threads", "Threads for sums and updates.", {}, engine.tasks().threads());
  const TaskPool::Use use = engine.tasks().use();
  to.Gauge("ballast_update_tasks", "Tasks of sums and updates that are queued or run.", {},
           static_cast<double>(use.tasks));
  to.Counter("ballast_update_busy_seconds_total", "Time that those threads were busy, together.",
             {}, use.busy_seconds);
  const auto errors = proto::ErrorCounts();
  // All of them from the start, at zero: a rate needs the sample before the first error. Code 0
  // is OK.
  for (size_t code = 1; code < errors.size(); ++code) {
    to.Counter("ballast_errors_total", "Calls and streams that the service ended with an error.",
               {{"code", absl::AsciiStrToLower(
                             absl::StatusCodeToString(static_cast<absl::StatusCode>(code)))}},
               static_cast<double>(errors[code]));
  }
  if (const int64_t expires = server.certificate_expires_unix_seconds(); expires != 0) {
    to.Gauge("ballast_tls_certificate_expiry_timestamp_seconds",
             "When the certificate in use expires, since 1970.", {}, static_cast<double>(expires));
  }
}

void AddSteps(const std::string& job, const JobStatus& status, Families& to) {
  const Labels of_job = {{"job_name", job}};
  const auto with = [&](const char* label, const char* value) {
    return Labels{{"job_name", job}, {label, value}};
  };
  to.Counter("ballast_steps_total", "Decided steps.", with("outcome", "applied"),
             static_cast<double>(status.applied_steps));
  to.Counter("ballast_steps_total", "", with("outcome", "skipped"),
             static_cast<double>(status.skipped_steps));
  const StepStatistics& statistics = status.statistics;
  for (size_t cause = 0; cause < kSkipCauses; ++cause) {
    to.Counter("ballast_skipped_steps_total",
               "Skipped steps by cause: a gradient was not finite, no multiplier was finite, the "
               "state would not have been; the ranks voted so; or the step could not be kept.",
               with("cause", NameOfCause(static_cast<SkipCause>(cause))),
               static_cast<double>(statistics.skips[cause]));
  }
  to.Counter("ballast_clipped_steps_total", "Applied steps whose gradient was clipped.", of_job,
             static_cast<double>(statistics.clipped_steps));
  to.Counter(
      "ballast_uncovered_steps_total",
      "Decided steps whose ledger lacked a contribution, but for those that could not be kept; "
      "not 0 is a bug.",
      of_job,
      static_cast<double>(status.applied_steps + status.skipped_steps -
                          statistics.not_kept_steps() - status.coverage_complete_steps));
  constexpr char kPart[] = "ballast_step_part_seconds";
  constexpr char kPartHelp[] =
      "Parts of decided steps: gathering, to the first seal; awaiting, to the last seal; deciding; "
      "updating, to the commit.";
  to.Histogram(kPart, kPartHelp, with("part", "gathering"), statistics.gathering);
  to.Histogram(kPart, kPartHelp, with("part", "awaiting"), statistics.awaiting);
  to.Histogram(kPart, kPartHelp, with("part", "deciding"), statistics.deciding);
  to.Histogram(kPart, kPartHelp, with("part", "updating"), statistics.updating);
  to.Gauge("ballast_committed_step", "The step that is committed.", of_job,
           static_cast<double>(status.committed_step));
  to.Gauge("ballast_generation", "Rises whenever all ranks do a step again.", of_job,
           static_cast<double>(status.generation.count));
  to.Gauge("ballast_generation_epoch", "Rises whenever the job's name gets another owner.", of_job,
           static_cast<double>(status.generation.epoch));
  // Before the first decided step these have no value, and 0 would be a wrong one.
  if (status.recent_steps.empty()) return;
  const StepRecord& last = status.recent_steps.back();
  to.Gauge("ballast_gradient_norm", "Norm of the last decided step's gradient.", of_job,
           last.outcome.decision.norm);
  to.Gauge("ballast_clip_coefficient", "What that gradient was multiplied by; 1: not clipped.",
           of_job, last.outcome.decision.clip_coefficient);
  to.Gauge("ballast_loss_scale", "Loss scale of the last decided step.", of_job, last.loss_scale);
}

// What ranks have told, and the norms of groups: all have a bounded number of series
// (job_history.h).
void AddReports(const Job& job, const JobStatus& status, Families& to) {
  const std::string& name = job.spec().name;
  const LatestReports& latest = status.latest;
  for (const auto& [number, value] : latest.numbers) {
    to.Gauge(
        "ballast_trainer_number",
        "What the trainer has given with its last step that gave it: loss, tokens a second, or "
        "what else it likes; at most 16 names.",
        {{"job_name", name}, {"name", number}}, value);
  }
  for (size_t group = 0; group < latest.group_norms.size(); ++group) {
    to.Gauge("ballast_group_gradient_norm",
             "Norm of the last decided step's gradient of a group; the first 16 groups.",
             {{"job_name", name}, {"group", job.spec().groups[group].name}},
             latest.group_norms[group]);
  }
  if (latest.slowest_rank < 0) return;
  to.Gauge("ballast_slowest_rank", "The rank that computed longest in the last decided step.",
           {{"job_name", name}}, latest.slowest_rank);
  for (const auto& [part, seconds] :
       {std::pair{"compute", latest.seconds.compute}, std::pair{"reduce", latest.seconds.reduce},
        std::pair{"send", latest.seconds.send}, std::pair{"wait", latest.seconds.wait}}) {
    to.Gauge("ballast_rank_seconds",
             "Where that rank's time went: compute; reduce, waiting for collectives; send, giving "
             "gradients; wait, for the decision and the weights.",
             {{"job_name", name}, {"part", part}}, seconds);
  }
}

void AddMemory(const std::string& job, const JobStatus& status, Families& to) {
  const std::array<std::pair<const char*, int64_t>, 7> kinds = {{
      {"state", status.memory.state_bytes},
      {"gradients", status.memory.gradient_bytes},
      {"accumulators", status.memory.accumulator_bytes},
      {"second_versions", status.memory.speculation_bytes},
      {"previous_versions", status.memory.previous_bytes},
      {"other", status.memory.other_bytes},
      {"shared", status.rank_memory_bytes},
  }};
  for (const auto& [kind, bytes] : kinds) {
    to.Gauge("ballast_job_memory_bytes", "Memory of a job by kind.",
             {{"job_name", job}, {"kind", kind}}, static_cast<double>(bytes));
  }
  const auto traffic = [&](const char* name, const char* help, int64_t in_messages,
                           int64_t in_place) {
    to.Counter(name, help, {{"job_name", job}, {"path", "stream"}},
               static_cast<double>(in_messages));
    to.Counter(name, help, {{"job_name", job}, {"path", "shared_memory"}},
               static_cast<double>(in_place));
  };
  traffic("ballast_gradient_bytes_total", "Gradients taken from ranks.",
          status.traffic.gradient_bytes_in_messages, status.traffic.gradient_bytes_in_place);
  traffic("ballast_weight_bytes_total", "Weights given to ranks after updates.",
          status.traffic.weight_bytes_in_messages, status.traffic.weight_bytes_in_place);
}

void AddSpeculation(const std::string& job, const JobStatus& status, Families& to) {
  const Labels of_job = {{"job_name", job}};
  to.Counter("ballast_speculated_chunks_total", "Updates of chunks before the decision.", of_job,
             static_cast<double>(status.speculation.speculated));
  to.Counter("ballast_published_chunks_total", "Those that became the chunk's state.", of_job,
             static_cast<double>(status.speculation.published));
  to.Counter("ballast_redone_chunks_total", "Those that were dropped and computed again.", of_job,
             static_cast<double>(status.speculation.redone));
  to.Gauge("ballast_paused_chunks", "Chunks that are not speculated for now.", of_job,
           static_cast<double>(status.speculation_paused));
  to.Gauge("ballast_speculation_refused", "1: the job was to speculate and has no memory for it.",
           of_job, status.speculation_refused.empty() ? 0 : 1);
}

void AddRanks(const std::string& name, const Job& job, const JobStatus& status, Families& to) {
  const Labels of_job = {{"job_name", name}};
  const absl::Span<const int> here = job.layout().ranks();
  const auto count = [&](auto is_so) {
    return static_cast<double>(std::count_if(here.begin(), here.end(),
                                             [&](int rank) { return is_so(status.ranks[rank]); }));
  };
  to.Gauge("ballast_ranks", "Ranks of the job whose home is this service.", of_job,
           static_cast<double>(here.size()));
  to.Gauge("ballast_ranks_attached", "Those that a process has.", of_job,
           count([](const RankProgress& rank) { return rank.attached; }));
  to.Gauge("ballast_members_without_link",
           "Other members of the job to which this service has no link; only its lead has any.",
           of_job,
           static_cast<double>(std::ranges::count_if(status.members, [](const MemberStatus& each) {
             return !each.is_linked && !each.problem.empty();
           })));
  for (size_t i = 0; i < std::min(status.members.size(), kMostLabelledMembers); ++i) {
    const MemberStatus& member = status.members[i];
    const Labels of_member = {{"job_name", name}, {"member", job.spec().members[i].address}};
    to.Gauge("ballast_member_awaited", "1: a load, a save or the step waits for this member.",
             of_member, member.waited_for ? 1 : 0);
    if (member.memory_bytes > 0) {
      to.Gauge("ballast_member_memory_bytes", "Of a member's part of a job; the lead knows all.",
               of_member, static_cast<double>(member.memory_bytes));
    }
    if (member.round_trip_seconds > 0) {
      to.Gauge("ballast_member_round_trip_seconds", "Of a message from the lead to this member.",
               of_member, member.round_trip_seconds);
    }
  }
  // Those that have not sealed the open step, once another one has, or have not voted on it, or are
  // to orthogonalize.
  const auto awaited = [&status](const RankProgress& rank) {
    return status.seconds_since_first_seal.has_value() &&
           (status.phase == JobPhase::kDirections ? rank.orthogonalizes
            : status.phase == JobPhase::kVoting   ? !rank.voted
                                                  : !rank.sealed);
  };
  to.Gauge("ballast_ranks_awaited", "Ranks that others, which have sealed, wait for.", of_job,
           count(awaited));
  to.Gauge("ballast_awaiting_seconds", "Since when they wait; 0: none waits.", of_job,
           status.seconds_since_first_seal.value_or(0));
  to.Gauge("ballast_step_open_seconds", "Since when the step in progress is open; 0: none is.",
           of_job, status.seconds_open.value_or(0));
}

// A checkpoint of this job in --checkpoint-dir also says when it was saved, to a process that has
// taken the job over.
void AddSaves(const Job& job, const JobStatus& status, const CheckpointDirectory* checkpoints,
              Families& to) {
  const std::string& name = job.spec().name;
  const Labels of_job = {{"job_name", name}};
  int64_t saved_unix_ms = status.save_counts.last_saved_unix_ms;
  if (const auto found = checkpoints == nullptr ? std::nullopt : checkpoints->Find(name)) {
    to.Gauge("ballast_checkpoint_step", "The step of the checkpoint in --checkpoint-dir.", of_job,
             static_cast<double>(found->step));
    // Not of another job that had the name before.
    if (found->uid == job.uid()) saved_unix_ms = std::max(saved_unix_ms, found->saved_unix_ms);
  }
  to.Counter("ballast_saves_total", "Saves that have ended, complete or not.",
             {{"job_name", name}, {"outcome", "complete"}},
             static_cast<double>(status.save_counts.complete));
  to.Counter("ballast_saves_total", "", {{"job_name", name}, {"outcome", "failed"}},
             static_cast<double>(status.save_counts.failed));
  to.Gauge("ballast_last_save_timestamp_seconds",
           "When the last complete checkpoint of the job was saved, since 1970; 0: there is none.",
           of_job, static_cast<double>(saved_unix_ms) / 1000);
  double stalled = 0;
  double left_bytes = 0;
  bool holds_back = false;
  for (const SaveProgress& save : status.saves) {
    stalled = std::max(stalled, save.seconds_since_progress);
    left_bytes += static_cast<double>(save.size_bytes - save.written_bytes);
    holds_back = holds_back || save.holds_back_decisions;
  }
  to.Gauge("ballast_saves_in_progress", "Saves that are under way.", of_job,
           static_cast<double>(status.saves.size()));
  to.Gauge("ballast_save_left_bytes", "What they have still to write.", of_job, left_bytes);
  to.Gauge("ballast_save_stalled_seconds", "The longest time that one of them got no further.",
           of_job, stalled);
  to.Gauge("ballast_save_holds_back", "1: decisions wait for a save.", of_job, holds_back ? 1 : 0);
}

void AddJob(const Job& job, const CheckpointDirectory* checkpoints, Families& to) {
  const std::string& name = job.spec().name;
  // One copy, made under the job's lock: all that is taken from it is of one instant.
  const JobStatus status = job.Status();
  // A series for each phase, so that an alert names a phase and knows no numbers.
  for (int phase = v1::AWAITING_WEIGHTS; phase <= v1::DIRECTIONS; ++phase) {
    const std::string& text = v1::JobPhase_Name(static_cast<v1::JobPhase>(phase));
    to.Gauge("ballast_job_phase", "1 for the phase that the job is in, 0 for the others.",
             {{"job_name", name}, {"phase", absl::AsciiStrToLower(text)}},
             phase == ToMessage(status.phase) ? 1 : 0);
  }
  to.Gauge("ballast_job_broken",
           "1: the job can do no more, for want of memory or after a load that did not end.",
           {{"job_name", name}}, status.phase == JobPhase::kBroken ? 1 : 0);
  AddSteps(name, status, to);
  AddReports(job, status, to);
  AddRanks(name, job, status, to);
  AddMemory(name, status, to);
  AddSpeculation(name, status, to);
  AddSaves(job, status, checkpoints, to);
  const size_t groups = std::min(job.spec().groups.size(), kMostLabelledGroups);
  for (size_t group = 0; group < groups; ++group) {
    to.Gauge("ballast_learning_rate", "Of a group of parameters; the first 32 groups.",
             {{"job_name", name}, {"group", job.spec().groups[group].name}},
             status.hyper_parameters[group].lr);
  }
}

}  // namespace

ProcessFacts ReadProcessFacts() {
  ProcessFacts facts = {
      .start_time_seconds = absl::ToDoubleSeconds(kProgramStart - absl::UnixEpoch()),
      .cpu_seconds = static_cast<double>(std::clock()) / CLOCKS_PER_SEC,
      .threads = Entries("/proc/self/task"),
      .open_descriptors = Entries("/proc/self/fd")};
  std::ifstream("/proc/self/statm") >> facts.virtual_bytes >> facts.resident_bytes;  // In pages.
  facts.virtual_bytes *= getpagesize();
  facts.resident_bytes *= getpagesize();
  return facts;
}

std::string MetricsText(const Engine& engine, const Server& server, const ServiceHistory& history,
                        const Viewer& viewer) {
  Families families;
  AddService(engine, server, families);
  AddHistory(history, families);
  AddProcess(families);
  std::vector<std::shared_ptr<Job>> jobs = engine.ListJobs();
  // Before they are counted: a viewer does not learn how many others there are.
  std::erase_if(jobs, [&](const auto& job) { return !MaySee(viewer, *job); });
  families.Gauge("ballast_jobs", "Jobs of the service.", {}, static_cast<double>(jobs.size()));
  for (const std::shared_ptr<Job>& job : jobs) AddJob(*job, engine.checkpoints(), families);
  return families.Text();
}

}  // namespace ballast::server
