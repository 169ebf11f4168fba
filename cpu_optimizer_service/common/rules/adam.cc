#include "cpu_optimizer_service/common/rules/adam.h"

#include <algorithm>
#include <cfloat>
#include <cmath>

#include "cpu_optimizer_service/common/float_format.h"
#include "cpu_optimizer_service/common/rules/arithmetic.h"
#include "cpu_optimizer_service/common/status.h"

namespace ballast {
namespace {

WeightDecay KindOf(const HyperParameters& values) {
  // To leave the decay out is not the same as to multiply by 1: P would make zero of a weight of
  // 2^-126.
  if (values.weight_decay == 0) return WeightDecay::kNone;
  return values.decoupled_weight_decay ? WeightDecay::kDecoupled : WeightDecay::kL2;
}

constexpr absl::string_view kAdamNames[] = {"lr",
                                            "beta1",
                                            "beta2",
                                            "eps",
                                            "weight_decay",
                                            "decoupled_weight_decay",
                                            "bias_correction",
                                            "amsgrad",
                                            "maximize"};
constexpr Plane kAdamPlanes[] = {Plane::kMaster, Plane::kExpAvg, Plane::kExpAvgSq,
                                 Plane::kMaxExpAvgSq};

PlaneList AdamPlanes(const HyperParameters& values) {
  return PlaneList(kAdamPlanes).first(values.amsgrad ? 4 : 3);
}

// Also refused are scalars computed of several values that do not fit fp32: the product lr *
// weight_decay if decoupled, and the first step size lr / (1 - beta1) if bias-corrected.
absl::Status ValidateAdam(const HyperParameters& values) {
  BALLAST_RETURN_IF_ERROR(ValidateNotNegative("lr", values.lr));
  BALLAST_RETURN_IF_ERROR(ValidateBeta("beta1", values.beta1));
  BALLAST_RETURN_IF_ERROR(ValidateBeta("beta2", values.beta2));
  BALLAST_RETURN_IF_ERROR(ValidateNotNegative("eps", values.eps));
  BALLAST_RETURN_IF_ERROR(ValidateNotNegative("weight_decay", values.weight_decay));
  if (values.decoupled_weight_decay) {
    BALLAST_RETURN_IF_ERROR(
        ValidateNotNegative("lr * weight_decay", values.lr * values.weight_decay));
  }
  // The first update has the largest step size, since 1 - beta1^t grows with t.
  if (values.bias_correction) {
    BALLAST_RETURN_IF_ERROR(
        ValidateNotNegative("lr / (1 - beta1)", values.lr / (1 - values.beta1)));
  }
  return absl::OkStatus();
}

StateBounds AdamBounds(const StateBounds& before, const HyperParameters& values, double gradient) {
  // With L2 decay a part of the weight goes through the moments like the gradient.
  if (!values.decoupled_weight_decay) {
    gradient = kRounding * (gradient + values.weight_decay * before.master());
  }
  const double exp_avg = kRounding * std::max(before.planes[1], gradient);
  const double exp_avg_sq = kRounding * std::max(before.planes[2], gradient * gradient);
  const double max_exp_avg_sq =
      values.amsgrad ? std::max(kRounding * before.planes[3], exp_avg_sq) : 0;
  const double eps = values.eps < FLT_MIN ? 0 : values.eps;  // As MakeAdamScalars.
  const double quotient = exp_avg / eps;
  // 1 - beta1^t is smallest at t = 1, so this holds for every update count.
  const double step_size = values.bias_correction ? values.lr / (1 - values.beta1) : values.lr;
  const double decay =
      values.decoupled_weight_decay ? std::fabs(1 - values.lr * values.weight_decay) : 1.0;
  // The factor is at least 1: unused parameters of the group keep their weights.
  const double master = kRounding * (before.master() * std::max(1.0, decay) + step_size * quotient);
  return Bounded({master, exp_avg, exp_avg_sq, max_exp_avg_sq},
                 {gradient, quotient, step_size, decay});
}

}  // namespace

double PowerBySquaring(double beta, int64_t exponent) {
  double result = 1;
  double square = beta;
  for (int64_t rest = exponent; rest > 0; rest >>= 1) {
    if (rest & 1) result *= square;
    square *= square;
  }
  return result;
}

AdamScalars MakeAdamScalars(const HyperParameters& values, int64_t update_count, float multiplier) {
  double bias_correction1 = 1;
  double bias_correction2 = 1;
  // 1 - beta^t, from Kingma and Ba. It is never 0: betas are below 1, and the count is at least 1.
  if (values.bias_correction) {
    bias_correction1 = 1 - PowerBySquaring(values.beta1, update_count);
    bias_correction2 = 1 - PowerBySquaring(values.beta2, update_count);
  }
  return {
      .weight_decay_kind = KindOf(values),
      .multiplier = SignedMultiplier(values, multiplier),
      .weight_decay = ToScalar(values.weight_decay),
      .decay = ToScalar(1 - values.lr * values.weight_decay),
      .beta1 = ToScalar(values.beta1),
      .one_minus_beta1 = ToScalar(1 - values.beta1),
      .beta2 = ToScalar(values.beta2),
      .one_minus_beta2 = ToScalar(1 - values.beta2),
      // torch divides the root of v by the root of bias_correction2. A factor costs less for each
      // element, and differs from that only in rounding.
      .inverse_sqrt_bias_correction2 = ToScalar(1 / std::sqrt(bias_correction2)),
      .eps = ToScalar(values.eps),
      .step_size = ToScalar(values.lr / bias_correction1),
  };
}

void UpdateAdamReference(const AdamRun& run) {
  const AdamScalars& s = run.scalars;
  const bool amsgrad = run.max_exp_avg_sq != nullptr;
  // An element of an array is read before its new value is stored, so sources and destinations may
  // be the same arrays, and the shard may lie where the gradient was.
  for (int64_t i = 0; i < run.elements; ++i) {
    float g = Z(LoadElement(run.gradient, run.gradient_dtype, i));
    g = P(g * s.multiplier);

    float w = Z(run.master[i]);
    if (s.weight_decay_kind == WeightDecay::kL2) g = Z(g + P(s.weight_decay * w));
    if (s.weight_decay_kind == WeightDecay::kDecoupled) w = P(w * s.decay);

    const float m = Z(P(s.beta1 * Z(run.exp_avg[i])) + P(s.one_minus_beta1 * g));
    float v = Z(P(s.beta2 * Z(run.exp_avg_sq[i])) + P(P(s.one_minus_beta2 * g) * g));
    run.new_exp_avg[i] = m;
    run.new_exp_avg_sq[i] = v;

    if (amsgrad) {
      const float vm = Z(run.max_exp_avg_sq[i]);
      // `v < vm` is false for a NaN, so a NaN in v stays. One in vm needs the second test.
      if (v < vm || std::isnan(vm)) v = vm;
      run.new_max_exp_avg_sq[i] = v;
    }

    const float d = std::sqrt(v) * s.inverse_sqrt_bias_correction2 + s.eps;
    w = Z(w - P(s.step_size * P(m / d)));
    run.new_master[i] = w;
    if (run.shard != nullptr) StoreElement(run.shard, run.shard_dtype, i, w);
  }
}

AdamRun AdamRunOf(const RuleRun& run) {
  return {.elements = run.elements,
          .gradient = run.gradient,
          .gradient_dtype = run.gradient_dtype,
          .master = run.from[0],
          .exp_avg = run.from[1],
          .exp_avg_sq = run.from[2],
          .max_exp_avg_sq = run.from[3],
          .new_master = run.to[0],
          .new_exp_avg = run.to[1],
          .new_exp_avg_sq = run.to[2],
          .new_max_exp_avg_sq = run.to[3],
          .shard = run.shard,
          .shard_dtype = run.shard_dtype,
          .scalars = MakeAdamScalars(*run.values, run.update_count, run.multiplier)};
}

constinit const RuleRow kAdamRow = {
    .name = "adam",
    .title = "Adam",
    .hyper_parameters = kAdamNames,
    .defaults = {},
    .planes = AdamPlanes,
    .validate = ValidateAdam,
    .bounds_after = AdamBounds,
    .reference = [](const RuleRun& run) { UpdateAdamReference(AdamRunOf(run)); }};

}  // namespace ballast
