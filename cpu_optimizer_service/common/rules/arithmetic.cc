#include "cpu_optimizer_service/common/rules/arithmetic.h"

#include <algorithm>
#include <cfloat>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/text/amounts.h"

namespace ballast {

// The comparison comes before the rounding, in double, where the flushing mode does not reach.
float ToScalar(double x) { return std::fabs(x) < kLeastNormal ? 0.0f : static_cast<float>(x); }

absl::Status ValidateNotNegative(absl::string_view name, double value) {
  if (!std::isfinite(value) || value < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat(name, " must be finite and not negative, got ", FormatExactly(value)));
  }
  if (value > FLT_MAX) {
    return absl::InvalidArgumentError(
        absl::StrCat(name, " must fit in fp32, which updates use, got ", FormatExactly(value)));
  }
  return absl::OkStatus();
}

absl::Status ValidateBeta(absl::string_view name, double value) {
  // The test is written so that NaN fails it: no comparison with NaN is true.
  if (value >= 0 && value < 1) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(name, " must be at least 0 and less than 1, got ", FormatExactly(value)));
}

StateBounds Bounded(std::initializer_list<double> planes, std::initializer_list<double> also) {
  // Half of what fp32 holds, so that a value which rounding takes above its bound is still finite.
  // Not `>`: a NaN is no bound either.
  const auto holds = [](double value) { return value <= FLT_MAX / 2; };
  if (!std::ranges::all_of(planes, holds) || !std::ranges::all_of(also, holds)) return {};
  StateBounds bounds = {.planes = {}};
  std::ranges::copy(planes, bounds.planes.begin());
  return bounds;
}

}  // namespace ballast
