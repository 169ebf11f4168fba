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
#include "tests/support/plain_adamw.h"

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

// torch.optim.AdamW in double: parameters without a gradient are left alone.
class PlainAdam {
 public:
  PlainAdam(const Tensors& weights, HyperParameters values) : weights_(ToDouble(weights)) {
    values.weight_decay = 0;
    for (const auto& [parameter, tensor] : weights_) {
      for (const double weight : tensor) elements_[parameter].push_back({weight, values});
    }
  }

  const TensorsOf<double>& weights() const { return weights_; }

  // `gradients` summed over ranks and micro-steps.
  void Step(const TensorsOf<double>& gradients, double divisor) {
    for (const auto& [parameter, sum] : gradients) {
      for (size_t i = 0; i < sum.size(); ++i) {
        PlainAdamW& element = elements_[parameter][i];
        element.Update(sum[i] / divisor);
        weights_[parameter][i] = element.weight;
      }
    }
  }

 private:
  TensorsOf<double> weights_;
  std::map<int, std::vector<PlainAdamW>> elements_;
};

}  // namespace ballast

#endif  // BALLAST_TESTS_UPSTREAM_TENSORS_H_
