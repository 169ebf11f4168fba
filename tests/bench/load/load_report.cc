#include "tests/bench/load/load_report.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "cpu_optimizer_service/common/rule.h"

namespace ballast::bench {
namespace {

using Json = nlohmann::json;

// Where time went, by name. Of a step, the most that any rank lost so.
struct Part {
  const char* name;
  double RankStep::*seconds;
};
constexpr Part kParts[] = {
    {"pace_seconds", &RankStep::pace_seconds},    {"place_seconds", &RankStep::place_seconds},
    {"push_seconds", &RankStep::push_seconds},    {"decision_seconds", &RankStep::decision_seconds},
    {"round_seconds", &RankStep::round_seconds},  {"weights_seconds", &RankStep::weights_seconds},
    {"update_seconds", &RankStep::update_seconds}};

// A step of a job lasts from its first rank's beginning to its last rank's end.
void AddSteps(const LoadResult& result, Figures& figures) {
  std::vector<double> total, exposed, parts[std::size(kParts)];
  for (const auto& ranks : result.steps) {
    for (size_t i = 0; i < ranks.front().size(); ++i) {
      RankStep all = ranks.front()[i];
      for (const auto& steps : ranks) {
        all.begin = std::min(all.begin, steps[i].begin);
        all.last_gradient = std::max(all.last_gradient, steps[i].last_gradient);
        all.end = std::max(all.end, steps[i].end);
        for (const Part& part : kParts) {
          all.*part.seconds = std::max(all.*part.seconds, steps[i].*part.seconds);
        }
      }
      total.push_back(Seconds(all.end - all.begin));
      exposed.push_back(Seconds(all.end - all.last_gradient));
      for (size_t k = 0; k < std::size(kParts); ++k) parts[k].push_back(all.*kParts[k].seconds);
    }
  }
  figures.Add("total_seconds", total, "s", /*keep=*/true);
  figures.Add("exposed_seconds", exposed, "s", /*keep=*/true);
  for (size_t k = 0; k < std::size(kParts); ++k) figures.Add(kParts[k].name, parts[k], "s");
}

Json ToJson(const std::optional<ResidentMemory>& memory) {
  if (!memory) return nullptr;
  return {{"total_bytes", memory->total_bytes},
          {"anonymous_bytes", memory->anonymous_bytes},
          {"shared_bytes", memory->shared_bytes},
          {"peak_bytes", memory->peak_bytes}};
}

Json ToJson(const LoadOptions& options) {
  return {{"transport", Name(options.way)},
          {"parameters", options.parameters},
          {"tensors", options.tensors},
          {"groups", options.groups},
          {"ranks", options.ranks},
          {"jobs", options.jobs},
          {"steps", options.steps},
          {"warmup", options.warmup},
          {"micro_steps", options.micro_steps},
          {"rule", RowOf(options.rule).name},
          {"state", Name(options.state)},
          {"update", Name(options.update)},
          {"clip", Name(options.clipping)},
          {"pace", options.pace},
          {"threads", options.threads},
          {"seed", options.seed}};
}

// Over the measured steps.
void AddUsage(const LoadOptions& options, const LoadResult& result, Json& info) {
  const int64_t up = result.payload_bytes_up * options.steps;
  const int64_t down = result.payload_bytes_down * options.steps;
  const double worker = result.ended.worker_cpu_seconds - result.begun.worker_cpu_seconds;
  double both = worker;
  info["wall_seconds"] = Seconds(result.ended.time - result.begun.time);
  info["payload_bytes_up"] = up;
  info["payload_bytes_down"] = down;
  info["worker_cpu_seconds"] = worker;
  info["service_cpu_seconds"] = nullptr;
  if (result.begun.service_cpu_seconds && result.ended.service_cpu_seconds) {
    const double service = *result.ended.service_cpu_seconds - *result.begun.service_cpu_seconds;
    info["service_cpu_seconds"] = service;
    both += service;
  }
  info["cpu_seconds_per_gb"] = both / (static_cast<double>(up + down) * 1e-9);
  info["socket_bytes_up"] = nullptr;
  info["socket_bytes_down"] = nullptr;
  if (result.begun.sockets && result.ended.sockets) {
    info["socket_bytes_up"] = result.ended.sockets->sent - result.begun.sockets->sent;
    info["socket_bytes_down"] = result.ended.sockets->received - result.begun.sockets->received;
  }
}

void AddMemory(const LoadOptions& options, const LoadResult& result, Json& info) {
  info["worker_idle_memory"] = ToJson(result.idle.worker_memory);
  info["worker_memory"] = ToJson(result.ended.worker_memory);
  info["service_idle_memory"] = ToJson(result.idle.service_memory);
  info["service_memory"] = ToJson(result.ended.service_memory);
  const auto parameters = static_cast<double>(options.parameters * options.jobs);
  if (result.idle.service_memory && result.ended.service_memory) {
    const int64_t grown =
        result.ended.service_memory->total_bytes - result.idle.service_memory->total_bytes;
    info["service_resident_bytes_per_parameter"] = static_cast<double>(grown) / parameters;
  } else {
    info["service_resident_bytes_per_parameter"] = nullptr;
  }
  int64_t total = 0, state = 0, gradient = 0, accumulator = 0, speculation = 0, shared = 0;
  for (const v1::Job& job : result.jobs) {
    total += job.memory().total_bytes();
    state += job.memory().state_bytes();
    gradient += job.memory().gradient_bytes();
    accumulator += job.memory().accumulator_bytes();
    speculation += job.memory().speculation_bytes();
    shared += job.memory().shared_bytes();
  }
  info["admitted_bytes"] = {{"total", total},
                            {"state", state},
                            {"gradient", gradient},
                            {"accumulator", accumulator},
                            {"speculation", speculation},
                            {"shared", shared}};
  info["admitted_bytes_per_parameter"] = static_cast<double>(total) / parameters;
}

void AddSpeculation(const LoadResult& result, Json& info) {
  int64_t speculated = 0, published = 0, redone = 0;
  std::string unavailable;
  for (const v1::Job& job : result.jobs) {
    speculated += job.speculation().speculated_chunks();
    published += job.speculation().published_chunks();
    redone += job.speculation().redone_chunks();
    if (unavailable.empty()) unavailable = job.speculation().unavailable();
  }
  info["speculated_chunks"] = speculated;
  info["published_chunks"] = published;
  info["redone_chunks"] = redone;
  info["speculation_unavailable"] = unavailable;
}

}  // namespace

Figures FiguresOf(const LoadOptions& options, const LoadResult& result) {
  Figures figures("worker");
  AddSteps(result, figures);
  figures.Add("round_trip_seconds", result.round_trip_seconds, "s");
  Json& info = figures.info();
  info["options"] = ToJson(options);
  info["shared_memory"] = result.shared_memory;
  info["members"] = std::max(result.jobs.front().members_size(), 1);
  info["weights_sha256"] = result.weights_sha256;
  const client::StepDecision& last = result.steps.front().front().back().decision;
  info["norm"] = last.norm;
  info["clip_coefficient"] = last.clip_coefficient;
  AddUsage(options, result, info);
  AddMemory(options, result, info);
  AddSpeculation(result, info);
  return figures;
}

std::string TextOf(const Figures& figures) {
  const Json json = figures.ToJson();
  std::string text;
  for (const auto& [key, figure] : json["figures"].items()) {
    absl::StrAppendFormat(&text, "%-20s median %9.3f ms, p99 %9.3f ms\n", key,
                          1e3 * figure["median"].get<double>(), 1e3 * figure["p99"].get<double>());
  }
  const Json& info = json["info"];
  absl::StrAppendFormat(&text, "%-20s %.3f CPU-s/GB, %.3f GB up, %.3f GB down\n", "moved",
                        info["cpu_seconds_per_gb"].get<double>(),
                        1e-9 * info["payload_bytes_up"].get<double>(),
                        1e-9 * info["payload_bytes_down"].get<double>());
  absl::StrAppend(&text, "weights sha256       ", info["weights_sha256"].get<std::string>(), "\n");
  return text;
}

}  // namespace ballast::bench
