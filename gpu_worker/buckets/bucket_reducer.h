// Reduce-scatters gradient buckets on a thread of its own while backward goes on.
//
//   reducer.StartMicroStep(m, micro_steps);
//   model.ForwardBackward(batch, 1, [&](int p) { reducer.GradientReady(p); });
//   ReducedMicroStep done = reducer.FinishMicroStep().value();   // every gradient is handed over
//
// Accumulation in the service reduces every micro-step. Accumulation on the worker adds each
// micro-step's gradient, as the buckets become ready, to fp32 accumulators, and reduces those in
// the last one; with one micro-step there is nothing to add, and no accumulator.
//
// Buckets are reduced in one order, that in which backward completes them, even if a rank's own
// become ready in another: the ranks' collectives must match. A parameter that backward left out
// counts as zeros, and is not in the set of used parameters.
//
// Threads: one thread makes the calls above. Between StartMicroStep and the return of
// FinishMicroStep the collective belongs to the reducer's thread, which also calls the consumer.
// The queue is the buckets themselves, so it is bounded.
#ifndef BALLAST_GPU_WORKER_BUCKETS_BUCKET_REDUCER_H_
#define BALLAST_GPU_WORKER_BUCKETS_BUCKET_REDUCER_H_

#include <cstdint>
#include <functional>
#include <optional>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "cpu_optimizer_service/common/buckets.h"
#include "cpu_optimizer_service/common/layout.h"
#include "cpu_optimizer_service/common/system/mutex.h"
#include "gpu_worker/buckets/bucket.h"
#include "gpu_worker/buckets/bucket_order.h"
#include "gpu_worker/buckets/non_finite.h"
#include "gpu_worker/collective/collective.h"

namespace ballast::worker {

enum class Accumulation : uint8_t { kService, kWorker };

struct ReducerOptions {
  Accumulation accumulation = Accumulation::kService;
  // By group, the format in which gradients are sent. This rank's own are searched for elements
  // that are not finite in it, before a bucket is reduced. Empty: no search.
  std::vector<DType> checked_as;
  // Called on the reducer's thread after each reduce-scatter, with its duration. Nullable.
  std::function<void(int bucket, double seconds)> on_reduced;
};

// This rank's part of a reduced bucket, cut at the bucket's end, so possibly empty. The memory is
// the reducer's and valid during the call.
struct ReducedGradient {
  int bucket = 0;
  uint32_t micro_step_begin = 0;  // Summed over micro-steps [begin, end).
  uint32_t micro_step_end = 1;
  bool final = false;  // These include the step's last micro-step.
  absl::Span<const float> values;
};

struct ReducedMicroStep {
  std::vector<int> used_parameters;  // By index, in increasing order.
  bool all_used = true;
  bool reached_nothing() const { return used_parameters.empty() && !all_used; }
  std::optional<NonFinite> non_finite;  // The first, by parameter and element.
  // Time that FinishMicroStep waited, by the reducer's work at that time.
  double reduce_seconds = 0;
  double consume_seconds = 0;
};

class BucketReducer {
 public:
  // Returns no error: after an error the other ranks still wait for the rest.
  using Consumer = std::function<void(const ReducedGradient& gradient)>;

  // `gradients[group]` is the flat space that the model writes, as long as the buckets reach.
  // Everything is borrowed until destruction.
  BucketReducer(const Layout& layout, absl::Span<const Bucket> buckets,
                absl::Span<const int> backward_order, std::vector<absl::Span<float>> gradients,
                Collective& collective, Consumer consumer, ReducerOptions options = {});
  ~BucketReducer();

  // Called for the micro-steps of a step in order, always with the same `micro_steps`.
  void StartMicroStep(uint32_t micro_step, uint32_t micro_steps);
  void GradientReady(int parameter);
  // The first error of the collective, kept for all later calls. If backward reached no parameter
  // at all, this rank has taken part in the micro-step's collectives with zeros, so that they match
  // on all ranks. It must not seal the step.
  absl::StatusOr<ReducedMicroStep> FinishMicroStep();

 private:
  struct Work {
    double reduce_seconds = 0;
    double consume_seconds = 0;
  };
  struct MicroStep {
    uint32_t index = 0;
    uint32_t of = 1;
    bool last() const { return index + 1 == of; }
  };
  struct Parameter {
    bool completed = true;  // In this micro-step.
    bool reached = false;   // The same, by backward.
    // The first micro-step of this step whose backward reached it.
    std::optional<uint32_t> first_reached;
  };
  // A parameter's part of a bucket, and how the accumulator treats this micro-step's gradient.
  struct Addend {
    enum { kZero, kAssign, kAdd } what;
    int64_t begin = 0;  // In the group's flat space.
    int64_t end = 0;
  };

  bool sums_here(uint32_t micro_steps) const {
    return options_.accumulation == Accumulation::kWorker && micro_steps > 1;
  }

  void Run();
  absl::Status Process(int bucket, const MicroStep& micro_step);
  void Accumulate(int bucket, const MicroStep& micro_step);
  absl::Status Reduce(int bucket, const MicroStep& micro_step);
  std::vector<Addend> Addends(int bucket, const MicroStep& micro_step) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void FindNonFinite(int bucket, absl::Span<const float> sealed);
  void Complete(int parameter) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void ZeroUnused(int parameter);

  const Layout& layout_;
  const absl::Span<const Bucket> buckets_;
  const std::vector<absl::Span<float>> gradients_;
  const Consumer consumer_;
  const ReducerOptions options_;
  Collective& collective_;
  const BucketOrder order_;

  // Used by the reducer's thread, or by StartMicroStep while that is idle.
  std::vector<float> shard_;
  std::vector<std::vector<float>> accumulators_;  // By group, as `gradients_`; empty: none.

  mutable Mutex mutex_;
  CondVar changed_;
  std::vector<GradientBucket> states_ ABSL_GUARDED_BY(mutex_);
  std::vector<Parameter> parameters_ ABSL_GUARDED_BY(mutex_);
  size_t next_ ABSL_GUARDED_BY(mutex_);  // Index into order_.reduction; its size: all done.
  MicroStep micro_step_ ABSL_GUARDED_BY(mutex_);
  std::optional<NonFinite> non_finite_ ABSL_GUARDED_BY(mutex_);  // In this micro-step.
  Work work_ ABSL_GUARDED_BY(mutex_);
  absl::Status status_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;

  std::thread thread_;
};

}  // namespace ballast::worker

#endif  // BALLAST_GPU_WORKER_BUCKETS_BUCKET_REDUCER_H_
