#include "cpu_optimizer_service/kernels/kernels.h"

// As kernels.cc, compiled once per instruction set.
// clang-format off
#include "cpu_optimizer_service/kernels/instruction_sets.h"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu_optimizer_service/kernels/packed_kernels.cc"
#include "hwy/foreach_target.h"

#include "cpu_optimizer_service/kernels/packed-inl.h"
#include "cpu_optimizer_service/kernels/adam-inl.h"
#include "cpu_optimizer_service/kernels/rules-inl.h"
#include "hwy/highway.h"
// clang-format on

HWY_BEFORE_NAMESPACE();
namespace ballast {
namespace HWY_NAMESPACE {

void UpdatePackedByRule(const PackedRun& run, RedoWriter* redo) {
  const RuleRun& rule = run.rule;
  switch (rule.values->rule) {
    case Rule::kAdam:
      return UpdateByAdam(run, MakeAdamScalars(*rule.values, rule.update_count, rule.multiplier),
                          redo);
    case Rule::kSgd:
      return UpdateBySgd(run, redo);
    case Rule::kLion:
      return UpdateByLion(run, redo);
    case Rule::kSignSgd:
      return UpdateBySignSgd(run, redo);
    case Rule::kAdagrad:
      return UpdateByAdagrad(run, redo);
    case Rule::kMuon:
      Check(false, "the rule has packed state (CheckStateFormat)");
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace ballast
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "cpu_optimizer_service/common/floating_point_mode.h"

namespace ballast {
namespace {

HWY_EXPORT(UpdatePackedByRule);

}  // namespace

void UpdatePacked(const PackedRun& run, RedoWriter* redo) {
  const ScopedFloatingPointMode mode(Denormals::kFlush);
  HWY_DYNAMIC_DISPATCH(UpdatePackedByRule)(run, redo);
}

}  // namespace ballast
#endif  // HWY_ONCE
