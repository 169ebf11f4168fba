#include "cpu_optimizer_service/kernels/kernels.h"

// As kernels.cc, compiled once per instruction set.
// clang-format off
#include "cpu_optimizer_service/kernels/instruction_sets.h"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu_optimizer_service/kernels/matrix_kernels.cc"
#include "hwy/foreach_target.h"

#include "cpu_optimizer_service/kernels/matrix-inl.h"
#include "hwy/highway.h"
// clang-format on

#if HWY_ONCE
#include "cpu_optimizer_service/common/floating_point_mode.h"

namespace ballast {
namespace {

HWY_EXPORT(Multiply);

}  // namespace

void MultiplyMatrices(const MatrixProduct& product) {
  const ScopedFloatingPointMode mode(Denormals::kKeep);
  HWY_DYNAMIC_DISPATCH(Multiply)(product);
}

}  // namespace ballast
#endif  // HWY_ONCE
