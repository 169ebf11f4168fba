// AdamW of one element in double, as torch.optim.AdamW defines it: what tests compare trained weights with.
// torch_parity_test holds it to PyTorch's own results.
#ifndef BALLAST_TESTS_SUPPORT_PLAIN_ADAMW_H_
#define BALLAST_TESTS_SUPPORT_PLAIN_ADAMW_H_

#include <cmath>

#include "cpu_optimizer_service/common/hyper_parameters.h"

namespace ballast {

// Without amsgrad and maximize, and with bias correction.
struct PlainAdamW {
  double weight = 0;
  HyperParameters values;
  double exp_avg = 0;
  double exp_avg_sq = 0;
  int updates = 0;

  void Update(double gradient) {
    ++updates;
    weight -= values.lr * values.weight_decay * weight;
    exp_avg = values.beta1 * exp_avg + (1 - values.beta1) * gradient;
    exp_avg_sq = values.beta2 * exp_avg_sq + (1 - values.beta2) * gradient * gradient;
    const double corrected_avg = exp_avg / (1 - std::pow(values.beta1, updates));
    const double corrected_avg_sq = exp_avg_sq / (1 - std::pow(values.beta2, updates));
    weight -= values.lr * corrected_avg / (std::sqrt(corrected_avg_sq) + values.eps);
  }
};

}  // namespace ballast

#endif  // BALLAST_TESTS_SUPPORT_PLAIN_ADAMW_H_
