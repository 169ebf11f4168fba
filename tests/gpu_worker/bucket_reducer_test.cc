#include "gpu_worker/bucket_reducer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <mutex>

#include "gpu_worker/single_collective.h"
#include "tests/gpu_worker/ranks.h"

namespace ballast::worker {
namespace {

using testing::ElementsAre;

// Four parameters of one group, a block and a half each, and the buckets of a world.
struct Fixture {
  explicit Fixture(int world_size) {
    LayoutSpec spec;
    spec.world_size = world_size;
    for (int p = 0; p < 4; ++p) {
      spec.parameters.push_back({.name = "p" + std::to_string(p), .shape = {384}});
    }
    buckets = MakeBuckets(FlatElements(spec.parameters, 1), world_size, 512);
    spec.partitions = PartitionsOf(buckets, world_size);
    layout = std::make_unique<Layout>(Layout::Create(spec).value());
    gradients.resize(buckets.back().begin + buckets.back().shard_elements * world_size);
  }
  void Write(int parameter, float value) {
    const ParameterPlace& place = layout->place(parameter);
    std::fill_n(gradients.begin() + place.offset, place.elements, value);
  }

  std::vector<Bucket> buckets;
  std::unique_ptr<Layout> layout;
  std::vector<float> gradients;
  const std::vector<int> backward_order = {3, 2, 1, 0};
};

struct Consumed {
  int bucket;
  uint32_t micro_step;
  std::vector<float> shard;
};

// Collects what the reducer hands over; read after FinishMicroStep.
struct Sink {
  BucketReducer::Consumer Consumer() {
    return [this](int bucket, uint32_t micro_step, absl::Span<const float> shard) {
      consumed.push_back({bucket, micro_step, {shard.begin(), shard.end()}});
      return absl::OkStatus();
    };
  }
  std::vector<Consumed> consumed;
};

TEST(BucketReducer, HandsOverEveryBucketInBackwardOrder) {
  Fixture fixture(1);
  SingleCollective collective;
  Sink sink;
  BucketReducer reducer(*fixture.layout, fixture.buckets, fixture.backward_order,
                        {absl::MakeSpan(fixture.gradients)}, collective, sink.Consumer());
  for (uint32_t micro_step = 0; micro_step < 3; ++micro_step) {
    sink.consumed.clear();
    reducer.StartMicroStep(micro_step);
    for (const int p : fixture.backward_order) {
      fixture.Write(p, 10.0f * micro_step + p);
      reducer.GradientReady(p);
    }
    const ReducedMicroStep reduced = reducer.FinishMicroStep().value();
    EXPECT_TRUE(reduced.all_used);
    EXPECT_THAT(reduced.used_parameters, ElementsAre(0, 1, 2, 3));
    ASSERT_EQ(sink.consumed.size(), 3);
    for (int i = 0; i < 3; ++i) {
      const Consumed& consumed = sink.consumed[i];
      EXPECT_EQ(consumed.bucket, 2 - i);
      EXPECT_EQ(consumed.micro_step, micro_step);
      for (size_t e = 0; e < consumed.shard.size(); ++e) {
        EXPECT_EQ(consumed.shard[e], 10.0f * micro_step + (512 * consumed.bucket + e) / 384);
      }
    }
  }
}

TEST(BucketReducer, ReducesABucketBeforeBackwardEnds) {
  Fixture fixture(1);
  SingleCollective collective;
  Mutex mutex;
  CondVar changed;
  int handed_over = 0;
  BucketReducer reducer(*fixture.layout, fixture.buckets, fixture.backward_order,
                        {absl::MakeSpan(fixture.gradients)}, collective,
                        [&](int, uint32_t, absl::Span<const float>) {
                          MutexLock lock(mutex);
                          ++handed_over;
                          changed.NotifyAll();
                          return absl::OkStatus();
                        });
  reducer.StartMicroStep(0);
  reducer.GradientReady(3);
  reducer.GradientReady(2);
  {
    MutexLock lock(mutex);  // Bucket 2 holds the ends of parameters 2 and 3 only.
    while (handed_over < 1) changed.Wait(mutex);
  }
  reducer.GradientReady(1);
  reducer.GradientReady(0);
  EXPECT_TRUE(reducer.FinishMicroStep().ok());
  EXPECT_EQ(handed_over, 3);
}

TEST(BucketReducer, AParameterWithoutAGradientCountsAsZerosAndIsNotUsed) {
  Fixture fixture(1);
  SingleCollective collective;
  Sink sink;
  BucketReducer reducer(*fixture.layout, fixture.buckets, fixture.backward_order,
                        {absl::MakeSpan(fixture.gradients)}, collective, sink.Consumer());
  for (int p = 0; p < 4; ++p) fixture.Write(p, 7.0f);  // Of an earlier micro-step.
  reducer.StartMicroStep(0);
  for (const int p : {3, 0}) reducer.GradientReady(p);
  const ReducedMicroStep reduced = reducer.FinishMicroStep().value();
  EXPECT_FALSE(reduced.all_used);
  EXPECT_THAT(reduced.used_parameters, ElementsAre(0, 3));
  for (const Consumed& consumed : sink.consumed) {
    for (size_t e = 0; e < consumed.shard.size(); ++e) {
      const size_t parameter = (512 * consumed.bucket + e) / 384;
      EXPECT_EQ(consumed.shard[e], parameter == 0 || parameter == 3 ? 7.0f : 0.0f);
    }
  }
}

TEST(BucketReducer, RanksThatFinishInAnotherOrderStillMatch) {
  Sink sinks[2];
  RunRanks(2, [&](Collective& collective) {
    Fixture fixture(2);
    BucketReducer reducer(*fixture.layout, fixture.buckets, fixture.backward_order,
                          {absl::MakeSpan(fixture.gradients)}, collective,
                          sinks[collective.rank()].Consumer());
    reducer.StartMicroStep(0);
    const std::vector<int> order =
        collective.rank() == 0 ? std::vector<int>{3, 2, 1, 0} : std::vector<int>{0, 1, 2};
    for (const int p : order) {
      fixture.Write(p, 1.0f + p);
      reducer.GradientReady(p);
    }
    const ReducedMicroStep reduced = reducer.FinishMicroStep().value();
    EXPECT_EQ(reduced.all_used, collective.rank() == 0);
  });
  for (int rank = 0; rank < 2; ++rank) {
    for (const Consumed& consumed : sinks[rank].consumed) {
      for (size_t e = 0; e < consumed.shard.size(); ++e) {
        const int p = static_cast<int>(512 * consumed.bucket + 256 * rank + e) / 384;
        EXPECT_EQ(consumed.shard[e], p == 3 ? 4.0f : 2 * (1.0f + p));
      }
    }
  }
}

TEST(BucketReducer, AnErrorOfTheConsumerEndsTheMicroStepAndStays) {
  Fixture fixture(1);
  SingleCollective collective;
  BucketReducer reducer(*fixture.layout, fixture.buckets, fixture.backward_order,
                        {absl::MakeSpan(fixture.gradients)}, collective,
                        [](int, uint32_t, absl::Span<const float>) {
                          return absl::UnavailableError("the service is gone");
                        });
  reducer.StartMicroStep(0);
  for (const int p : fixture.backward_order) reducer.GradientReady(p);
  EXPECT_EQ(reducer.FinishMicroStep().status().message(), "the service is gone");
  reducer.StartMicroStep(1);
  reducer.GradientReady(3);
  EXPECT_EQ(reducer.FinishMicroStep().status().code(), absl::StatusCode::kUnavailable);
}

TEST(BucketReducer, EndsInTheMiddleOfAMicroStep) {
  Fixture fixture(1);
  SingleCollective collective;
  Sink sink;
  BucketReducer reducer(*fixture.layout, fixture.buckets, fixture.backward_order,
                        {absl::MakeSpan(fixture.gradients)}, collective, sink.Consumer());
  reducer.StartMicroStep(0);
  reducer.GradientReady(3);
}

TEST(BucketReducerDeathTest, AGradientThatIsReadyTwiceAborts) {
  Fixture fixture(1);
  SingleCollective collective;
  Sink sink;
  EXPECT_DEATH(
      {
        BucketReducer reducer(*fixture.layout, fixture.buckets, fixture.backward_order,
                              {absl::MakeSpan(fixture.gradients)}, collective, sink.Consumer());
        reducer.StartMicroStep(0);
        reducer.GradientReady(0);
        reducer.GradientReady(0);
      },
      "complete once");
}

}  // namespace
}  // namespace ballast::worker
