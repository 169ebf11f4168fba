#include "client/loss_scaler.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "cpu_optimizer_service/common/status.h"

namespace ballast::client {
namespace {

constexpr absl::string_view kFormat = "loss_scaler.1";
constexpr float kFactor = 2;
// kMaxScale is 2 to this power.
constexpr int kMaxScalePower = 64;

absl::Status CheckOptions(const LossScalerOptions& options) {
  if (options.initial_scale_power < 0 || options.initial_scale_power > kMaxScalePower) {
    return absl::InvalidArgumentError(absl::StrCat("initial_scale_power is ",
                                                   options.initial_scale_power, ", expected 0 to ",
                                                   kMaxScalePower));
  }
  if (options.window < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("window is ", options.window, ", expected 1 or more steps"));
  }
  if (options.hysteresis < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("hysteresis is ", options.hysteresis, ", expected 1 or more overflows"));
  }
  // Written so that NaN is refused.
  const float first_scale = std::ldexp(1.0F, options.initial_scale_power);
  if (!(options.min_scale > 0 && options.min_scale <= first_scale)) {
    return absl::InvalidArgumentError(
        absl::StrCat("min_scale is ", options.min_scale,
                     ", expected more than 0, at most the first scale, ", first_scale));
  }
  return absl::OkStatus();
}

}  // namespace

DynamicLossScaler::DynamicLossScaler(const LossScalerOptions& options)
    : options_(options),
      scale_(std::ldexp(1.0F, options.initial_scale_power)),
      hysteresis_left_(options.hysteresis) {}

absl::StatusOr<DynamicLossScaler> DynamicLossScaler::Create(const LossScalerOptions& options) {
  BALLAST_RETURN_IF_ERROR(CheckOptions(options));
  return DynamicLossScaler(options);
}

absl::StatusOr<DynamicLossScaler> DynamicLossScaler::Deserialize(absl::string_view state,
                                                                 const LossScalerOptions& options) {
  BALLAST_ASSIGN_OR_RETURN(DynamicLossScaler scaler, Create(options));
  const std::vector<absl::string_view> words = absl::StrSplit(state, ' ');
  // A scale that is NaN or infinite fails the comparisons.
  const bool good = words.size() == 4 && words[0] == kFormat &&
                    absl::SimpleAtof(words[1], &scaler.scale_) &&
                    absl::SimpleAtoi(words[2], &scaler.hysteresis_left_) &&
                    absl::SimpleAtoi(words[3], &scaler.steps_since_overflow_) &&
                    scaler.scale_ > 0 && scaler.scale_ <= kMaxScale &&
                    scaler.hysteresis_left_ >= 1 && scaler.steps_since_overflow_ >= 0;
  if (!good) {
    return absl::InvalidArgumentError(absl::StrCat("'", absl::string_view(state).substr(0, 64),
                                                   "' is not the state of a loss scaler"));
  }
  // The options may have changed since the state was saved.
  scaler.hysteresis_left_ = std::min(scaler.hysteresis_left_, options.hysteresis);
  scaler.scale_ = std::max(scaler.scale_, options.min_scale);
  return scaler;
}

std::string DynamicLossScaler::Serialize() const {
  // Nine digits are enough to read back every float exactly.
  return absl::StrFormat("%s %.9g %d %d", kFormat, scale_, hysteresis_left_, steps_since_overflow_);
}

void DynamicLossScaler::Update(bool overflow) {
  if (overflow) {
    if (hysteresis_left_ == 1) {
      scale_ = std::max(scale_ / kFactor, options_.min_scale);
    } else {
      --hysteresis_left_;
    }
    steps_since_overflow_ = 0;
    return;
  }
  if (options_.consecutive_hysteresis) hysteresis_left_ = options_.hysteresis;
  // As DeepSpeed counts: not at the first step, so the first doubling is at step window + 1.
  if (steps_since_overflow_ > 0 && steps_since_overflow_ % options_.window == 0) {
    hysteresis_left_ = options_.hysteresis;
    scale_ = std::min(scale_ * kFactor, kMaxScale);
  }
  ++steps_since_overflow_;
}

}  // namespace ballast::client
