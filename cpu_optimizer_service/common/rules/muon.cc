#include "cpu_optimizer_service/common/rules/muon.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/rules/arithmetic.h"
#include "cpu_optimizer_service/common/status.h"

namespace ballast {
namespace {

constexpr absl::string_view kMuonNames[] = {"lr",   "weight_decay",   "momentum", "nesterov",
                                            "eps",  "ns_steps",       "ns_a",     "ns_b",
                                            "ns_c", "match_rms_adamw"};
constexpr Plane kMuonPlanes[] = {Plane::kMaster, Plane::kMomentumBuffer};

PlaneList MuonPlanes(const HyperParameters& /*values*/) { return kMuonPlanes; }

absl::Status ValidateMuon(const HyperParameters& values) {
  BALLAST_RETURN_IF_ERROR(ValidateNotNegative("lr", values.lr));
  BALLAST_RETURN_IF_ERROR(ValidateNotNegative("weight_decay", values.weight_decay));
  BALLAST_RETURN_IF_ERROR(
      ValidateNotNegative("lr * weight_decay", values.lr * values.weight_decay));
  BALLAST_RETURN_IF_ERROR(ValidateNotNegative("momentum", values.momentum));
  BALLAST_RETURN_IF_ERROR(ValidateNotNegative("eps", values.eps));
  if (values.ns_steps < 0 || values.ns_steps > 99) {
    return absl::InvalidArgumentError(
        absl::StrCat("ns_steps must be 0 to 99, got ", values.ns_steps));
  }
  // They may have either sign.
  BALLAST_RETURN_IF_ERROR(ValidateNotNegative("the size of ns_a", std::fabs(values.ns_a)));
  BALLAST_RETURN_IF_ERROR(ValidateNotNegative("the size of ns_b", std::fabs(values.ns_b)));
  return ValidateNotNegative("the size of ns_c", std::fabs(values.ns_c));
}

// Of the first round. The second one's decision looks at the weights itself.
StateBounds MuonBounds(const StateBounds& before, const HyperParameters& values, double gradient) {
  const double gain = std::fabs(1 - values.momentum);
  const double buffer = kRounding * (values.momentum * before.planes[1] + gain * gradient);
  const double direction = kRounding * (values.momentum * buffer + gain * gradient);
  // What no parameter was updated with stays.
  return Bounded({before.master(), std::max(before.planes[1], buffer)}, {gradient, direction});
}

void DirectionReference(const RuleRun& run) {
  const MuonDirectionScalars s = MakeMuonDirectionScalars(run);
  for (int64_t i = 0; i < run.elements; ++i) {
    const float g = P(s.gain * Z(LoadElement(run.gradient, run.gradient_dtype, i)));
    float b = Z(run.from[1][i]);
    if (!s.is_again) run.to[1][i] = b = Z(g + P(s.momentum * b));
    const float u = s.nesterov ? Z(g + P(s.momentum * b)) : b;
    if (run.shard != nullptr) StoreElement(run.shard, run.shard_dtype, i, u);
  }
}

void MuonReference(const RuleRun& run) {
  if (run.round == Round::kFirst) return DirectionReference(run);
  const MuonWeightScalars s = MakeMuonWeightScalars(run);
  ForEachElement<1>(run, [&](float orthogonal, float(&values)[1]) {
    values[0] = Z(P(s.decay * values[0]) + P(-s.step * orthogonal));
  });
}

}  // namespace

MuonDirectionScalars MakeMuonDirectionScalars(const RuleRun& run) {
  const HyperParameters& values = *run.values;
  return {.gain = ToScalar(run.multiplier * (1 - values.momentum)),
          .momentum = ToScalar(values.momentum),
          .nesterov = values.nesterov,
          .is_again = run.to[1] == nullptr};
}

MuonWeightScalars MakeMuonWeightScalars(const RuleRun& run) {
  const HyperParameters& values = *run.values;
  return {.decay = ToScalar(1 - values.lr * values.weight_decay),
          .step = ToScalar(values.lr * run.multiplier)};
}

double AdjustmentOf(const HyperParameters& values, int64_t rows, int64_t columns) {
  const auto r = static_cast<double>(rows);
  const auto c = static_cast<double>(columns);
  return values.match_rms_adamw ? 0.2 * std::sqrt(std::max(r, c)) : std::sqrt(std::max(1.0, r / c));
}

constinit const RuleRow kMuonRow = {.name = "muon",
                                    .title = "Muon",
                                    .hyper_parameters = kMuonNames,
                                    .defaults = {.rule = Rule::kMuon,
                                                 .eps = 1e-7,
                                                 .weight_decay = 0.1,
                                                 .momentum = 0.95,
                                                 .nesterov = true},
                                    .planes = MuonPlanes,
                                    .validate = ValidateMuon,
                                    .bounds_after = MuonBounds,
                                    .reference = MuonReference,
                                    .rounds = 2};

}  // namespace ballast
