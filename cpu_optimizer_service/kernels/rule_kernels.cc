#include "cpu_optimizer_service/kernels/kernels.h"

// As kernels.cc, compiled once per instruction set; apart from it so that both compile at once.
// clang-format off
#include "cpu_optimizer_service/kernels/instruction_sets.h"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu_optimizer_service/kernels/rule_kernels.cc"
#include "hwy/foreach_target.h"

#include "cpu_optimizer_service/kernels/rules-inl.h"
#include "hwy/highway.h"
// clang-format on

#if HWY_ONCE
#include "cpu_optimizer_service/common/floating_point_mode.h"

namespace ballast {
namespace {

HWY_EXPORT(UpdateSgdRun);
HWY_EXPORT(UpdateLionRun);
HWY_EXPORT(UpdateAdagradRun);
HWY_EXPORT(UpdateSignSgdRun);
HWY_EXPORT(UpdateMuonRun);

}  // namespace

void UpdateByRule(const RuleRun& run, RedoWriter* redo) {
  const ScopedFloatingPointMode mode(Denormals::kFlush);
  switch (run.values->rule) {
    case Rule::kAdam:
      return UpdateAdam(run, MakeAdamScalars(*run.values, run.update_count, run.multiplier), redo);
    case Rule::kSgd:
      return HWY_DYNAMIC_DISPATCH(UpdateSgdRun)(run, redo);
    case Rule::kLion:
      return HWY_DYNAMIC_DISPATCH(UpdateLionRun)(run, redo);
    case Rule::kAdagrad:
      return HWY_DYNAMIC_DISPATCH(UpdateAdagradRun)(run, redo);
    case Rule::kSignSgd:
      return HWY_DYNAMIC_DISPATCH(UpdateSignSgdRun)(run, redo);
    case Rule::kMuon:
      return HWY_DYNAMIC_DISPATCH(UpdateMuonRun)(run, redo);
  }
}

}  // namespace ballast
#endif  // HWY_ONCE
