// The life of a gradient bucket in one micro-step:
//
//   filling    backward writes into its memory
//   ready      its last parameter's gradient is complete
//   reducing   the communication thread reduce-scatters it
//   reduced    this rank's shard is there, and is being handed over; the bucket is only read
//   released   its memory may be written again, by the next micro-step
//
// Moves other than these, in this order, abort the process: they would mix gradients.
#ifndef BALLAST_GPU_WORKER_BUCKET_H_
#define BALLAST_GPU_WORKER_BUCKET_H_

#include <cstdint>

namespace ballast::worker {

enum class BucketState : uint8_t { kFilling, kReady, kReducing, kReduced, kReleased };

// Thread-compatible.
class GradientBucket {
 public:
  // `parameters`: how many have elements in the bucket.
  explicit GradientBucket(int parameters) : parameters_(parameters) {}

  BucketState state() const { return state_; }

  void StartFilling();    // released -> filling, or ready if no parameter has elements here
  void CompleteOne();     // filling: one more parameter is complete; the last makes it ready
  void StartReducing();   // ready -> reducing
  void FinishReducing();  // reducing -> reduced
  void Release();         // reduced -> released

 private:
  void Move(BucketState from, BucketState to);

  const int parameters_;
  int missing_ = 0;
  BucketState state_ = BucketState::kReleased;
};

}  // namespace ballast::worker

#endif  // BALLAST_GPU_WORKER_BUCKET_H_
