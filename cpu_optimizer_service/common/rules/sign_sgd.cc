#include "cpu_optimizer_service/common/rules/sign_sgd.h"

#include <algorithm>
#include <cmath>

#include "cpu_optimizer_service/common/rules/arithmetic.h"
#include "cpu_optimizer_service/common/status.h"

namespace ballast {
namespace {

constexpr absl::string_view kSignSgdNames[] = {"lr", "weight_decay", "maximize"};
constexpr Plane kSignSgdPlanes[] = {Plane::kMaster};

absl::Status ValidateSignSgd(const HyperParameters& values) {
  BALLAST_RETURN_IF_ERROR(ValidateNotNegative("lr", values.lr));
  BALLAST_RETURN_IF_ERROR(ValidateNotNegative("weight_decay", values.weight_decay));
  return ValidateNotNegative("lr * weight_decay", values.lr * values.weight_decay);
}

StateBounds SignSgdBounds(const StateBounds& before, const HyperParameters& values,
                          double gradient) {
  const double decay = std::fabs(1 - values.lr * values.weight_decay);
  // The factor is at least 1: unused parameters of the group keep their weights.
  const double master = kRounding * (before.master() * std::max(1.0, decay) + values.lr);
  return Bounded({master}, {gradient, decay});
}

void SignSgdReference(const RuleRun& run) {
  const SignSgdScalars s = MakeSignSgdScalars(run);
  ForEachElement<1>(run, [&](float gradient, float(&values)[1]) {
    values[0] = Z(P(values[0] * s.decay) - SignOf(P(gradient * s.multiplier), s.lr));
  });
}

}  // namespace

SignSgdScalars MakeSignSgdScalars(const RuleRun& run) {
  const HyperParameters& values = *run.values;
  return {.multiplier = SignedMultiplier(values, run.multiplier),
          .decay = ToScalar(1 - values.lr * values.weight_decay),
          .lr = ToScalar(values.lr)};
}

constinit const RuleRow kSignSgdRow = {
    .name = "signsgd",
    .title = "SignSGD",
    .hyper_parameters = kSignSgdNames,
    .defaults = {.rule = Rule::kSignSgd, .weight_decay = 0},
    .planes = [](const HyperParameters&) -> PlaneList { return kSignSgdPlanes; },
    .validate = ValidateSignSgd,
    .bounds_after = SignSgdBounds,
    .reference = SignSgdReference};

}  // namespace ballast
