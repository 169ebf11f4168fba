#include <algorithm>

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

HWY_BEFORE_NAMESPACE();
namespace ballast {
namespace HWY_NAMESPACE {

void UpdateSgdRun(const RuleRun& run, RedoWriter* redo) { UpdateBySgd(run, redo); }
void UpdateLionRun(const RuleRun& run, RedoWriter* redo) { UpdateByLion(run, redo); }
void UpdateAdagradRun(const RuleRun& run, RedoWriter* redo) { UpdateByAdagrad(run, redo); }
void UpdateSignSgdRun(const RuleRun& run, RedoWriter* redo) { UpdateBySignSgd(run, redo); }
void UpdateMuonRun(const RuleRun& run, RedoWriter* redo) {
  if (run.round == Round::kSecond) {
    return UpdateByKernel<MuonWeightKernel>(run, MakeMuonWeightScalars(run), redo);
  }
  const MuonDirectionScalars s = MakeMuonDirectionScalars(run);
  RuleRun direction = run;
  direction.from[0] = run.from[1];
  direction.to[0] = run.to[1];
  if (!s.is_again) return UpdateByKernel<MuonDirectionKernel<false>>(direction, s, redo);
  // The loop stores what it has computed of the plane; here nobody wants that.
  constexpr int64_t kPiece = 1024;
  float unwanted[kPiece];
  direction.to[0] = unwanted;
  for (int64_t begin = 0; begin < run.elements; begin += kPiece) {
    const auto at = [begin](const void* data, DType dtype) {
      return static_cast<const char*>(data) + begin * SizeBytes(dtype);
    };
    direction.elements = std::min(kPiece, run.elements - begin);
    direction.gradient = at(run.gradient, run.gradient_dtype);
    direction.from[0] = run.from[1] + begin;
    direction.shard = const_cast<char*>(at(run.shard, run.shard_dtype));
    UpdateByKernel<MuonDirectionKernel<true>>(direction, s, nullptr);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace ballast
HWY_AFTER_NAMESPACE();

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
