// The state of one rank's partition with --optimizer=local, and the arithmetic on it. The local
// optimizer (local_optimizer.h) keeps the ledger, decides, and calls these. The scalar references
// do the work on the CPU (scalar_arithmetic.h), kernels with the same bits on a GPU
// (pipeline/device_arithmetic.h). Payloads and weights are on the same device.
//
// A chunk and the first element in it name a run of elements. The run may continue into the next
// chunks, as long as these follow in the group's flat space.
//
// Threads: one call at a time. Errors: the device's.
#ifndef BALLAST_GPU_WORKER_TRAINING_LOCAL_ARITHMETIC_H_
#define BALLAST_GPU_WORKER_TRAINING_LOCAL_ARITHMETIC_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "cpu_optimizer_service/common/dtype.h"
#include "cpu_optimizer_service/common/layout.h"
#include "cpu_optimizer_service/common/rounding.h"
#include "cpu_optimizer_service/common/rules/adam.h"

namespace ballast::worker {

// Elements of one parameter, from the beginning of a block (gradient_norm.h) on. The last block may
// be short.
struct BlocksInChunks {
  int chunk = 0;
  int64_t begin = 0;
  int64_t elements = 0;

  int64_t blocks() const { return DivideUp(elements, kBlockElements); }
};

class LocalArithmetic {
 public:
  virtual ~LocalArithmetic() = default;

  // Moments become zero, the master weights `values`, and the chunk's weights those rounded.
  virtual absl::Status SetFirstWeights(int chunk, absl::Span<const float> values) = 0;
  // The gradient of each chunk becomes the payload, or the payload is added to it. `released`,
  // which is nullable, is called once the payload is no longer needed, at the latest by
  // ForgetGradients, also after an error, from any thread.
  struct Addition {
    int chunk = 0;
    bool first = true;
    absl::Span<const std::byte> payload;
    std::function<void()> released;
  };
  virtual absl::Status AddGradients(std::vector<Addition> additions) = 0;
  virtual absl::Status ZeroGradient(int chunk) = 0;
  // BlockSumOfSquaresReference of the blocks of the gradient, run after run; `sums` are there when
  // Finish returns. Once before that.
  virtual absl::Status BlockSums(absl::Span<const BlocksInChunks> runs,
                                 absl::Span<double> sums) = 0;
  // Elements of the chunk's gradient from `begin` on; they are there when Finish returns.
  virtual absl::Status ReadGradient(int chunk, int64_t begin, absl::Span<float> values) = 0;
  // UpdateAdamReference of `elements` elements from the chunk's `begin` on, in place; the weights
  // follow.
  virtual absl::Status Update(int chunk, int64_t begin, int64_t elements,
                              const AdamScalars& scalars) = 0;
  // The state of these elements after Update, or, without scalars, the present one. It is complete
  // when this returns; nothing is changed.
  struct State {
    std::vector<float> master;
    std::vector<float> exp_avg;
    std::vector<float> exp_avg_sq;
  };
  virtual absl::Status TryUpdate(int chunk, int64_t begin, int64_t elements,
                                 const AdamScalars* scalars, State& state) = 0;
  // Waits until all of the above is done.
  virtual absl::Status Finish() = 0;
  // After Finish: the next gradient of every chunk is a first one.
  virtual void ForgetGradients() {}
};

}  // namespace ballast::worker

#endif  // BALLAST_GPU_WORKER_TRAINING_LOCAL_ARITHMETIC_H_
