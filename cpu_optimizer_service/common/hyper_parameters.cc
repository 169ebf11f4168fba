#include "cpu_optimizer_service/common/hyper_parameters.h"

namespace ballast {
namespace {

// To values, or to overrides.
template <typename To>
To ApplyAll(To base, const HyperParameterOverrides& overrides) {
  const auto apply = [](const char*, auto& value, const auto& other) {
    if (other.has_value()) value = *other;
  };
  ForEachHyperParameter(apply, base, overrides);
  return base;
}

}  // namespace

HyperParameters Apply(HyperParameters base, const HyperParameterOverrides& overrides) {
  return ApplyAll(base, overrides);
}

HyperParameterOverrides Merge(HyperParameterOverrides first, const HyperParameterOverrides& then) {
  return ApplyAll(first, then);
}

}  // namespace ballast
