// Lion: the sign of an interpolated momentum, with decoupled decay.
//
// Source: Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms", listing 2. fp32, P and
// Z as in arithmetic.h:
//
//   g  = P(Z(gradient) * multiplier)            unscale, divide, clip; maximize: negative
//   c  = Z(P(beta1 * Z(m)) + P(one_minus_beta1 * g))
//   w  = Z(P(Z(master) * decay) - lr * sign(c)) decay = 1 - lr * weight_decay; sign(0) = 0
//   m  = Z(P(beta2 * Z(m)) + P(one_minus_beta2 * g))
//   shard = round(w) to the return dtype
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_RULES_LION_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_RULES_LION_H_

#include "cpu_optimizer_service/common/rule.h"

namespace ballast {

struct LionScalars {
  float multiplier;
  float decay;
  float beta1;
  float one_minus_beta1;
  float beta2;
  float one_minus_beta2;
  float lr;
};
LionScalars MakeLionScalars(const RuleRun& run);

extern const RuleRow kLionRow;

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_RULES_LION_H_
