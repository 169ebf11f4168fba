#include "cpu_optimizer_service/job/step/state_trial.h"

#include <algorithm>
#include <tuple>

#include "cpu_optimizer_service/common/text/overflow.h"
#include "cpu_optimizer_service/job/step/step_decision.h"

namespace ballast {

void StateTrial::Add(int group, const StateBounds& largest) {
  for (int place = 0; place < kMaxPlanes; ++place) {
    double& bound = largest_[group].planes[place];
    bound = std::max(bound, largest.planes[place]);
  }
}

void StateTrial::Add(const JobSpec& spec, const StateOverflow& overflow) {
  const auto place = [&](const StateOverflow& of) {
    return std::tuple(spec.layout.parameters[of.gradient.parameter].group, of.gradient.parameter,
                      of.gradient.element);
  };
  if (!first_.has_value() || place(overflow) < place(*first_)) first_ = overflow;
}

void StateTrial::Add(const JobSpec& spec, const StateTrial& other) {
  for (int group = 0; group < static_cast<int>(largest_.size()); ++group) {
    Add(group, other.largest_[group]);
  }
  if (other.first_.has_value()) Add(spec, *other.first_);
}

bool StateTrial::Fits(const JobSpec& spec) const {
  if (largest_.size() != spec.groups.size()) return false;
  if (!first_.has_value()) return true;
  const int parameter = first_->gradient.parameter;
  return parameter >= 0 && parameter < static_cast<int>(spec.layout.parameters.size()) &&
         static_cast<int>(first_->plane) < kPlaneKinds;
}

void StateTrial::Settle(const JobSpec& spec, Draft& draft) const {
  for (size_t group = 0; group < draft.bounds.size(); ++group) {
    if (!draft.bounds[group].finite()) draft.bounds[group] = largest_[group];
  }
  if (!first_.has_value()) return;
  const ParameterSpec& parameter = spec.layout.parameters[first_->gradient.parameter];
  draft.outcome.skip_reason =
      ToString(Overflow{.plane = Name(first_->plane),
                        .parameter = parameter.name,
                        .element = first_->gradient.element,
                        .value = first_->value,
                        .rank = first_->gradient.rank,
                        .gradient = static_cast<float>(first_->gradient.value),
                        .multiplier = draft.update.multipliers[parameter.group]});
  draft.outcome.skip_cause = SkipCause::kState;
  draft.outcome.decision.apply = false;
  draft.outcome.decision.multipliers.clear();
}

}  // namespace ballast
