#include "cpu_optimizer_service/common/hyper_parameters.h"

#include <cfloat>
#include <charconv>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "cpu_optimizer_service/common/status.h"

namespace ballast {
namespace {

// Shortest digits that read back the same.
std::string Digits(double value) {
  // The longest double has 24 characters, such as -2.2250738585072014e-308.
  char buffer[32];
  const auto [end, error] = std::to_chars(buffer, buffer + sizeof(buffer), value);
  return std::string(buffer, end);
}

absl::string_view Digits(bool value) { return value ? "true" : "false"; }

absl::Status ValidateNotNegative(absl::string_view name, double value) {
  if (!std::isfinite(value) || value < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat(name, " must be finite and not negative, got ", Digits(value)));
  }
  if (value > FLT_MAX) {
    return absl::InvalidArgumentError(
        absl::StrCat(name, " must fit in fp32, which updates use, got ", Digits(value)));
  }
  return absl::OkStatus();
}

absl::Status ValidateBeta(absl::string_view name, double value) {
  // The test is written so that NaN fails it: no comparison with NaN is true.
  if (value >= 0 && value < 1) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(name, " must be at least 0 and less than 1, got ", Digits(value)));
}

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

absl::Status Validate(const HyperParameters& values) {
  BALLAST_RETURN_IF_ERROR(ValidateNotNegative("lr", values.lr));
  BALLAST_RETURN_IF_ERROR(ValidateBeta("beta1", values.beta1));
  BALLAST_RETURN_IF_ERROR(ValidateBeta("beta2", values.beta2));
  BALLAST_RETURN_IF_ERROR(ValidateNotNegative("eps", values.eps));
  BALLAST_RETURN_IF_ERROR(ValidateNotNegative("weight_decay", values.weight_decay));
  // The scalars of common/adam.h that are computed of several.
  if (values.decoupled_weight_decay) {
    BALLAST_RETURN_IF_ERROR(
        ValidateNotNegative("lr * weight_decay", values.lr * values.weight_decay));
  }
  // The first update has the largest step size, since 1 - beta1^t grows with t.
  if (values.bias_correction) {
    BALLAST_RETURN_IF_ERROR(
        ValidateNotNegative("lr / (1 - beta1)", values.lr / (1 - values.beta1)));
  }
  return absl::OkStatus();
}

HyperParameters Apply(HyperParameters base, const HyperParameterOverrides& overrides) {
  return ApplyAll(base, overrides);
}

HyperParameterOverrides Merge(HyperParameterOverrides first, const HyperParameterOverrides& then) {
  return ApplyAll(first, then);
}

std::string ToString(const HyperParameters& values) {
  return absl::StrCat("lr=", Digits(values.lr), " betas=(", Digits(values.beta1), ", ",
                      Digits(values.beta2), ") eps=", Digits(values.eps),
                      " weight_decay=", Digits(values.weight_decay),
                      " decoupled_weight_decay=", Digits(values.decoupled_weight_decay),
                      " bias_correction=", Digits(values.bias_correction),
                      " amsgrad=", Digits(values.amsgrad), " maximize=", Digits(values.maximize));
}

}  // namespace ballast
