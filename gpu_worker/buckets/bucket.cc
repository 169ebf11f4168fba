#include "gpu_worker/buckets/bucket.h"

#include "cpu_optimizer_service/common/check.h"

namespace ballast::worker {

void GradientBucket::Move(BucketState from, BucketState to) {
  Check(state_ == from,
        "a bucket goes from filling to ready, (accumulated,) sealed, reducing, reduced and "
        "released");
  state_ = to;
}

void GradientBucket::StartFilling(uint32_t micro_step, uint32_t micro_steps) {
  // A released bucket begins a new reduction; an accumulated one goes on with the same.
  const bool first = state_ == BucketState::kReleased;
  if (first) {
    micro_steps_ = micro_steps;
    summed_ = 0;
  }
  Check(micro_steps >= 1 && micro_steps == micro_steps_ && micro_step == summed_ && !whole(),
        "a reduction's micro-steps are added once each and in order");
  missing_ = parameters_;
  Move(first ? BucketState::kReleased : BucketState::kAccumulated,
       missing_ == 0 ? BucketState::kReady : BucketState::kFilling);
}

void GradientBucket::CompleteOne() {
  Check(state_ == BucketState::kFilling, "gradients are written to a filling bucket only");
  if (--missing_ == 0) Move(BucketState::kFilling, BucketState::kReady);
}

void GradientBucket::StartAccumulating() {
  Check(accumulates(), "only sums of several micro-steps are accumulated");
  Move(BucketState::kReady, BucketState::kAccumulating);
}

void GradientBucket::FinishAccumulating() {
  Move(BucketState::kAccumulating, BucketState::kAccumulated);
  ++summed_;
}

void GradientBucket::Seal() {
  if (accumulates()) {
    Check(whole(), "a bucket is sealed with its last micro-step in the accumulator");
    Move(BucketState::kAccumulated, BucketState::kSealed);
  } else {
    // Backward's own memory is what is reduced; its one micro-step is in with the seal.
    Move(BucketState::kReady, BucketState::kSealed);
    ++summed_;
  }
}

void GradientBucket::StartReducing() { Move(BucketState::kSealed, BucketState::kReducing); }

void GradientBucket::FinishReducing() { Move(BucketState::kReducing, BucketState::kReduced); }

void GradientBucket::Release() { Move(BucketState::kReduced, BucketState::kReleased); }

}  // namespace ballast::worker
