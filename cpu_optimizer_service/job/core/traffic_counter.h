// Counts the gradients and weights between a job and its ranks.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_JOB_CORE_TRAFFIC_COUNTER_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_JOB_CORE_TRAFFIC_COUNTER_H_

#include <atomic>
#include <cstdint>

#include "cpu_optimizer_service/job/job_status.h"

namespace ballast {

// Thread-safe. `in_place`: in memory shared with the rank.
class TrafficCounter {
 public:
  void CountGradient(int64_t bytes, bool in_place) {
    (in_place ? gradients_in_place_ : gradients_in_messages_) += bytes;
  }
  void CountWeights(int64_t bytes, bool in_place) {
    (in_place ? weights_in_place_ : weights_in_messages_) += bytes;
  }
  JobTraffic total() const {
    return {.gradient_bytes_in_messages = gradients_in_messages_,
            .gradient_bytes_in_place = gradients_in_place_,
            .weight_bytes_in_messages = weights_in_messages_,
            .weight_bytes_in_place = weights_in_place_};
  }

 private:
  std::atomic<int64_t> gradients_in_messages_ = 0;
  std::atomic<int64_t> gradients_in_place_ = 0;
  std::atomic<int64_t> weights_in_messages_ = 0;
  std::atomic<int64_t> weights_in_place_ = 0;
};

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_JOB_CORE_TRAFFIC_COUNTER_H_
