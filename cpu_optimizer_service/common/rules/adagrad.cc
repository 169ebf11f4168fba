#include "cpu_optimizer_service/common/rules/adagrad.h"

#include <algorithm>
#include <cfloat>
#include <cmath>

#include "cpu_optimizer_service/common/rules/arithmetic.h"
#include "cpu_optimizer_service/common/status.h"

namespace ballast {
namespace {

constexpr absl::string_view kAdagradNames[] = {
    "lr", "eps", "weight_decay", "lr_decay", "initial_accumulator_value", "maximize"};
constexpr Plane kAdagradPlanes[] = {Plane::kMaster, Plane::kSum};

absl::Status ValidateAdagrad(const HyperParameters& values) {
  BALLAST_RETURN_IF_ERROR(ValidateNotNegative("lr", values.lr));
  BALLAST_RETURN_IF_ERROR(ValidateNotNegative("lr_decay", values.lr_decay));
  BALLAST_RETURN_IF_ERROR(ValidateNotNegative("weight_decay", values.weight_decay));
  BALLAST_RETURN_IF_ERROR(
      ValidateNotNegative("initial_accumulator_value", values.initial_accumulator_value));
  return ValidateNotNegative("eps", values.eps);
}

// The sum has the square of g in it, so the quotient is at most 1. Where that square is so small
// that P makes zero of it, |g| is at most 2^-63, and the denominator at least eps.
StateBounds AdagradBounds(const StateBounds& before, const HyperParameters& values,
                          double gradient) {
  gradient = kRounding * (gradient + values.weight_decay * before.master());
  const double sum = kRounding * (before.planes[1] + gradient * gradient);
  const double eps = values.eps < FLT_MIN ? 0 : values.eps;  // As ToScalar.
  const double quotient = std::max(kRounding, 0x1p-63 / eps);
  // The step size is largest at first, which holds for every update count.
  const double master = kRounding * (before.master() + values.lr * quotient);
  return Bounded({master, sum}, {gradient, gradient * gradient, quotient});
}

void AdagradReference(const RuleRun& run) {
  const AdagradScalars s = MakeAdagradScalars(run);
  ForEachElement<2>(run, [&](float gradient, float(&values)[2]) {
    auto& [w, sum] = values;
    const float g = Z(P(gradient * s.multiplier) + P(s.weight_decay * w));
    sum = Z(sum + P(g * g));
    w = Z(w - P(s.step_size * P(g / (std::sqrt(sum) + s.eps))));
  });
}

}  // namespace

AdagradScalars MakeAdagradScalars(const RuleRun& run) {
  const HyperParameters& values = *run.values;
  const double decay = 1 + static_cast<double>(run.update_count - 1) * values.lr_decay;
  return {.multiplier = SignedMultiplier(values, run.multiplier),
          .weight_decay = ToScalar(values.weight_decay),
          .eps = ToScalar(values.eps),
          .step_size = ToScalar(values.lr / decay)};
}

constinit const RuleRow kAdagradRow = {
    .name = "adagrad",
    .title = "Adagrad",
    .hyper_parameters = kAdagradNames,
    .defaults = {.rule = Rule::kAdagrad, .lr = 1e-2, .eps = 1e-10, .weight_decay = 0},
    .planes = [](const HyperParameters&) -> PlaneList { return kAdagradPlanes; },
    .validate = ValidateAdagrad,
    .bounds_after = AdagradBounds,
    .reference = AdagradReference};

}  // namespace ballast
