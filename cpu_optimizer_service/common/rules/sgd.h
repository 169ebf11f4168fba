// SGD, with momentum, dampening, Nesterov momentum and L2 decay.
//
// Source: torch.optim.SGD (single tensor), Sutskever et al. 2013. fp32, P and Z as in arithmetic.h:
//
//   g  = P(Z(gradient) * multiplier)            unscale, divide, clip; maximize: negative
//   g  = Z(g + P(weight_decay * Z(master)))
//   b  = g                                      in an element's first update, and
//   b  = Z(P(momentum * Z(b)) + P(gain * g))    in later ones; gain = 1 - dampening
//   g  = nesterov ? Z(g + P(momentum * b)) : b
//   w  = Z(Z(master) - P(lr * g))
//   shard = round(w) to the return dtype
//
// Without momentum the three lines of b are left out, and there is no momentum_buffer.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_RULES_SGD_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_RULES_SGD_H_

#include "cpu_optimizer_service/common/rule.h"

namespace ballast {

struct SgdScalars {
  float multiplier;
  float weight_decay;
  bool first;
  float momentum;
  float gain;
  bool nesterov;
  float lr;
};
SgdScalars MakeSgdScalars(const RuleRun& run);

extern const RuleRow kSgdRow;

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_RULES_SGD_H_
