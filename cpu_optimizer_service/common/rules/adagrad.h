// Adagrad, with a decaying learning rate and L2 decay.
//
// Source: torch.optim.Adagrad (single tensor), Duchi et al. 2011. fp32, P and Z as in arithmetic.h:
//
//   g  = P(Z(gradient) * multiplier)            unscale, divide, clip; maximize: negative
//   g  = Z(g + P(weight_decay * Z(master)))
//   s  = Z(Z(s) + P(g * g))                     it begins with initial_accumulator_value
//   w  = Z(Z(master) - P(step_size * P(g / (sqrt(s) + eps))))
//                                               step_size = lr / (1 + (t - 1) * lr_decay)
//   shard = round(w) to the return dtype
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_RULES_ADAGRAD_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_RULES_ADAGRAD_H_

#include "cpu_optimizer_service/common/rule.h"

namespace ballast {

struct AdagradScalars {
  float multiplier;
  float weight_decay;
  float eps;
  float step_size;
};
AdagradScalars MakeAdagradScalars(const RuleRun& run);

extern const RuleRow kAdagradRow;

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_RULES_ADAGRAD_H_
