// The life of a gradient bucket from one reduction to the next. A reduction sums one micro-step,
// or, with accumulation on the worker, all of a step's:
//
//   released      its memory may be written
//   filling       backward writes a micro-step's gradient into its memory
//   ready         the last parameter's gradient of the micro-step is complete
//   accumulating  the gradient is being added to the sum; only if the reduction takes several
//   accumulated   it is in there; the next micro-step may fill the memory
//   sealed        every micro-step is in the one memory that will be reduced; it is only read
//   reducing      this memory is being reduce-scattered
//   reduced       this rank's shard is there, and is being handed over
//
//   released -> filling -> ready -> sealed -> reducing -> reduced -> released
//                  ^         |         ^
//                  |         v         |  with the last micro-step
//                  |    accumulating   |
//                  |         v         |
//                  +--- accumulated ---+
//     before the last
//
// Moves other than these, and micro-steps out of order, abort the process: they would lose or mix
// gradients. Only a sealed bucket is reduced, and only one that has all its micro-steps is sealed;
// a bucket that sums several is sealed from `accumulated` alone, so what is reduced has the last
// micro-step's gradient in it. Between sealed and released there is no move that writes.
//
// The states are independent of where the memory is; on a device the moves are made in stream
// order.
#ifndef BALLAST_GPU_WORKER_BUCKETS_BUCKET_H_
#define BALLAST_GPU_WORKER_BUCKETS_BUCKET_H_

#include <cstdint>

namespace ballast::worker {

enum class BucketState : uint8_t {
  kFilling,
  kReady,
  kAccumulating,
  kAccumulated,
  kSealed,
  kReducing,
  kReduced,
  kReleased
};

// Thread-compatible.
class GradientBucket {
 public:
  // `parameters`: the number of those with elements in the bucket.
  explicit GradientBucket(int parameters) : parameters_(parameters) {}

  BucketState state() const { return state_; }
  // Whether its gradients are summed in an accumulator, which is then reduced.
  bool accumulates() const { return micro_steps_ > 1; }
  // All micro-steps of the reduction are included.
  bool whole() const { return summed_ == micro_steps_; }

  // Micro-step `micro_step` of the `micro_steps` that the next reduction sums. released or
  // accumulated -> filling, or ready if no parameter has elements here.
  void StartFilling(uint32_t micro_step, uint32_t micro_steps);
  void CompleteOne();         // filling: one more parameter is complete; the last makes it ready
  void StartAccumulating();   // ready -> accumulating
  void FinishAccumulating();  // accumulating -> accumulated
  void Seal();                // whole; accumulated, or ready with nothing to accumulate -> sealed
  void StartReducing();       // sealed -> reducing
  void FinishReducing();      // reducing -> reduced
  void Release();             // reduced -> released

 private:
  void Move(BucketState from, BucketState to);

  const int parameters_;
  int missing_ = 0;
  uint32_t micro_steps_ = 1;  // In the reduction.
  uint32_t summed_ = 0;       // The number included.
  BucketState state_ = BucketState::kReleased;
};

}  // namespace ballast::worker

#endif  // BALLAST_GPU_WORKER_BUCKETS_BUCKET_H_
