// The state of one rank's partition under --optimizer=local, and the arithmetic on it. The local
// optimizer (local_optimizer.h) keeps the ledger, decides, and calls these; the scalar references
// do the work on the CPU (scalar_arithmetic.h), kernels with the same bits on a GPU
// (pipeline/device_arithmetic.h). Payloads and weights are where the work is done.
//
// Elements are named by a chunk and the first of them in it. A run of them may go on into the
// chunks after that, as far as these follow it in the group's flat space.
//
// Threads: one call at a time. Errors: those of the device.
#ifndef BALLAST_GPU_WORKER_TRAINING_LOCAL_ARITHMETIC_H_
#define BALLAST_GPU_WORKER_TRAINING_LOCAL_ARITHMETIC_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "cpu_optimizer_service/common/adam.h"
#include "cpu_optimizer_service/common/dtype.h"
#include "cpu_optimizer_service/common/layout.h"
#include "cpu_optimizer_service/common/rounding.h"

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
  // The gradient of each chunk becomes the payload, or that is added to it. `released`, which is
  // nullable, is called once the payload is not needed any more, at the latest by ForgetGradients,
  // after an error too, from any thread.
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
  // The state that Update would leave in these elements, or, without scalars, that they have. It is
  // there when this returns; nothing is changed.
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
