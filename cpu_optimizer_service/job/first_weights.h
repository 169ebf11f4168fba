// Which chunks of a new job have their first weights. Thread-compatible: the job's lock guards it.
#ifndef BALLAST_CPU_OPTIMIZER_SERVICE_JOB_FIRST_WEIGHTS_H_
#define BALLAST_CPU_OPTIMIZER_SERVICE_JOB_FIRST_WEIGHTS_H_

#include <cstdint>
#include <vector>

#include "absl/types/span.h"

namespace ballast {

class FirstWeights {
 public:
  explicit FirstWeights(int64_t chunks) : arrived_(chunks, false), missing_(chunks) {}

  int64_t missing() const { return missing_; }
  bool complete() const { return missing_ == 0; }
  void Arrive(int64_t chunk) {
    if (!arrived_[chunk]) --missing_;
    arrived_[chunk] = true;
  }
  void CompleteAll() {
    arrived_.assign(arrived_.size(), true);
    missing_ = 0;
  }
  // The weights of two attempts do not mix: until all are there, those of a rank that is taken anew
  // count as missing.
  void Forget(absl::Span<const int> chunks) {
    if (complete()) return;
    for (const int chunk : chunks) {
      if (arrived_[chunk]) ++missing_;
      arrived_[chunk] = false;
    }
  }

 private:
  std::vector<bool> arrived_;  // By chunk.
  int64_t missing_ = 0;
};

}  // namespace ballast

#endif  // BALLAST_CPU_OPTIMIZER_SERVICE_JOB_FIRST_WEIGHTS_H_
