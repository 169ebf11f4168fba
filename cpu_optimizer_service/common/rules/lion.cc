#include "cpu_optimizer_service/common/rules/lion.h"

#include <algorithm>
#include <cmath>

#include "cpu_optimizer_service/common/rules/arithmetic.h"
#include "cpu_optimizer_service/common/status.h"

namespace ballast {
namespace {

constexpr absl::string_view kLionNames[] = {"lr", "beta1", "beta2", "weight_decay", "maximize"};
constexpr Plane kLionPlanes[] = {Plane::kMaster, Plane::kExpAvg};

absl::Status ValidateLion(const HyperParameters& values) {
  BALLAST_RETURN_IF_ERROR(ValidateNotNegative("lr", values.lr));
  BALLAST_RETURN_IF_ERROR(ValidateBeta("beta1", values.beta1));
  BALLAST_RETURN_IF_ERROR(ValidateBeta("beta2", values.beta2));
  BALLAST_RETURN_IF_ERROR(ValidateNotNegative("weight_decay", values.weight_decay));
  return ValidateNotNegative("lr * weight_decay", values.lr * values.weight_decay);
}

// m is a mean of the old m and g, and so is c.
StateBounds LionBounds(const StateBounds& before, const HyperParameters& values, double gradient) {
  const double decay = std::fabs(1 - values.lr * values.weight_decay);
  const double exp_avg = kRounding * std::max(before.planes[1], gradient);
  // The factor is at least 1: unused parameters of the group keep their weights.
  const double master = kRounding * (before.master() * std::max(1.0, decay) + values.lr);
  return Bounded({master, exp_avg}, {gradient, decay});
}

void LionReference(const RuleRun& run) {
  const LionScalars s = MakeLionScalars(run);
  ForEachElement<2>(run, [&](float gradient, float(&values)[2]) {
    auto& [w, m] = values;
    const float g = P(gradient * s.multiplier);
    const float c = Z(P(s.beta1 * m) + P(s.one_minus_beta1 * g));
    w = Z(P(w * s.decay) - SignOf(c, s.lr));
    m = Z(P(s.beta2 * m) + P(s.one_minus_beta2 * g));
  });
}

}  // namespace

LionScalars MakeLionScalars(const RuleRun& run) {
  const HyperParameters& values = *run.values;
  return {.multiplier = SignedMultiplier(values, run.multiplier),
          .decay = ToScalar(1 - values.lr * values.weight_decay),
          .beta1 = ToScalar(values.beta1),
          .one_minus_beta1 = ToScalar(1 - values.beta1),
          .beta2 = ToScalar(values.beta2),
          .one_minus_beta2 = ToScalar(1 - values.beta2),
          .lr = ToScalar(values.lr)};
}

constinit const RuleRow kLionRow = {
    .name = "lion",
    .title = "Lion",
    .hyper_parameters = kLionNames,
    .defaults = {.rule = Rule::kLion, .lr = 1e-4, .beta2 = 0.99, .weight_decay = 0},
    .planes = [](const HyperParameters&) -> PlaneList { return kLionPlanes; },
    .validate = ValidateLion,
    .bounds_after = LionBounds,
    .reference = LionReference};

}  // namespace ballast
