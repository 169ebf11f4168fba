#include "cpu_optimizer_service/kernels/kernels.h"

#include <algorithm>
#include <cstddef>
#include <cstring>

// This file is compiled once per instruction set, by including itself; the order of these matters.
// clang-format off
#include "cpu_optimizer_service/kernels/instruction_sets.h"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu_optimizer_service/kernels/kernels.cc"
#include "hwy/foreach_target.h"

#include "cpu_optimizer_service/kernels/adam-inl.h"
#include "cpu_optimizer_service/kernels/gradient-inl.h"
#include "hwy/highway.h"
// clang-format on

HWY_BEFORE_NAMESPACE();
namespace ballast {
namespace HWY_NAMESPACE {

void UpdateAdamRun(const RuleRun& run, const AdamScalars& s, RedoWriter* redo) {
  UpdateByAdam(run, s, redo);
}
int64_t ThisTarget() { return HWY_TARGET; }

}  // namespace HWY_NAMESPACE
}  // namespace ballast
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "cpu_optimizer_service/common/floating_point_mode.h"

namespace ballast {
namespace {

HWY_EXPORT(UpdateAdamRun);
HWY_EXPORT(BlockSums);
HWY_EXPORT(Accumulate);
HWY_EXPORT(Sum);
HWY_EXPORT(FromFloat);
HWY_EXPORT(ToFloat);
HWY_EXPORT(ThisTarget);

// Asked before the first SetKernelTargetForTest, after which Highway would name only that one.
const std::vector<int64_t>& MachineTargets() {
  static const std::vector<int64_t> targets = hwy::SupportedAndGeneratedTargets();
  return targets;
}

}  // namespace

void UpdateAdam(const RuleRun& run, const AdamScalars& scalars, RedoWriter* redo) {
  // Flushing cannot show in a result (common/rules/arithmetic.h), and spares the hardware's slow path
  // for denormals.
  const ScopedFloatingPointMode mode(Denormals::kFlush);
  HWY_DYNAMIC_DISPATCH(UpdateAdamRun)(run, scalars, redo);
}

void BlockSumsOfSquares(const void* gradient, DType dtype, absl::Span<double> sums) {
  const ScopedFloatingPointMode mode(Denormals::kKeep);
  HWY_DYNAMIC_DISPATCH(BlockSums)(gradient, dtype, sums.data(), sums.size());
}

void AddGradient(float* accumulator, const void* gradient, DType dtype, int64_t elements) {
  const ScopedFloatingPointMode mode(Denormals::kKeep);
  HWY_DYNAMIC_DISPATCH(Accumulate)(accumulator, gradient, dtype, static_cast<size_t>(elements));
}

void SumGradients(float* accumulator, const void* first, const void* second, DType dtype,
                  int64_t elements) {
  const ScopedFloatingPointMode mode(Denormals::kKeep);
  HWY_DYNAMIC_DISPATCH(Sum)(accumulator, first, second, dtype, static_cast<size_t>(elements));
}

void ConvertFromFloat(const float* from, void* to, DType to_dtype, int64_t elements) {
  const ScopedFloatingPointMode mode(Denormals::kKeep);
  HWY_DYNAMIC_DISPATCH(FromFloat)(from, to, to_dtype, static_cast<size_t>(elements));
}

void ReadWeights(const Slot& slot, int64_t begin, int64_t elements, DType dtype, void* out) {
  if (slot.format == StateFormat::kFloat32) {
    return ConvertFromFloat(slot[Plane::kMaster] + begin, out, dtype, elements);
  }
  if (dtype == DType::kBFloat16) {
    std::memcpy(out, slot.As<uint16_t>(Plane::kMaster) + begin, elements * sizeof(uint16_t));
    return;
  }
  constexpr int64_t kPiece = 1024;
  float values[kPiece];
  for (int64_t i = 0; i < elements; i += kPiece) {
    const int64_t some = std::min(kPiece, elements - i);
    ReadPlane(slot, Plane::kMaster, begin + i, absl::MakeSpan(values).first(some));
    ConvertFromFloat(values, static_cast<std::byte*>(out) + i * SizeBytes(dtype), dtype, some);
  }
}

void ConvertToFloat(const void* from, DType from_dtype, float* to, int64_t elements) {
  const ScopedFloatingPointMode mode(Denormals::kKeep);
  HWY_DYNAMIC_DISPATCH(ToFloat)(from, from_dtype, to, static_cast<size_t>(elements));
}

std::vector<std::string> SupportedKernelTargets() {
  std::vector<std::string> names;
  for (const int64_t target : MachineTargets()) names.push_back(hwy::TargetName(target));
  return names;
}

std::string KernelTarget() { return hwy::TargetName(HWY_DYNAMIC_DISPATCH(ThisTarget)()); }

bool SetKernelTargetForTest(const std::string& name) {
  int64_t chosen = 0;  // Means all.
  for (const int64_t target : MachineTargets()) {
    if (hwy::TargetName(target) == name) chosen = target;
  }
  if (chosen == 0 && !name.empty()) return false;
  hwy::SetSupportedTargetsForTest(chosen);
  hwy::GetChosenTarget().Update(hwy::SupportedTargets());
  return true;
}

}  // namespace ballast
#endif  // HWY_ONCE
