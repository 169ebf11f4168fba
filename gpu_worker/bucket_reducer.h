// Reduce-scatters gradient buckets on a thread of its own while backward goes on.
//
//   reducer.StartMicroStep(m);
//   model.ForwardBackward(batch, [&](int p) { reducer.GradientReady(p); });
//   ReducedMicroStep done = reducer.FinishMicroStep().value();   // every shard is handed over
//
// Buckets are reduced in one order, that in which backward completes them, whatever the order in
// which a rank's own become ready: the ranks' collectives must match. A parameter that backward
// left out counts as zeros, and is not in the set of used parameters.
//
// Threads: the calls above come from one thread. Between StartMicroStep and the return of
// FinishMicroStep the collective belongs to the reducer's thread, which also calls the consumer.
// The queue is the buckets themselves, so it is bounded.
#ifndef BALLAST_GPU_WORKER_BUCKET_REDUCER_H_
#define BALLAST_GPU_WORKER_BUCKET_REDUCER_H_

#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "cpu_optimizer_service/common/layout.h"
#include "cpu_optimizer_service/common/mutex.h"
#include "gpu_worker/bucket.h"
#include "gpu_worker/collective.h"

namespace ballast::worker {

struct ReducedMicroStep {
  std::vector<int> used_parameters;  // By index, in increasing order.
  bool all_used = true;
  // Time that FinishMicroStep waited, by what the reducer's thread was doing then.
  double reduce_seconds = 0;
  double consume_seconds = 0;
};

class BucketReducer {
 public:
  // Takes this rank's shard of buckets[bucket]: its part of the flat space, cut at the bucket's
  // end, so possibly empty. The memory is the reducer's and valid during the call.
  using Consumer =
      std::function<absl::Status(int bucket, uint32_t micro_step, absl::Span<const float> shard)>;

  // `gradients[group]` is the flat space that the model writes, as long as the buckets reach.
  // Everything is borrowed until destruction.
  BucketReducer(const Layout& layout, absl::Span<const Bucket> buckets,
                absl::Span<const int> backward_order, std::vector<absl::Span<float>> gradients,
                Collective& collective, Consumer consumer);
  ~BucketReducer();

  void StartMicroStep(uint32_t micro_step);
  void GradientReady(int parameter);
  // The first error of the collective or the consumer, kept for all later calls.
  absl::StatusOr<ReducedMicroStep> FinishMicroStep();

 private:
  struct Work {
    double reduce_seconds = 0;
    double consume_seconds = 0;
  };

  void Run();
  absl::Status Reduce(int bucket, uint32_t micro_step);
  void Complete(int parameter) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void ZeroUnused(int parameter);

  const Layout& layout_;
  const absl::Span<const Bucket> buckets_;
  const std::vector<absl::Span<float>> gradients_;
  const Consumer consumer_;
  Collective& collective_;
  std::vector<std::vector<int>> buckets_of_parameter_;
  std::vector<int> order_;    // Of reduction: indices of buckets.
  std::vector<float> shard_;  // Of the communication thread.

  Mutex mutex_;
  CondVar changed_;
  std::vector<GradientBucket> states_ ABSL_GUARDED_BY(mutex_);
  std::vector<bool> completed_ ABSL_GUARDED_BY(mutex_);  // By parameter, in this micro-step.
  size_t next_ ABSL_GUARDED_BY(mutex_);                  // Index into order_; its size: all done.
  uint32_t micro_step_ ABSL_GUARDED_BY(mutex_) = 0;
  Work work_ ABSL_GUARDED_BY(mutex_);
  absl::Status status_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;

  std::thread thread_;
};

}  // namespace ballast::worker

#endif  // BALLAST_GPU_WORKER_BUCKET_REDUCER_H_
