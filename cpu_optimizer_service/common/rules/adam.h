// One Adam or AdamW update of a run of elements: the written formula, and its scalar reference.
//
// Source: torch.optim.Adam and AdamW (single tensor, not capturable), Kingma and Ba 2015,
// Loshchilov and Hutter 2019. fp32 throughout; plain IEEE multiply, add, subtract, divide, square
// root in exactly this order, no fused multiply-add, denormals as zero (Z and P in arithmetic.h):
//
// clang-format off
//   g  = Z(gradient)
//   g  = P(g * multiplier)                      unscale, divide, clip; maximize: negative
//   w  = Z(master)
//   g  = Z(g + P(weight_decay * w))             L2 decay only
//   w  = P(w * decay)                           decoupled decay only; decay = 1 - lr * weight_decay
//   m  = Z(P(beta1 * Z(m)) + P(one_minus_beta1 * g))
//   v  = Z(P(beta2 * Z(v)) + P(P(one_minus_beta2 * g) * g))
//   vm = max(Z(vm), v), NaN if either is        amsgrad only; then vm stands for v below
//   d  = sqrt(v) * inverse_sqrt_bias_correction2 + eps
//   w  = Z(w - P(step_size * P(m / d)))         step_size = lr / bias_correction1
//   shard = round(w) to the return dtype
//
// clang-format on
// A stored moment is thus never denormal.
//
// The scalars are computed once per run in double and rounded to fp32, bias corrections
// (1 - beta^t) by repeated squaring, so that no math library enters.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_RULES_ADAM_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_RULES_ADAM_H_

#include <cstdint>

#include "cpu_optimizer_service/common/dtype.h"
#include "cpu_optimizer_service/common/hyper_parameters.h"
#include "cpu_optimizer_service/common/rule.h"

namespace ballast {

enum class WeightDecay : uint8_t { kNone, kDecoupled, kL2 };

// The formula's scalars for one update count.
struct AdamScalars {
  WeightDecay weight_decay_kind;
  float multiplier;
  float weight_decay;
  float decay;
  float beta1;
  float one_minus_beta1;
  float beta2;
  float one_minus_beta2;
  float inverse_sqrt_bias_correction2;
  float eps;
  float step_size;
};

// `update_count` is the number of this update for these elements, from 1. `multiplier` is the
// group's in the decision (gradient_norm.h), before the sign of `maximize`. Scalars that are
// denormal in fp32 become zero.
AdamScalars MakeAdamScalars(const HyperParameters& values, int64_t update_count, float multiplier);

// beta^exponent by repeated squaring in double.
double PowerBySquaring(double beta, int64_t exponent);

// `elements` consecutive elements with equal scalars. Sources and destinations are the same arrays
// (in place) or do not overlap. One exception: the shard may replace a gradient of its element
// size. Pointers need only their element type's alignment.
struct AdamRun {
  int64_t elements;
  const void* gradient;  // of gradient_dtype
  DType gradient_dtype;
  const float* master;
  const float* exp_avg;
  const float* exp_avg_sq;
  const float* max_exp_avg_sq;  // nullptr: no amsgrad
  float* new_master;
  float* new_exp_avg;
  float* new_exp_avg_sq;
  float* new_max_exp_avg_sq;  // nullptr: no amsgrad
  void* shard;                // of shard_dtype; nullptr: not wanted
  DType shard_dtype;
  AdamScalars scalars;
};

// The specification, one element at a time. The vector version is UpdateAdam in kernels.h.
void UpdateAdamReference(const AdamRun& run);

AdamRun AdamRunOf(const RuleRun& run);

// The bounds of the row:
//
//   G                                           no gradient is larger
//        (+ weight_decay * W, with L2 decay)
//   M' = max(M, G)                              m is a mean of the old m and g
//   V' = max(V, G * G)
//   W' = W * max(1, |1 - lr * weight_decay|) + lr / (1 - beta1) * M' / eps
//
// each with a factor for fp32's rounding up. The denominator is at least eps, so eps = 0 gives no
// bound. With this crude bound of the quotient W' rises by lr * 1e8 in a usual step. It reaches
// fp32's limit only after more steps than any training has.
extern const RuleRow kAdamRow;

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_RULES_ADAM_H_
