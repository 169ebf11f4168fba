#include "gpu_worker/bucket.h"

#include <gtest/gtest.h>

namespace ballast::worker {
namespace {

TEST(GradientBucket, GoesThroughItsLifeMicroStepAfterMicroStep) {
  GradientBucket bucket(2);
  for (int micro_step = 0; micro_step < 3; ++micro_step) {
    EXPECT_EQ(bucket.state(), BucketState::kReleased);
    bucket.StartFilling();
    bucket.CompleteOne();
    EXPECT_EQ(bucket.state(), BucketState::kFilling);
    bucket.CompleteOne();
    EXPECT_EQ(bucket.state(), BucketState::kReady);
    bucket.StartReducing();
    EXPECT_EQ(bucket.state(), BucketState::kReducing);
    bucket.FinishReducing();
    EXPECT_EQ(bucket.state(), BucketState::kReduced);
    bucket.Release();
  }
}

TEST(GradientBucket, WithoutParametersIsReadyAtOnce) {
  GradientBucket bucket(0);
  bucket.StartFilling();
  EXPECT_EQ(bucket.state(), BucketState::kReady);
}

TEST(GradientBucketDeathTest, WritingBetweenReductionAndReleaseAborts) {
  GradientBucket bucket(1);
  bucket.StartFilling();
  bucket.CompleteOne();
  EXPECT_DEATH(bucket.CompleteOne(), "filling bucket");
  bucket.StartReducing();
  EXPECT_DEATH(bucket.CompleteOne(), "filling bucket");
  EXPECT_DEATH(bucket.StartFilling(), "a bucket goes from");
  bucket.FinishReducing();
  EXPECT_DEATH(bucket.CompleteOne(), "filling bucket");
  EXPECT_DEATH(bucket.StartFilling(), "a bucket goes from");
}

TEST(GradientBucketDeathTest, ReducingBeforeTheLastParameterAborts) {
  GradientBucket bucket(2);
  EXPECT_DEATH(bucket.StartReducing(), "a bucket goes from");
  bucket.StartFilling();
  bucket.CompleteOne();
  EXPECT_DEATH(bucket.StartReducing(), "a bucket goes from");
  EXPECT_DEATH(bucket.Release(), "a bucket goes from");
}

}  // namespace
}  // namespace ballast::worker
