#include "cpu_optimizer_service/common/rules/sgd.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/rules/arithmetic.h"
#include "cpu_optimizer_service/common/status.h"
#include "cpu_optimizer_service/common/text/amounts.h"

namespace ballast {
namespace {

constexpr absl::string_view kSgdNames[] = {"lr",        "weight_decay", "momentum",
                                           "dampening", "nesterov",     "maximize"};
constexpr Plane kSgdPlanes[] = {Plane::kMaster, Plane::kMomentumBuffer};

PlaneList SgdPlanes(const HyperParameters& values) {
  return PlaneList(kSgdPlanes).first(values.momentum == 0 ? 1 : 2);
}

absl::Status ValidateSgd(const HyperParameters& values) {
  BALLAST_RETURN_IF_ERROR(ValidateNotNegative("lr", values.lr));
  BALLAST_RETURN_IF_ERROR(ValidateNotNegative("weight_decay", values.weight_decay));
  BALLAST_RETURN_IF_ERROR(ValidateNotNegative("momentum", values.momentum));
  // As in torch it may have either sign.
  BALLAST_RETURN_IF_ERROR(
      ValidateNotNegative("the size of dampening", std::fabs(values.dampening)));
  if (values.nesterov && (values.momentum == 0 || values.dampening != 0)) {
    return absl::InvalidArgumentError("nesterov needs a momentum above 0 and dampening=0");
  }
  return absl::OkStatus();
}

// In a first update b is g. The rest is the formula.
StateBounds SgdBounds(const StateBounds& before, const HyperParameters& values, double gradient) {
  gradient = kRounding * (gradient + values.weight_decay * before.master());
  double buffer = 0;
  double step = gradient;
  if (values.momentum != 0) {
    const double gain = std::max(1.0, std::fabs(1 - values.dampening));
    buffer = values.momentum * before.planes[1] + gain * gradient;
    buffer = kRounding * std::max(before.planes[1], buffer);
    step = values.nesterov ? kRounding * (gradient + values.momentum * buffer) : buffer;
  }
  const double master = kRounding * (before.master() + values.lr * step);
  return Bounded({master, buffer}, {gradient, step, values.lr * step});
}

void SgdReference(const RuleRun& run) {
  const SgdScalars s = MakeSgdScalars(run);
  const auto decayed = [&](float gradient, float w) {
    return Z(P(gradient * s.multiplier) + P(s.weight_decay * w));
  };
  if (run.values->momentum == 0) {
    return ForEachElement<1>(run, [&](float gradient, float(&values)[1]) {
      values[0] = Z(values[0] - P(s.lr * decayed(gradient, values[0])));
    });
  }
  ForEachElement<2>(run, [&](float gradient, float(&values)[2]) {
    auto& [w, b] = values;
    const float g = decayed(gradient, w);
    b = s.first ? g : Z(P(s.momentum * b) + P(s.gain * g));
    w = Z(w - P(s.lr * (s.nesterov ? Z(g + P(s.momentum * b)) : b)));
  });
}

}  // namespace

SgdScalars MakeSgdScalars(const RuleRun& run) {
  const HyperParameters& values = *run.values;
  return {.multiplier = SignedMultiplier(values, run.multiplier),
          .weight_decay = ToScalar(values.weight_decay),
          .first = run.update_count == 1,
          .momentum = ToScalar(values.momentum),
          .gain = ToScalar(1 - values.dampening),
          .nesterov = values.nesterov,
          .lr = ToScalar(values.lr)};
}

constinit const RuleRow kSgdRow = {.name = "sgd",
                                   .title = "SGD",
                                   .hyper_parameters = kSgdNames,
                                   .defaults = {.rule = Rule::kSgd, .weight_decay = 0},
                                   .planes = SgdPlanes,
                                   .validate = ValidateSgd,
                                   .bounds_after = SgdBounds,
                                   .reference = SgdReference};

}  // namespace ballast
