// SignSGD: the sign of the gradient, with decoupled decay. It has no state but the weights.
//
// Source: Bernstein et al. 2018, "signSGD: Compressed Optimisation for Non-Convex Problems",
// algorithm 1; decay as in torch.optim.AdamW. fp32, P and Z as in arithmetic.h:
//
//   g  = P(Z(gradient) * multiplier)            unscale, divide, clip; maximize: negative
//   w  = Z(P(Z(master) * decay) - lr * sign(g)) decay = 1 - lr * weight_decay; sign(0) = 0
//   shard = round(w) to the return dtype
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_RULES_SIGN_SGD_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_RULES_SIGN_SGD_H_

#include "cpu_optimizer_service/common/rule.h"

namespace ballast {

struct SignSgdScalars {
  float multiplier;
  float decay;
  float lr;
};
SignSgdScalars MakeSignSgdScalars(const RuleRun& run);

extern const RuleRow kSignSgdRow;

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_RULES_SIGN_SGD_H_
