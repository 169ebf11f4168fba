// The result of a call that may wait (job/pending.h), for a test that looks whether it waits.
#ifndef BALLAST_TESTS_CPU_OPTIMIZER_SERVICE_JOB_OUTCOME_H_
#define BALLAST_TESTS_CPU_OPTIMIZER_SERVICE_JOB_OUTCOME_H_

#include <chrono>
#include <future>
#include <utility>

#include "absl/status/statusor.h"
#include "cpu_optimizer_service/job/pending.h"

namespace ballast {

// Outlives the call.
template <typename T>
class Outcome {
 public:
  Done<T> done() {
    return [this](absl::StatusOr<T> result) { promise_.set_value(std::move(result)); };
  }
  bool ready() const {
    return future_.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
  }
  // Waits for it.
  absl::StatusOr<T> Get() { return future_.get(); }

 private:
  std::promise<absl::StatusOr<T>> promise_;
  std::future<absl::StatusOr<T>> future_ = promise_.get_future();
};

}  // namespace ballast

#endif  // BALLAST_TESTS_CPU_OPTIMIZER_SERVICE_JOB_OUTCOME_H_
