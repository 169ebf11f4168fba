// Muon: momentum, orthogonalized, for matrices.
//
// Source: torch.optim.Muon, Jordan et al. 2024. Two rounds. fp32, P and Z as in arithmetic.h. The
// first one, element by element:
//
//   g = P(gain * Z(gradient))              gain = multiplier * (1 - momentum): unscale, divide, clip
//   b = Z(g + P(momentum * Z(b)))
//   u = nesterov ? Z(g + P(momentum * b)) : b
//   direction = round(u) to bf16
//
// Then O is made of the direction, the whole matrix at once (newton_schulz.h). The second round, with
// decay = 1 - lr * weight_decay and step = lr * AdjustmentOf(the matrix):
//
//   w = Z(P(decay * Z(w)) + P(-step * Z(O)))
//   shard = round(w) to the return dtype
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_RULES_MUON_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_RULES_MUON_H_

#include <cstdint>

#include "cpu_optimizer_service/common/rule.h"

namespace ballast {

// Of the first round. In a run the momentum_buffer alone is written. If `to` of that is null, `from`
// is what the round has made of it. The shard is the direction.
struct MuonDirectionScalars {
  float gain;
  float momentum;
  bool nesterov;
  bool is_again;  // The momentum_buffer is new already.
};
MuonDirectionScalars MakeMuonDirectionScalars(const RuleRun& run);

// Of the second round. In a run the master weights alone are written; its gradient is O, and its
// multiplier the matrix's AdjustmentOf.
struct MuonWeightScalars {
  float decay;
  float step;
};
MuonWeightScalars MakeMuonWeightScalars(const RuleRun& run);

// The factor of lr for a matrix, torch's adjust_lr_fn.
double AdjustmentOf(const HyperParameters& values, int64_t rows, int64_t columns);

extern const RuleRow kMuonRow;

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_RULES_MUON_H_
