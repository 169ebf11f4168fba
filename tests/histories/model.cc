#include "tests/histories/model.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "cpu_optimizer_service/common/layout.h"
#include "cpu_optimizer_service/common/norm/exact_sum.h"
#include "cpu_optimizer_service/common/reason.h"
#include "cpu_optimizer_service/common/rule.h"
#include "cpu_optimizer_service/common/rules/muon.h"
#include "cpu_optimizer_service/common/rules/newton_schulz.h"
#include "tests/support/block_sums.h"
#include "tests/support/packed_parameter.h"

namespace ballast::histories {

Model::Model(const JobPlan& job) : job_(job), later_changes_(job.groups.size()) {
  for (const GroupPlan& group : job.groups) state_.in_force.push_back(group.hyper_parameters);
  const Layout layout = Layout::Create(SpecOf(job, "model").layout).value();
  for (const ParameterPlan& parameter : job.parameters) {
    ParameterState& state = state_.parameters.emplace_back();
    formats_[parameter.id] = layout.format(static_cast<int>(state_.parameters.size()) - 1);
    if (!parameter.trainable) continue;
    std::vector<float>& weights = state.planes[Plane::kMaster];
    for (int64_t i = 0; i < parameter.elements; ++i) weights.push_back(FirstWeight(parameter, i));
    ForgetMoments(parameter, state);
  }
}

void Model::ForgetMoments(const ParameterPlan& parameter, ParameterState& state) const {
  const HyperParameters& values = job_.groups[parameter.group].hyper_parameters;
  for (const Plane plane : PlanesOf(values).subspan(1)) {
    state.planes[plane].assign(parameter.elements, InitialValue(values, plane));
  }
  Settle(parameter, state);
}

void Model::Settle(const ParameterPlan& parameter, ParameterState& state) const {
  if (format(parameter) == StateFormat::kFloat32) return;
  const PackedParameter packed(PlanesOf(job_.groups[parameter.group].hyper_parameters),
                               format(parameter), parameter.elements);
  for (auto& [plane, values] : state.planes) {
    WritePlane(packed.slot(), plane, 0, values);
    values = packed.Read(plane);
  }
}

bool Model::UpdatePacked(const ParameterPlan& parameter, ParameterState& state, RuleRun run) const {
  const PackedParameter packed(PlanesOf(*run.values), format(parameter), parameter.elements);
  for (const auto& [plane, values] : state.planes) WritePlane(packed.slot(), plane, 0, values);
  UpdateReference(run);  // In place, and then packed.
  for (const auto& [plane, values] : state.planes) {
    for (const float value : values) {
      if (!Holds(format(parameter), plane, value)) return false;
    }
  }
  UpdatePackedReference({.rule = run, .from = packed.slot(), .to = packed.slot()});
  for (auto& [plane, values] : state.planes) values = packed.Read(plane);
  return true;
}

void Model::ChangeGroup(int group, const HyperParameterOverrides& changes) {
  state_.in_force[group] = Apply(state_.in_force[group], changes);
  if (in_step_) later_changes_[group] = Merge(later_changes_[group], changes);
  if (previous_.has_value())
    previous_->in_force[group] = Apply(previous_->in_force[group], changes);
}

std::optional<uint64_t> Model::undoable_step() const {
  if (!job_.keep_previous || !previous_.has_value()) return std::nullopt;
  return state_.committed_step;
}

void Model::Write(const Attempt& attempt) {
  const StateWrite write = WriteOf(job_, attempt, state_.committed_step);
  for (size_t i = 0; i < write.parameters.size(); ++i) {
    const int p = write.parameters[i];
    ParameterState& state = state_.parameters[p];
    for (const Plane plane : write.planes) {
      std::vector<float>& values = state.planes.at(plane);
      for (size_t e = 0; e < values.size(); ++e) {
        values[e] = WrittenValue(attempt, plane, job_.parameters[p], static_cast<int64_t>(e));
      }
    }
    Settle(job_.parameters[p], state);
    if (!write.update_counts.empty()) state.updates = write.update_counts[i];
    if (HoldsFirstUpdate(write)) state.updates = std::max<int64_t>(state.updates, 1);
  }
  previous_.reset();
}

void Model::Derive(const Attempt& attempt) {
  for (const int p : LeftOutOf(job_, attempt)) {
    ParameterState& state = state_.parameters[p];
    std::vector<float>& weights = state.planes[Plane::kMaster];
    for (size_t e = 0; e < weights.size(); ++e) {
      weights[e] = WeightAfterwards(attempt, job_.parameters[p], static_cast<int64_t>(e));
    }
    ForgetMoments(job_.parameters[p], state);
    state.updates = 0;
  }
  for (size_t group = 0; group < job_.groups.size(); ++group) {
    state_.in_force[group] = job_.groups[group].hyper_parameters;
  }
  previous_.reset();
}

void Model::Undo() {
  state_ = *std::exchange(previous_, std::nullopt);
  in_step_ = false;
}

void Model::Begin(const Attempt& attempt) {
  in_step_ = true;
  later_changes_.assign(job_.groups.size(), {});
  terms_ = state_.in_force;
  for (const auto& [group, overrides] : attempt.overrides) {
    terms_[group] = Apply(terms_[group], overrides);
  }
}

bool Model::IsUnused(const Attempt& attempt, int parameter) const {
  const ParameterPlan& plan = job_.parameters[parameter];
  return plan.trainable && plan.elements > 0 && !IsUsed(job_, attempt, plan.id);
}

std::optional<ModelRefusal> Model::Refusal(const Attempt& attempt) const {
  if (attempt.spoil == Spoil::kPadding) return ModelRefusal{reason::kAbortAndRedo};
  if (attempt.spoil == Spoil::kUndeclared || attempt.spoil == Spoil::kSentEmpty) {
    return ModelRefusal{reason::kAbortAndRedo,
                        NameOf(job_.parameters[SpoiledParameter(job_, attempt)])};
  }
  if (job_.unused_policy != UnusedPolicy::kError) return std::nullopt;
  for (int p = 0; p < static_cast<int>(job_.parameters.size()); ++p) {
    if (IsUnused(attempt, p))
      return ModelRefusal{reason::kAbortAndRedo, NameOf(job_.parameters[p])};
  }
  return std::nullopt;
}

std::optional<ModelRefusal> Model::Refusal(const Attempt& attempt, int rank,
                                           uint32_t micro_steps) const {
  if (job_.unused_policy != UnusedPolicy::kError) return std::nullopt;
  bool any_parameter = false;
  std::vector<bool> reached(micro_steps, false);
  const int spoiled = attempt.spoil == Spoil::kUndeclared ? SpoiledParameter(job_, attempt) : -1;
  for (int p = 0; p < static_cast<int>(job_.parameters.size()); ++p) {
    const ParameterPlan& parameter = job_.parameters[p];
    if (!parameter.trainable || parameter.elements == 0) continue;
    any_parameter = true;
    const auto found = attempt.used.find(parameter.id);
    if (found == attempt.used.end() || p == spoiled) continue;
    for (uint32_t m = 0; m < micro_steps; ++m) {
      if ((found->second[m] >> rank & 1) != 0) reached[m] = true;
    }
  }
  const auto none = std::find(reached.begin(), reached.end(), false);
  if (!any_parameter || none == reached.end()) return std::nullopt;
  return ModelRefusal{.reason = reason::kAbortAndRedo,
                      .micro_step = static_cast<uint32_t>(none - reached.begin())};
}

std::vector<std::vector<float>> Model::SumGradients(const Attempt& attempt) const {
  std::vector<std::vector<float>> sums;
  for (const ParameterPlan& parameter : job_.parameters) {
    std::vector<float>& sum = sums.emplace_back();
    if (!parameter.trainable) continue;
    sum = GradientOf(job_, attempt, parameter, 0);
    const int segments = static_cast<int>(attempt.segments[parameter.group].size());
    for (int segment = 1; segment < segments; ++segment) {
      const std::vector<float> more = GradientOf(job_, attempt, parameter, segment);
      for (int64_t i = 0; i < parameter.elements; ++i) sum[i] = sum[i] + more[i];
    }
  }
  return sums;
}

std::vector<double> Model::GroupSums(const std::vector<std::vector<float>>& gradients) const {
  std::vector<double> group_sums;
  for (size_t group = 0; group < job_.groups.size(); ++group) {
    ExactSum sum;
    for (size_t p = 0; p < job_.parameters.size(); ++p) {
      if (job_.parameters[p].group != static_cast<int>(group)) continue;
      AddBlocks(gradients[p], sum);
    }
    group_sums.push_back(sum.Rounded());
  }
  return group_sums;
}

double Model::Norm(const Attempt& attempt) const {
  return GlobalNorm(GroupSums(SumGradients(attempt)), attempt.scale);
}

std::vector<double> Model::GroupNorms(const Attempt& attempt) const {
  return ballast::GroupNorms(GroupSums(SumGradients(attempt)), attempt.scale);
}

std::string Model::Culprit(const std::vector<std::vector<float>>& gradients) const {
  for (size_t group = 0; group < job_.groups.size(); ++group) {
    for (size_t p = 0; p < job_.parameters.size(); ++p) {
      if (job_.parameters[p].group != static_cast<int>(group)) continue;
      for (const float value : gradients[p]) {
        if (!std::isfinite(value)) return NameOf(job_.parameters[p]);
      }
    }
  }
  return "";
}

void Model::Update(const ParameterPlan& parameter, ParameterState& state,
                   const std::vector<float>& gradient, const HyperParameters& values,
                   float multiplier, int variant) const {
  RuleRun run = {.elements = static_cast<int64_t>(gradient.size()),
                 .gradient = gradient.data(),
                 .values = &values,
                 .update_count = state.updates,
                 .multiplier = multiplier};
  size_t place = 0;
  for (auto& [plane, elements] : state.planes) {
    run.from[place] = elements.data();
    run.to[place++] = elements.data();
  }
  std::vector<uint16_t> direction(gradient.size());
  if (HasTwoRounds(values.rule)) {
    run.shard = direction.data();
    run.shard_dtype = DType::kBFloat16;
  }
  if (format(parameter) != StateFormat::kFloat32) {
    if (!UpdatePacked(parameter, state, run)) {
      state.planes[Plane::kMaster][0] = std::numeric_limits<float>::infinity();
    }
    return;
  }
  UpdateReference(run);
  if (!HasTwoRounds(values.rule) || gradient.empty()) return;
  const std::vector<int64_t> shape = ShapeOf(job_, parameter);
  OrthogonalizeReference(absl::MakeSpan(direction), shape[0], shape[1], values);
  VaryOrthogonal(variant, direction);
  if (std::ranges::any_of(direction, [](uint16_t bits) { return (bits & 0x7f80) == 0x7f80; })) {
    return;  // Its weights are left as they are.
  }
  run.gradient = direction.data();
  run.gradient_dtype = DType::kBFloat16;
  run.shard = nullptr;
  run.multiplier = static_cast<float>(AdjustmentOf(values, shape[0], shape[1]));
  run.round = Round::kSecond;
  UpdateReference(run);
}

std::string Model::Overflowed(const std::vector<ParameterState>& parameters) const {
  const auto finite = [](const std::vector<float>& plane) {
    return std::all_of(plane.begin(), plane.end(), [](float x) { return std::isfinite(x); });
  };
  for (size_t group = 0; group < job_.groups.size(); ++group) {
    for (size_t p = 0; p < parameters.size(); ++p) {
      const ParameterState& state = parameters[p];
      if (job_.parameters[p].group != static_cast<int>(group)) continue;
      for (const auto& [plane, values] : state.planes) {
        if (!finite(values)) return NameOf(job_.parameters[p]);
      }
    }
  }
  return "";
}

ModelOutcome Model::Commit(const Attempt& attempt, int variant) {
  const std::vector<std::vector<float>> gradients = SumGradients(attempt);
  const StepVote& vote = attempt.vote;
  ModelOutcome outcome = {
      .decision = ballast::Decide(GroupSums(gradients), attempt.scale, vote.clipping),
      .abandoned = !vote.apply,
      .hyper_parameters = terms_};
  for (const auto& [group, overrides] : vote.overrides) {
    outcome.hyper_parameters[group] = Apply(outcome.hyper_parameters[group], overrides);
  }
  if (!vote.apply) {
    outcome.decision.apply = false;
    outcome.decision.multipliers.clear();
  } else if (!outcome.decision.apply) {
    outcome.culprit = Culprit(gradients);
  }
  previous_ = state_;
  std::vector<ParameterState> updated = state_.parameters;
  for (int p = 0; p < static_cast<int>(job_.parameters.size()); ++p) {
    const ParameterPlan& parameter = job_.parameters[p];
    const bool unused = IsUnused(attempt, p);
    if (unused) outcome.unused_parameters.push_back(NameOf(parameter));
    if (!outcome.decision.apply || !parameter.trainable) continue;
    if (unused && job_.unused_policy == UnusedPolicy::kSkip) continue;
    ++updated[p].updates;
    Update(parameter, updated[p], gradients[p], outcome.hyper_parameters[parameter.group],
           outcome.decision.multipliers[parameter.group], variant);
  }
  // A step that would leave state that is not finite is a skip, although its gradients are.
  if (const std::string overflowed = Overflowed(updated); !overflowed.empty()) {
    outcome.decision.apply = false;
    outcome.decision.multipliers.clear();
    outcome.culprit = overflowed;
  } else {
    state_.parameters = std::move(updated);
  }
  ++(outcome.decision.apply ? applied_steps_ : skipped_steps_);
  state_.last_step_applied = outcome.decision.apply;
  EndStep(attempt, /*voted=*/true);
  return outcome;
}

ModelOutcome Model::GiveUp(const Attempt& attempt) {
  previous_ = state_;
  ++skipped_steps_;
  state_.last_step_applied = false;
  EndStep(attempt, /*voted=*/false);
  return {.decision = {}, .given_up = true, .hyper_parameters = terms_};
}

void Model::EndStep(const Attempt& attempt, bool voted) {
  ++state_.committed_step;
  state_.trainer_state = TrainerState(attempt);
  if (voted) state_.trainer_state = attempt.vote.trainer_state.value_or(state_.trainer_state);
  for (const auto& [group, overrides] : attempt.overrides) {
    state_.in_force[group] = Apply(state_.in_force[group], overrides);
  }
  for (const auto& [group, overrides] : attempt.vote.overrides) {
    if (voted) state_.in_force[group] = Apply(state_.in_force[group], overrides);
  }
  for (size_t group = 0; group < job_.groups.size(); ++group) {
    state_.in_force[group] = Apply(state_.in_force[group], later_changes_[group]);
  }
  in_step_ = false;
}

}  // namespace ballast::histories
