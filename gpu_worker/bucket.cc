#include "gpu_worker/bucket.h"

#include "gpu_worker/check.h"

namespace ballast::worker {

void GradientBucket::Move(BucketState from, BucketState to) {
  Check(state_ == from, "a bucket goes from filling to ready, reducing, reduced and released");
  state_ = to;
}

void GradientBucket::StartFilling() {
  missing_ = parameters_;
  Move(BucketState::kReleased, missing_ == 0 ? BucketState::kReady : BucketState::kFilling);
}

void GradientBucket::CompleteOne() {
  Check(state_ == BucketState::kFilling, "gradients are written to a filling bucket only");
  if (--missing_ == 0) Move(BucketState::kFilling, BucketState::kReady);
}

void GradientBucket::StartReducing() { Move(BucketState::kReady, BucketState::kReducing); }

void GradientBucket::FinishReducing() { Move(BucketState::kReducing, BucketState::kReduced); }

void GradientBucket::Release() { Move(BucketState::kReduced, BucketState::kReleased); }

}  // namespace ballast::worker
