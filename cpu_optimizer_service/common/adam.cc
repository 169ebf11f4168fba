#include "cpu_optimizer_service/common/adam.h"

#include <cmath>

#include "cpu_optimizer_service/common/float_format.h"

namespace ballast {
namespace {

constexpr float kLeastNormal = 0x1p-126f;

float Z(float x) { return std::fabs(x) < kLeastNormal ? 0.0f : x; }
float P(float x) { return std::fabs(x) <= kLeastNormal ? 0.0f : x; }

// The comparison comes before the rounding, in double, where the flushing mode does not reach.
float ToScalar(double x) { return std::fabs(x) < kLeastNormal ? 0.0f : static_cast<float>(x); }

WeightDecay KindOf(const HyperParameters& values) {
  // To leave the decay out is not the same as to multiply by 1: P would make zero of a weight of
  // 2^-126.
  if (values.weight_decay == 0) return WeightDecay::kNone;
  return values.decoupled_weight_decay ? WeightDecay::kDecoupled : WeightDecay::kL2;
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
      .multiplier = Z(values.maximize ? -multiplier : multiplier),
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

}  // namespace ballast
