#include "gpu_worker/buckets/bucket.h"

#include <gtest/gtest.h>

namespace ballast::worker {
namespace {

// A bucket of one parameter, brought to a state on the way of a sum of `micro_steps`.
GradientBucket BucketIn(BucketState state, uint32_t micro_steps) {
  GradientBucket bucket(1);
  const auto there = [&] { return bucket.state() == state; };
  for (uint32_t micro_step = 0; micro_step < micro_steps && !there(); ++micro_step) {
    bucket.StartFilling(micro_step, micro_steps);
    if (there()) break;
    bucket.CompleteOne();
    if (there() || micro_steps == 1) break;
    bucket.StartAccumulating();
    if (there()) break;
    bucket.FinishAccumulating();
  }
  if (!there()) bucket.Seal();
  if (!there()) bucket.StartReducing();
  if (!there()) bucket.FinishReducing();
  if (!there()) bucket.Release();
  EXPECT_EQ(bucket.state(), state);
  return bucket;
}

TEST(GradientBucket, GoesThroughItsLifeMicroStepAfterMicroStep) {
  GradientBucket bucket(2);
  for (int micro_step = 0; micro_step < 3; ++micro_step) {
    EXPECT_EQ(bucket.state(), BucketState::kReleased);
    bucket.StartFilling(0, 1);
    bucket.CompleteOne();
    EXPECT_EQ(bucket.state(), BucketState::kFilling);
    bucket.CompleteOne();
    EXPECT_EQ(bucket.state(), BucketState::kReady);
    EXPECT_FALSE(bucket.accumulates());
    bucket.Seal();
    EXPECT_EQ(bucket.state(), BucketState::kSealed);
    bucket.StartReducing();
    EXPECT_EQ(bucket.state(), BucketState::kReducing);
    bucket.FinishReducing();
    EXPECT_EQ(bucket.state(), BucketState::kReduced);
    bucket.Release();
  }
}

TEST(GradientBucket, SumsAllMicroStepsBeforeItIsSealed) {
  GradientBucket bucket(1);
  for (const uint32_t micro_steps : {3u, 1u, 2u}) {  // As many as each step has.
    for (uint32_t micro_step = 0; micro_step < micro_steps; ++micro_step) {
      bucket.StartFilling(micro_step, micro_steps);
      EXPECT_FALSE(bucket.whole());
      bucket.CompleteOne();
      EXPECT_EQ(bucket.accumulates(), micro_steps > 1);
      if (!bucket.accumulates()) continue;
      bucket.StartAccumulating();
      bucket.FinishAccumulating();
      EXPECT_EQ(bucket.state(), BucketState::kAccumulated);
    }
    bucket.Seal();
    EXPECT_TRUE(bucket.whole());
    bucket.StartReducing();
    bucket.FinishReducing();
    bucket.Release();
  }
}

TEST(GradientBucket, WithoutParametersIsReadyAtOnce) {
  GradientBucket bucket(0);
  bucket.StartFilling(0, 1);
  EXPECT_EQ(bucket.state(), BucketState::kReady);
}

TEST(GradientBucketDeathTest, WritingFromTheSealToTheReleaseAborts) {
  for (const uint32_t micro_steps : {1u, 2u}) {
    for (const BucketState state :
         {BucketState::kSealed, BucketState::kReducing, BucketState::kReduced}) {
      GradientBucket bucket = BucketIn(state, micro_steps);
      EXPECT_DEATH(bucket.CompleteOne(), "filling bucket");
      EXPECT_DEATH(bucket.StartFilling(0, micro_steps), "are added once each|a bucket goes from");
      EXPECT_DEATH(bucket.StartAccumulating(), "several micro-steps|a bucket goes from");
      EXPECT_DEATH(bucket.FinishAccumulating(), "a bucket goes from");
    }
  }
}

TEST(GradientBucketDeathTest, WritingToAReadyBucketAborts) {
  EXPECT_DEATH(BucketIn(BucketState::kReady, 1).CompleteOne(), "filling bucket");
  EXPECT_DEATH(BucketIn(BucketState::kReady, 2).CompleteOne(), "filling bucket");
  EXPECT_DEATH(BucketIn(BucketState::kAccumulating, 2).StartFilling(0, 2), "a bucket goes from");
}

TEST(GradientBucketDeathTest, OnlyASealedBucketIsReduced) {
  for (const BucketState state :
       {BucketState::kReleased, BucketState::kFilling, BucketState::kReady, BucketState::kReducing,
        BucketState::kReduced}) {
    EXPECT_DEATH(BucketIn(state, 1).StartReducing(), "a bucket goes from");
  }
  for (const BucketState state :
       {BucketState::kReady, BucketState::kAccumulating, BucketState::kAccumulated}) {
    EXPECT_DEATH(BucketIn(state, 2).StartReducing(), "a bucket goes from");
  }
}

TEST(GradientBucketDeathTest, SealingBeforeTheLastMicroStepIsInTheAccumulatorAborts) {
  GradientBucket bucket = BucketIn(BucketState::kAccumulated, 3);
  EXPECT_DEATH(bucket.Seal(), "last micro-step in the accumulator");
  bucket.StartFilling(1, 3);
  bucket.CompleteOne();
  bucket.StartAccumulating();
  bucket.FinishAccumulating();
  EXPECT_DEATH(bucket.Seal(), "last micro-step in the accumulator");
  bucket.StartFilling(2, 3);
  EXPECT_DEATH(bucket.Seal(), "last micro-step in the accumulator");
  bucket.CompleteOne();  // Written, but not added yet.
  EXPECT_DEATH(bucket.Seal(), "last micro-step in the accumulator");
  bucket.StartAccumulating();
  EXPECT_DEATH(bucket.Seal(), "last micro-step in the accumulator");
  bucket.FinishAccumulating();
  EXPECT_DEATH(bucket.StartFilling(3, 3), "are added once each");
  bucket.Seal();
}

TEST(GradientBucketDeathTest, MicroStepsOutOfOrderAbort) {
  EXPECT_DEATH(GradientBucket(1).StartFilling(1, 3), "are added once each and in order");
  GradientBucket bucket = BucketIn(BucketState::kAccumulated, 3);
  EXPECT_DEATH(bucket.StartFilling(0, 3), "are added once each and in order");
  EXPECT_DEATH(bucket.StartFilling(2, 3), "are added once each and in order");
  EXPECT_DEATH(bucket.StartFilling(1, 2), "are added once each and in order");
  bucket.StartFilling(1, 3);
}

TEST(GradientBucketDeathTest, SealingBeforeTheLastParameterAborts) {
  GradientBucket bucket(2);
  EXPECT_DEATH(bucket.Seal(), "a bucket goes from");
  bucket.StartFilling(0, 1);
  bucket.CompleteOne();
  EXPECT_DEATH(bucket.Seal(), "a bucket goes from");
  EXPECT_DEATH(bucket.Release(), "a bucket goes from");
}

TEST(GradientBucketDeathTest, AccumulatingWhatIsReducedByItselfAborts) {
  EXPECT_DEATH(BucketIn(BucketState::kReady, 1).StartAccumulating(), "several micro-steps");
}

}  // namespace
}  // namespace ballast::worker
