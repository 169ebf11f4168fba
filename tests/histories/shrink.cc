#include "tests/histories/shrink.h"

#include <algorithm>
#include <utility>
#include <vector>

namespace ballast::histories {
namespace {

// A history with something taken away.
using Histories = std::vector<History>;

template <typename Change>
void Add(Histories& smaller, const History& history, const Change& change) {
  change(smaller.emplace_back(history));
}

void UseEverything(Attempt& attempt, int world_size) {
  for (auto& [id, used] : attempt.used) used.assign(attempt.micro_steps, (1u << world_size) - 1);
}

void SetMicroSteps(Attempt& attempt, uint32_t micro_steps) {
  attempt.micro_steps = micro_steps;
  for (auto& [id, used] : attempt.used) used.resize(micro_steps, used.back());
  for (std::vector<uint32_t>& ends : attempt.segments) {
    std::erase_if(ends, [&](uint32_t end) { return end >= micro_steps; });
    ends.push_back(micro_steps);
  }
}

void AddSmallerAttempts(Histories& smaller, const History& history, size_t i) {
  const Attempt& attempt = history.attempts[i];
  const auto add = [&](const auto& change) {
    Add(smaller, history, [&](History& h) { change(h.attempts[i]); });
  };
  add([](Attempt& a) { a.events.clear(); });
  for (size_t e = 0; e < attempt.events.size(); ++e) {
    add([&](Attempt& a) { a.events.erase(a.events.begin() + static_cast<int64_t>(e)); });
  }
  if (attempt.end != End::kCommit) add([](Attempt& a) { a.end = End::kCommit; });
  if (attempt.spoil != Spoil::kNone) add([](Attempt& a) { a.spoil = Spoil::kNone; });
  if (!attempt.poisons.empty()) add([](Attempt& a) { a.poisons.clear(); });
  if (!attempt.overrides.empty()) add([](Attempt& a) { a.overrides.clear(); });
  if (!attempt.scale.divisors.empty()) add([](Attempt& a) { a.scale.divisors.clear(); });
  if (attempt.scale.loss_scale != 1) add([](Attempt& a) { a.scale.loss_scale = 1; });
  if (attempt.vote != StepVote()) add([](Attempt& a) { a.vote = {}; });
  if (attempt.looks != 0) add([](Attempt& a) { a.looks = a.spikes = 0; });
  if (attempt.write_seed != 0) add([](Attempt& a) { a.write_seed = 0; });
  if (attempt.derive_seed != 0) add([](Attempt& a) { a.derive_seed = 0; });
  if (attempt.round_seed != 0) add([](Attempt& a) { a.round_seed = 0; });
  if (attempt.spikes != 0) add([](Attempt& a) { a.spikes = 0; });
  if (attempt.may_guess) add([](Attempt& a) { a.may_guess = false; });
  if (attempt.gradient_size != 1) add([](Attempt& a) { a.gradient_size = 1; });
  if (attempt.order_seed != 0) add([](Attempt& a) { a.order_seed = 0; });
  if (attempt.micro_steps > 1) {
    add([](Attempt& a) { SetMicroSteps(a, 1); });
    add([](Attempt& a) { SetMicroSteps(a, a.micro_steps - 1); });
    add([](Attempt& a) {
      for (std::vector<uint32_t>& ends : a.segments) ends = {a.micro_steps};
    });
  }
  add([&](Attempt& a) { UseEverything(a, history.job.world_size); });
}

void AddSmallerJobs(Histories& smaller, const History& history) {
  const auto add = [&](const auto& change) {
    Add(smaller, history, [&](History& h) { change(h.job); });
  };
  const JobPlan& job = history.job;
  for (size_t p = 0; job.parameters.size() > 1 && p < job.parameters.size(); ++p) {
    add([&](JobPlan& j) { j.parameters.erase(j.parameters.begin() + static_cast<int64_t>(p)); });
  }
  if (job.world_size > 1) add([](JobPlan& j) { --j.world_size; });
  if (job.members > 1) add([](JobPlan& j) { --j.members; });
  for (int rank = 0; job.members > 1 && rank < job.world_size; ++rank) {
    if (job.homes[rank] != 0) add([&](JobPlan& j) { j.homes[rank] = 0; });
  }
  if (job.sharding != ShardingPlan::kBuckets) {
    add([](JobPlan& j) { j.sharding = ShardingPlan::kBuckets; });
  }
  if (job.threads > 1) add([](JobPlan& j) { j.threads = 1; });
  if (job.keep_previous) {
    add([](JobPlan& j) { j.keep_previous = false; });
  }
  if (job.newton_schulz != Orthogonalizer::kService) {
    add([](JobPlan& j) { j.newton_schulz = Orthogonalizer::kService; });
  }
  if (job.on_abort != OnAbort::kRedo) {
    add([](JobPlan& j) { j.on_abort = OnAbort::kRedo; });
  }
  if (job.update_mode != UpdateMode::kWait) {
    add([](JobPlan& j) { j.update_mode = UpdateMode::kWait; });
  }
  if (job.max_micro_steps != 0) add([](JobPlan& j) { j.max_micro_steps = 0; });
  for (size_t p = 0; p < job.parameters.size(); ++p) {
    if (job.parameters[p].elements > 1) add([&](JobPlan& j) { j.parameters[p].elements /= 2; });
    if (!job.parameters[p].trainable) add([&](JobPlan& j) { j.parameters[p].trainable = true; });
  }
  if (job.chunk_elements != 1024) add([](JobPlan& j) { j.chunk_elements = 1024; });
  for (size_t group = 0; group < job.groups.size(); ++group) {
    const GroupPlan plain = {.wire_dtype = DType::kFloat32, .return_dtype = DType::kFloat32};
    if (job.groups[group].wire_dtype != plain.wire_dtype ||
        job.groups[group].return_dtype != plain.return_dtype ||
        job.groups[group].state != plain.state ||
        job.groups[group].hyper_parameters != plain.hyper_parameters) {
      add([&](JobPlan& j) { j.groups[group] = plain; });
    }
  }
}

Histories Smaller(const History& history) {
  Histories smaller;
  for (size_t i = 0; history.attempts.size() > 1 && i < history.attempts.size(); ++i) {
    Add(smaller, history,
        [&](History& h) { h.attempts.erase(h.attempts.begin() + static_cast<int64_t>(i)); });
  }
  for (size_t i = 0; i < history.attempts.size(); ++i) AddSmallerAttempts(smaller, history, i);
  AddSmallerJobs(smaller, history);
  return smaller;
}

}  // namespace

History Shrink(History history, const std::function<bool(const History&)>& fails,
               const ShrinkLimits& limits) {
  const auto deadline = std::chrono::steady_clock::now() + limits.time;
  int runs = 0;
  std::string before = Describe(history);
  for (bool shrunk = true; shrunk;) {
    shrunk = false;
    for (History& candidate : Smaller(history)) {
      // Some changes change nothing that can be told.
      std::string text = Describe(candidate);
      if (text == before) continue;
      if (++runs > limits.runs || std::chrono::steady_clock::now() > deadline) return history;
      if (!fails(candidate)) continue;
      history = std::move(candidate);
      before = std::move(text);
      shrunk = true;
      break;
    }
  }
  return history;
}

}  // namespace ballast::histories
