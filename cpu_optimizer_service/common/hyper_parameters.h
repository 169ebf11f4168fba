// A param group's rule and its hyper-parameters, named as in torch.optim.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_HYPER_PARAMETERS_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_HYPER_PARAMETERS_H_

#include <cstdint>
#include <optional>

namespace ballast {

// The formula of an update. rule.h has the table of all.
enum class Rule : uint8_t { kAdam, kSgd, kLion, kAdagrad, kSignSgd, kMuon };

// Defaults are those of torch.optim.AdamW. DefaultsOf (rule.h) has those of the other rules. A rule
// ignores fields that it does not have.
struct HyperParameters {
  // It says which planes there are, so it is fixed at creation.
  Rule rule = Rule::kAdam;
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
  // With 0 there is no momentum_buffer, so a change between 0 and another value is refused.
  double momentum = 0;
  double dampening = 0;
  bool nesterov = false;
  double lr_decay = 0;
  double initial_accumulator_value = 0;  // What `sum` begins with; fixed at creation.
  // The Newton-Schulz iteration: its number of steps, 0 to 99, and its coefficients.
  int32_t ns_steps = 5;
  double ns_a = 3.4445;
  double ns_b = -4.775;
  double ns_c = 2.0315;
  // A step's size for a matrix of `rows` x `columns` is lr times 0.2 * sqrt(max(rows, columns)), for
  // updates as large as AdamW's. false: times sqrt(max(1, rows / columns)).
  bool match_rms_adamw = false;
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
  std::optional<double> momentum;
  std::optional<double> dampening;
  std::optional<bool> nesterov;
  std::optional<double> lr_decay;
  std::optional<int32_t> ns_steps;
  std::optional<double> ns_a;
  std::optional<double> ns_b;
  std::optional<double> ns_c;
  std::optional<bool> match_rms_adamw;
  std::optional<bool> maximize;

  bool operator==(const HyperParameterOverrides&) const = default;
};

// The one list of all fields except the rule, for formats, conversions and changes. Calls
// each(name, field of values...) for each field that all of `values` have. A value is
// HyperParameters, HyperParameterOverrides (without the fixed ones), or a type with the same field
// names. ForEachOf (rule.h) is for the fields of one rule.
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
  each("momentum", values.momentum...);
  each("dampening", values.dampening...);
  each("nesterov", values.nesterov...);
  each("lr_decay", values.lr_decay...);
  if constexpr ((requires { values.initial_accumulator_value; } && ...)) {
    each("initial_accumulator_value", values.initial_accumulator_value...);
  }
  each("ns_steps", values.ns_steps...);
  each("ns_a", values.ns_a...);
  each("ns_b", values.ns_b...);
  each("ns_c", values.ns_c...);
  each("match_rms_adamw", values.match_rms_adamw...);
  each("maximize", values.maximize...);
}

HyperParameters Apply(HyperParameters base, const HyperParameterOverrides& overrides);
// Both, one after the other.
HyperParameterOverrides Merge(HyperParameterOverrides first, const HyperParameterOverrides& then);

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_COMMON_HYPER_PARAMETERS_H_
