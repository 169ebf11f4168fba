// Tensors by parameter, and the optimizer without offload that a service is compared to.
#ifndef BALLAST_TESTS_UPSTREAM_TENSORS_H_
#define BALLAST_TESTS_UPSTREAM_TENSORS_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <map>
#include <utility>
#include <vector>

#include "cpu_optimizer_service/common/hyper_parameters.h"

namespace ballast {

// By parameter. As gradients: a parameter that is not there received none.
template <typename Real>
using TensorsOf = std::map<int, std::vector<Real>>;
using Tensors = TensorsOf<float>;

template <typename Real>
void AddTo(TensorsOf<Real>& sum, const TensorsOf<Real>& more) {
  for (const auto& [parameter, values] : more) {
    std::vector<Real>& into = sum[parameter];
    into.resize(values.size());
    for (size_t i = 0; i < values.size(); ++i) into[i] += values[i];
  }
}

inline TensorsOf<double> ToDouble(const Tensors& tensors) {
  TensorsOf<double> wide;
  for (const auto& [parameter, values] : tensors) {
    wide[parameter].assign(values.begin(), values.end());
  }
  return wide;
}

// Infinity where the two do not have the same shapes, or one is not a number.
inline double MaxDifference(const Tensors& a, const TensorsOf<double>& b) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  if (a.size() != b.size()) return kInfinity;
  double largest = 0;
  for (const auto& [parameter, values] : a) {
    const auto other = b.find(parameter);
    if (other == b.end() || other->second.size() != values.size()) return kInfinity;
    for (size_t i = 0; i < values.size(); ++i) {
      const double difference = std::fabs(values[i] - other->second[i]);
      if (!(difference <= largest)) largest = std::isnan(difference) ? kInfinity : difference;
    }
  }
  return largest;
}

// torch.optim.Adam in double, without weight decay: parameters without a gradient are left alone.
class PlainAdam {
 public:
  PlainAdam(const Tensors& weights, const HyperParameters& values)
      : weights_(ToDouble(weights)), values_(values) {}

  const TensorsOf<double>& weights() const { return weights_; }

  // `gradients` summed over ranks and micro-steps.
  void Step(const TensorsOf<double>& gradients, double divisor) {
    for (const auto& [parameter, sum] : gradients) {
      State& state = states_[parameter];
      state.exp_avg.resize(sum.size());
      state.exp_avg_sq.resize(sum.size());
      ++state.updates;
      const double correction1 = 1 - std::pow(values_.beta1, state.updates);
      const double correction2 = 1 - std::pow(values_.beta2, state.updates);
      for (size_t i = 0; i < sum.size(); ++i) {
        const double gradient = sum[i] / divisor;
        double& m = state.exp_avg[i];
        double& v = state.exp_avg_sq[i];
        m = values_.beta1 * m + (1 - values_.beta1) * gradient;
        v = values_.beta2 * v + (1 - values_.beta2) * gradient * gradient;
        weights_[parameter][i] -=
            values_.lr / correction1 * m / (std::sqrt(v / correction2) + values_.eps);
      }
    }
  }

 private:
  struct State {
    std::vector<double> exp_avg;
    std::vector<double> exp_avg_sq;
    int updates = 0;
  };

  TensorsOf<double> weights_;
  std::map<int, State> states_;
  const HyperParameters values_;
};

}  // namespace ballast

#endif  // BALLAST_TESTS_UPSTREAM_TENSORS_H_
