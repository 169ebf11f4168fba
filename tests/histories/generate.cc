#include "tests/histories/generate.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "cpu_optimizer_service/common/rule.h"
#include "tests/histories/random.h"

namespace ballast::histories {
namespace {

DType AnyDType(Random& random) {
  return random.Pick({DType::kBFloat16, DType::kFloat16, DType::kFloat32});
}

// Groups differ in every value, because `group` is in each.
HyperParameters AnyHyperParameters(Random& random, int group) {
  HyperParameters values;
  values.lr = 1e-3 * (1 + group) * random.Between(1, 30);
  values.beta1 = 0.9 - 0.07 * group - 0.01 * random.Below(5);
  values.beta2 = 0.999 - 0.02 * group - 0.001 * random.Below(5);
  values.eps = random.Pick({1e-8, 1e-6, 1e-15}) * (1 + group);
  values.weight_decay = random.OneIn(4) ? 0 : 0.01 * (1 + group);
  values.decoupled_weight_decay = !random.OneIn(3);
  values.bias_correction = !random.OneIn(4);
  values.amsgrad = random.OneIn(3);
  values.maximize = random.OneIn(4);
  return values;
}

HyperParameterOverrides AnyChanges(Random& random) {
  HyperParameterOverrides changes;
  if (!random.OneIn(3)) changes.lr = 1e-3 * random.Between(1, 40);
  if (random.OneIn(3)) changes.beta1 = 0.5 + 0.01 * random.Below(49);
  if (random.OneIn(3)) changes.beta2 = 0.9 + 0.001 * random.Below(99);
  if (random.OneIn(4)) changes.eps = random.Pick({1e-8, 1e-5, 1e-12});
  if (random.OneIn(4)) changes.weight_decay = random.Pick({0.0, 0.02, 0.3});
  if (random.OneIn(5)) changes.decoupled_weight_decay = random.OneIn(2);
  if (random.OneIn(5)) changes.bias_correction = random.OneIn(2);
  if (random.OneIn(5)) changes.maximize = random.OneIn(2);
  return changes;
}

// `values` of Adam, as values of another rule.
HyperParameters WithOtherRule(Random& random, Layer layer, const HyperParameters& values) {
  Rule rule = random.Pick(
      {Rule::kSgd, Rule::kLion, Rule::kAdagrad, Rule::kSignSgd, Rule::kMuon, Rule::kMuon});
  // Several members cannot have it.
  if (rule == Rule::kMuon && layer == Layer::kMembers) rule = Rule::kLion;
  HyperParameters other = DefaultsOf(rule);
  ForEachOf(
      rule, [](const char*, auto& to, const auto& from) { to = from; }, other, values);
  if (rule == Rule::kSgd && !random.OneIn(3)) {
    other.momentum = 0.5 + 0.01 * random.Below(49);
    other.nesterov = random.OneIn(2);
    if (!other.nesterov) other.dampening = 0.1 * random.Below(8);
  }
  if (rule == Rule::kMuon) {
    other.momentum = 0.5 + 0.01 * random.Below(49);
    other.nesterov = random.OneIn(2);
    other.ns_steps = random.Between(0, 5);
    other.match_rms_adamw = random.OneIn(2);
  }
  if (rule == Rule::kAdagrad) {
    other.lr_decay = random.Pick({0.0, 0.1});
    other.initial_accumulator_value = random.Pick({0.0, 0.25});
  }
  return other;
}

// Leaves out what the rule does not have, and changes what it has instead.
void FitToRule(Random& random, const HyperParameters& values, HyperParameterOverrides& changes) {
  const RuleRow& row = RowOf(values.rule);
  ForEachHyperParameter(
      [&](const char* name, auto& change) {
        if (!row.has(name)) change.reset();
      },
      changes);
  if (values.momentum > 0 && random.OneIn(2)) changes.momentum = 0.5 + 0.01 * random.Below(49);
  if (row.has("ns_steps") && random.OneIn(3)) changes.ns_steps = random.Between(0, 5);
  if (row.has("ns_steps") && random.OneIn(3)) changes.match_rms_adamw = random.OneIn(2);
  if (row.has("ns_steps") && random.OneIn(3)) {  // Often such that the result is not finite.
    changes.ns_a = random.OneIn(2) ? 3.4445 : 1e30;
    changes.ns_c = random.OneIn(2) ? 2.0315 : 1e30;
  }
  if (row.has("lr_decay") && random.OneIn(2)) changes.lr_decay = 0.05 * random.Below(5);
}

// Half the groups of half the jobs get other rules. By numbers of its own: what else happens in a
// history of some seed does not depend on its rules.
void MixRules(History& history) {
  Random random(Mix(history.seed) + 1);
  std::vector<GroupPlan>& groups = history.job.groups;
  if (random.OneIn(2)) return;
  for (GroupPlan& group : groups) {
    HyperParameters& values = group.hyper_parameters;
    if (random.OneIn(2)) values = WithOtherRule(random, history.layer, values);
  }
  const auto fit = [&](int group, HyperParameterOverrides& changes) {
    const HyperParameters& values = groups[group].hyper_parameters;
    if (values.rule != Rule::kAdam) FitToRule(random, values, changes);
  };
  const bool has_two_rounds = std::ranges::any_of(
      groups, [](const GroupPlan& group) { return HasTwoRounds(group.hyper_parameters.rule); });
  const bool orthogonalize = has_two_rounds && history.layer != Layer::kMembers && !random.OneIn(3);
  if (orthogonalize) history.job.newton_schulz = Orthogonalizer::kWorkers;
  for (Attempt& attempt : history.attempts) {
    if (orthogonalize && !random.OneIn(3)) attempt.round_seed = random.Next();
    for (auto& [group, changes] : attempt.overrides) fit(group, changes);
    for (auto& [group, changes] : attempt.vote.overrides) fit(group, changes);
    for (Event& event : attempt.events) {
      if (event.kind != EventKind::kOperator) continue;
      fit(event.pick % static_cast<int>(groups.size()), event.changes);
    }
  }
}

// Some groups of a third of the jobs get packed state, and a parameter that is large enough for it. By
// numbers of its own, too.
void PackStates(History& history) {
  Random random(Mix(history.seed) + 2);
  if (!random.OneIn(3)) return;
  std::vector<GroupPlan>& groups = history.job.groups;
  for (int group = 0; group < static_cast<int>(groups.size()); ++group) {
    HyperParameters& values = groups[group].hyper_parameters;
    const StateFormat format = random.OneIn(3) ? StateFormat::kBFloat16 : StateFormat::k8Bit;
    if (values.rule == Rule::kAdam && format == StateFormat::kBFloat16) values.beta2 = 0.97;
    if (values.rule == Rule::kAdam && format == StateFormat::k8Bit) values.amsgrad = false;
    if (!CheckStateFormat(values, format).ok()) continue;
    // Shards may cut its groups of elements.
    groups[group].state = {.format = format, .fallback = true};
    for (ParameterPlan& parameter : history.job.parameters) {
      if (parameter.group != group || !parameter.trainable) continue;
      parameter.elements = random.Pick<int64_t>({4096, 4100, 4160, 5120});
      break;
    }
  }
  const auto fit = [&](int group, HyperParameterOverrides& changes) {
    if (groups[group].state.format != StateFormat::kBFloat16) return;
    if (changes.beta2.has_value()) changes.beta2 = std::min(*changes.beta2, kMostBeta2OfBFloat16);
  };
  for (Attempt& attempt : history.attempts) {
    for (auto& [group, changes] : attempt.overrides) fit(group, changes);
    for (auto& [group, changes] : attempt.vote.overrides) fit(group, changes);
    for (Event& event : attempt.events) {
      if (event.kind != EventKind::kOperator) continue;
      fit(event.pick % static_cast<int>(groups.size()), event.changes);
    }
  }
}

int64_t AnySize(Random& random) {
  switch (random.Below(8)) {
    case 0:
      return 0;
    case 1:
      return random.Pick<int64_t>({1, 3, 7});
    case 2:
      return random.Pick<int64_t>({255, 256, 257, 512});
    default:
      return random.Between(8, 900);
  }
}

JobPlan AnyJob(Random& random) {
  JobPlan job;
  job.world_size = random.Pick({1, 2, 2, 3, 4});
  job.threads = random.Between(1, 3);
  job.bucket_elements = random.Pick<int64_t>({256, 512, 1024, 4096});
  job.chunk_elements = random.Pick<int64_t>({256, 512, 1024});
  job.on_abort = random.OneIn(3) ? OnAbort::kSkip : OnAbort::kRedo;
  job.unused_policy = random.Pick({UnusedPolicy::kError, UnusedPolicy::kSkip, UnusedPolicy::kZero});
  job.max_micro_steps = random.Pick<uint32_t>({0, 0, 0, 1, 4});
  job.update_mode = random.OneIn(2) ? UpdateMode::kSpeculate : UpdateMode::kWait;
  job.keep_previous = random.OneIn(3);
  const int groups = random.Between(1, 3);
  for (int group = 0; group < groups; ++group) {
    job.groups.push_back({.hyper_parameters = AnyHyperParameters(random, group),
                          .wire_dtype = AnyDType(random),
                          .return_dtype = AnyDType(random)});
  }
  const int parameters = random.Between(1, 7);
  for (int id = 0; id < parameters; ++id) {
    job.parameters.push_back({.id = id,
                              .elements = AnySize(random),
                              .group = random.Below(groups),
                              .trainable = !random.OneIn(8)});
  }
  return job;
}

std::vector<uint32_t> AnyUse(Random& random, const JobPlan& job, uint32_t micro_steps) {
  const uint32_t everyone = (1u << job.world_size) - 1;
  std::vector<uint32_t> used(micro_steps, everyone);
  // A job whose policy is error has no unused parameters, or hardly ever.
  const bool may_be_unused = job.unused_policy != UnusedPolicy::kError || random.OneIn(25);
  switch (random.Below(may_be_unused ? 8 : 7)) {
    case 0:  // In the first micro-step alone.
      used.assign(micro_steps, 0);
      used.front() = everyone;
      return used;
    case 1:  // In the last alone.
      used.assign(micro_steps, 0);
      used.back() = everyone;
      return used;
    case 2:  // On one rank, in one micro-step.
      used.assign(micro_steps, 0);
      used[random.Below(static_cast<int>(micro_steps))] = 1u << random.Below(job.world_size);
      return used;
    case 7:
      used.assign(micro_steps, 0);
      return used;
    default:
      return used;
  }
}

std::vector<uint32_t> AnySegments(Random& random, uint32_t micro_steps) {
  std::vector<uint32_t> ends;
  const int kind = random.Below(4);  // 0: summed on the workers; 1: in part; else in the service.
  for (uint32_t m = 1; m < micro_steps; ++m) {
    if (kind > 1 || (kind == 1 && random.OneIn(2))) ends.push_back(m);
  }
  ends.push_back(micro_steps);
  return ends;
}

// One time in two as the step before: clipping changes from step to step.
void AddVote(Random& random, const JobPlan& job, double& max_norm, Attempt& attempt) {
  if (random.OneIn(2)) max_norm = random.Pick({0.0, 0.01, 2.0, 20.0, 1000.0});
  StepVote& vote = attempt.vote;
  vote.clipping.max_norm = max_norm;
  if (random.OneIn(6)) {
    vote.clipping.max_norm = 0;
    for (size_t group = 0; group < job.groups.size(); ++group) {
      vote.clipping.multipliers.push_back(random.Pick({1.0, 0.5, 0.1, 2.0}));
    }
  }
  vote.apply = !random.OneIn(12);
  for (size_t group = 0; group < job.groups.size(); ++group) {
    if (random.OneIn(12)) vote.overrides[static_cast<int>(group)] = AnyChanges(random);
  }
  if (random.OneIn(6)) vote.trainer_state = "voted";
  attempt.expects_clipping = !random.OneIn(5);
  const uint32_t everyone = (1u << job.world_size) - 1;
  if (random.OneIn(3)) {
    attempt.looks = random.OneIn(2) ? everyone : static_cast<uint32_t>(random.Next()) & everyone;
    attempt.spikes = random.OneIn(3) ? random.Between(1, 2) : 0;
  }
  attempt.may_guess = random.OneIn(4);
}

EventKind AnyEventKind(Random& random, Layer layer) {
  if (layer == Layer::kEngine) {
    const int kind = random.Below(kEventKinds);
    // Messages can be late only where there are messages.
    return kind == static_cast<int>(EventKind::kLate) ? EventKind::kRepeat
                                                      : static_cast<EventKind>(kind);
  }
  if (layer == Layer::kMembers && random.OneIn(3)) return EventKind::kLinkCut;
  return random.Pick({EventKind::kCut, EventKind::kCut, EventKind::kCut, EventKind::kCut,
                      EventKind::kDiscard, EventKind::kDiscard, EventKind::kRepeat,
                      EventKind::kAway, EventKind::kLate, EventKind::kWithhold,
                      EventKind::kOperator, EventKind::kSnapshot, EventKind::kReadShards,
                      EventKind::kSave, EventKind::kTellWaiting, EventKind::kOtherVote});
}

Event AnyEvent(Random& random, const JobPlan& job, Layer layer) {
  Event event = {.kind = AnyEventKind(random, layer),
                 .at = random.Below(kPositions),
                 .rank = random.Below(job.world_size),
                 .pick = random.Below(1000)};
  if (event.kind == EventKind::kOperator) event.changes = AnyChanges(random);
  return event;
}

Poison AnyPoison(Random& random, const JobPlan& job, const Attempt& attempt) {
  const ParameterPlan& parameter =
      job.parameters[random.Below(static_cast<int>(job.parameters.size()))];
  const float inf = std::numeric_limits<float>::infinity();
  return {
      .parameter = parameter.id,
      .element = parameter.elements == 0 ? 0 : random.Below(static_cast<int>(parameter.elements)),
      .segment = random.Below(static_cast<int>(attempt.segments[parameter.group].size())),
      .value = random.Pick({std::nanf(""), inf, -inf, 3e38f}),
      .told = random.OneIn(2)};
}

End AnyEnd(Random& random, const JobPlan& job, Layer layer) {
  switch (random.Below(16)) {
    case 0:
      return End::kAbort;
    case 1:
      return End::kAbortAtDecision;
    case 2:
      return End::kReplace;
    case 3:
      return End::kRestart;
    case 4:
      return End::kLoad;
    case 5:
    case 6:
      return job.keep_previous && layer != Layer::kSession ? End::kUndo : End::kCommit;
    default:
      return End::kCommit;
  }
}

Attempt AnyAttempt(Random& random, const JobPlan& job, Layer layer) {
  Attempt attempt;
  const int most = job.max_micro_steps == 0 ? 4 : static_cast<int>(job.max_micro_steps);
  attempt.micro_steps = random.OneIn(2) ? 1 : random.Between(1, most);
  attempt.scale.loss_scale = random.Pick({1.0, 1.0, 1024.0, 0.5});
  attempt.gradient_size = random.Pick({1.0f, 1.0f, 1.0f, 0.01f, 50.0f, 1e-38f, 3e4f});
  for (size_t group = 0; group < job.groups.size(); ++group) {
    attempt.segments.push_back(AnySegments(random, attempt.micro_steps));
    if (random.OneIn(4)) attempt.overrides[static_cast<int>(group)] = AnyChanges(random);
  }
  if (random.OneIn(2)) {
    for (size_t group = 0; group < job.groups.size(); ++group) {
      attempt.scale.divisors.push_back(random.Between(1, 40) * 0.5);
    }
  }
  for (const ParameterPlan& parameter : job.parameters) {
    if (!parameter.trainable) continue;
    attempt.used[parameter.id] = AnyUse(random, job, attempt.micro_steps);
  }
  // Nor has it backwards that reach nothing, or hardly ever.
  if (job.unused_policy == UnusedPolicy::kError && !random.OneIn(25)) {
    for (const ParameterPlan& parameter : job.parameters) {
      if (!parameter.trainable || parameter.elements == 0) continue;
      attempt.used[parameter.id].assign(attempt.micro_steps, (1u << job.world_size) - 1);
      break;
    }
  }
  attempt.gradient_seed = random.Next();
  attempt.order_seed = random.OneIn(6) ? 0 : random.Next();
  if (random.OneIn(7)) attempt.poisons.push_back(AnyPoison(random, job, attempt));
  if (random.OneIn(20)) {
    attempt.spoil = random.Pick({Spoil::kPadding, Spoil::kUndeclared, Spoil::kSentEmpty});
  }
  attempt.end = AnyEnd(random, job, layer);
  attempt.end_at = random.Below(kPositions);
  attempt.end_rank = random.Below(job.world_size);
  for (int events = random.Below(6); events > 0; --events) {
    attempt.events.push_back(AnyEvent(random, job, layer));
  }
  if (layer != Layer::kSession && random.OneIn(2)) {
    attempt.events.push_back(
        {.kind = EventKind::kDeath, .at = random.Below(kPositions), .pick = random.Below(1000)});
  }
  if (layer == Layer::kEngine && random.OneIn(6)) attempt.write_seed = random.Next();
  if (layer == Layer::kEngine && random.OneIn(6)) attempt.derive_seed = random.Next();
  return attempt;
}

void AddMembers(Random& random, JobPlan& job) {
  job.world_size = random.Pick({1, 2, 2, 3, 3, 4, 4});
  job.members = random.Pick({1, 2, 2, 3, 3, 4});
  for (int rank = 0; rank < 4; ++rank) job.homes.push_back(random.Below(job.members));
  job.victim = random.OneIn(2) ? 0 : random.Below(job.world_size);
  job.links_seed = random.Next();
}

}  // namespace

History Generate(uint64_t seed) {
  Random random(seed);
  History history;
  history.seed = seed;
  history.layer = random.OneIn(3) ? Layer::kSession : Layer::kEngine;
  if (random.OneIn(6)) history.layer = Layer::kMembers;
  history.job = AnyJob(random);
  if (history.layer == Layer::kMembers) AddMembers(random, history.job);
  double max_norm = 0;
  for (int attempts = random.Between(1, 6); attempts > 0; --attempts) {
    history.attempts.push_back(AnyAttempt(random, history.job, history.layer));
    AddVote(random, history.job, max_norm, history.attempts.back());
  }
  if (random.OneIn(2)) {
    history.job.sharding = static_cast<ShardingPlan>(random.Below(kShardingPlans));
  }
  MixRules(history);
  PackStates(history);
  return history;
}

}  // namespace ballast::histories
