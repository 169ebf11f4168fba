// All hyper-parameters of a param group, named as in torch.optim.Adam and AdamW.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_HYPER_PARAMETERS_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_HYPER_PARAMETERS_H_

#include <optional>
#include <string>

#include "absl/status/status.h"

namespace ballast {

// Defaults are those of torch.optim.AdamW.
struct HyperParameters {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 1e-2;
  // AdamW (true): the weight shrinks by lr * weight_decay. Adam (false): weight_decay * weight is
  // added to the gradient, which is L2 regularisation.
  bool decoupled_weight_decay = true;
  bool bias_correction = true;
  // Divide by the largest exp_avg_sq so far. It needs a fourth plane, so it is fixed at creation.
  bool amsgrad = false;
  bool maximize = false;

  bool operator==(const HyperParameters&) const = default;
};

// Changes to some hyper-parameters of a group; absent ones do not change.
struct HyperParameterOverrides {
  std::optional<double> lr;
  std::optional<double> beta1;
  std::optional<double> beta2;
  std::optional<double> eps;
  std::optional<double> weight_decay;
  std::optional<bool> decoupled_weight_decay;
  std::optional<bool> bias_correction;
  std::optional<bool> maximize;

  bool operator==(const HyperParameterOverrides&) const = default;
};

// The one list of all fields, for formats, conversions and changes. Calls each(name, field of
// values...) for each field that all of `values` have. A value is HyperParameters,
// HyperParameterOverrides (without amsgrad), or a type with the same field names.
template <typename Each, typename... Values>
void ForEachHyperParameter(Each&& each, Values&... values) {
  each("lr", values.lr...);
  each("beta1", values.beta1...);
  each("beta2", values.beta2...);
  each("eps", values.eps...);
  each("weight_decay", values.weight_decay...);
  each("decoupled_weight_decay", values.decoupled_weight_decay...);
  each("bias_correction", values.bias_correction...);
  if constexpr ((requires { values.amsgrad; } && ...)) each("amsgrad", values.amsgrad...);
  each("maximize", values.maximize...);
}

// INVALID_ARGUMENT, with the first value's name, if torch would refuse it too: lr, eps and
// weight_decay must be finite and not negative, betas in [0, 1). Also if one of these three does
// not fit fp32, or the product lr * weight_decay if decoupled, or the first step size lr / (1 -
// beta1) if bias-corrected.
absl::Status Validate(const HyperParameters& values);

HyperParameters Apply(HyperParameters base, const HyperParameterOverrides& overrides);
// Both, one after the other.
HyperParameterOverrides Merge(HyperParameterOverrides first, const HyperParameterOverrides& then);

// "lr=0.001 betas=(0.9, 0.999) ...", every field, shortest digits that read back the same.
std::string ToString(const HyperParameters& values);

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_HYPER_PARAMETERS_H_
