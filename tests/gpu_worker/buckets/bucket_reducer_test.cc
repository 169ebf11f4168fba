#include "gpu_worker/buckets/bucket_reducer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <mutex>

#include "cpu_optimizer_service/common/buckets.h"
#include "cpu_optimizer_service/common/status.h"
#include "gpu_worker/collective/single_collective.h"
#include "tests/gpu_worker/collective/ranks.h"

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
    buckets = MakeBuckets(FlatElements(spec), world_size, 512);
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
  uint32_t micro_step_begin;
  uint32_t micro_step_end;
  bool final;
  std::vector<float> shard;
};

// Collects what the reducer hands over; read after FinishMicroStep.
struct Sink {
  BucketReducer::Consumer Consumer() {
    return [this](const ReducedGradient& shard) {
      consumed.push_back({.bucket = shard.bucket,
                          .micro_step_begin = shard.micro_step_begin,
                          .micro_step_end = shard.micro_step_end,
                          .final = shard.final,
                          .shard = {shard.values.begin(), shard.values.end()}});
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
    reducer.StartMicroStep(micro_step, 3);
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
      EXPECT_EQ(consumed.micro_step_begin, micro_step);
      EXPECT_EQ(consumed.micro_step_end, micro_step + 1);
      EXPECT_EQ(consumed.final, micro_step == 2);
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
                        [&](const ReducedGradient&) {
                          MutexLock lock(mutex);
                          ++handed_over;
                          changed.NotifyAll();
                        });
  reducer.StartMicroStep(0, 1);
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
  for (int p = 0; p < 4; ++p) fixture.Write(p, 7.0f);  // An earlier micro-step's.
  reducer.StartMicroStep(0, 1);
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
    reducer.StartMicroStep(0, 1);
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

// ---------------------------------------------------------------- accumulation on the worker

// The sums of three micro-steps, in fp32 and in order: what a reducer must hand over for an element
// of parameter `p` whose gradients were `gradients`.
float InOrder(std::initializer_list<float> gradients) {
  auto next = gradients.begin();
  float sum = *next;
  for (++next; next != gradients.end(); ++next) sum += *next;
  return sum;
}

TEST(BucketReducer, SumsOnTheWorkerInMicroStepOrderAndReducesOnce) {
  Fixture fixture(1);
  SingleCollective collective;
  Sink sink;
  BucketReducer reducer(*fixture.layout, fixture.buckets, fixture.backward_order,
                        {absl::MakeSpan(fixture.gradients)}, collective, sink.Consumer(),
                        {.accumulation = Accumulation::kWorker, .checked_as = {}});
  // Another order gives other bits: (1 + 2^-24) + 2^-24 is 1, 1 + (2^-24 + 2^-24) is not.
  const float tiny = 0x1p-24f;
  for (int step = 0; step < 2; ++step) {  // Nothing of the first is left in the second.
    sink.consumed.clear();
    for (uint32_t micro_step = 0; micro_step < 3; ++micro_step) {
      EXPECT_TRUE(sink.consumed.empty());
      reducer.StartMicroStep(micro_step, 3);
      for (const int p : fixture.backward_order) {
        fixture.Write(p, micro_step == 0 ? 1.0f : tiny);
        reducer.GradientReady(p);
      }
      EXPECT_TRUE(reducer.FinishMicroStep().value().all_used);
    }
    ASSERT_EQ(sink.consumed.size(), 3);
    for (int i = 0; i < 3; ++i) {
      const Consumed& consumed = sink.consumed[i];
      EXPECT_EQ(consumed.bucket, 2 - i);
      EXPECT_EQ(consumed.micro_step_begin, 0);
      EXPECT_EQ(consumed.micro_step_end, 3);
      EXPECT_TRUE(consumed.final);
      EXPECT_THAT(consumed.shard, testing::Each(InOrder({1.0f, tiny, tiny})));
    }
  }
}

TEST(BucketReducer, AMicroStepAddsNothingForWhatItsBackwardDidNotReach) {
  Fixture fixture(1);
  SingleCollective collective;
  Sink sink;
  BucketReducer reducer(*fixture.layout, fixture.buckets, fixture.backward_order,
                        {absl::MakeSpan(fixture.gradients)}, collective, sink.Consumer(),
                        {.accumulation = Accumulation::kWorker, .checked_as = {}});
  // Parameter 0 in the first micro-step only, 1 in the last only, 2 in all, 3 in none. What stands
  // in the memory of those that are not reached is of no account.
  const std::vector<std::vector<int>> reached = {{2, 0}, {2}, {2, 1}};
  for (int step = 0; step < 2; ++step) {
    sink.consumed.clear();
    for (uint32_t micro_step = 0; micro_step < 3; ++micro_step) {
      for (int p = 0; p < 4; ++p) fixture.Write(p, std::numeric_limits<float>::quiet_NaN());
      reducer.StartMicroStep(micro_step, 3);
      for (const int p : reached[micro_step]) {
        fixture.Write(p, p == 0 ? -0.0f : 10.0f * p + micro_step);
        reducer.GradientReady(p);
      }
      const ReducedMicroStep reduced = reducer.FinishMicroStep().value();
      EXPECT_FALSE(reduced.all_used);
      std::vector<int> sorted = reached[micro_step];
      std::sort(sorted.begin(), sorted.end());
      EXPECT_EQ(reduced.used_parameters, sorted);
    }
    ASSERT_EQ(sink.consumed.size(), 3);
    const float expected[] = {-0.0f, 12.0f, InOrder({20, 21, 22}), 0.0f};
    for (const Consumed& consumed : sink.consumed) {
      for (size_t e = 0; e < consumed.shard.size(); ++e) {
        const size_t p = (512 * consumed.bucket + e) / 384;
        ASSERT_EQ(consumed.shard[e], expected[p]);
        ASSERT_EQ(std::signbit(consumed.shard[e]), std::signbit(expected[p]));
      }
    }
  }
}

// A world of one that fails where a test asks for it, and notes the memory that it reduced.
class NotingCollective final : public Collective {
 public:
  int rank() const override { return 0; }
  int world_size() const override { return 1; }
  absl::Status ReduceScatterSum(absl::Span<const float> input, absl::Span<float> shard) override {
    reduced.push_back(input.data());
    BALLAST_RETURN_IF_ERROR(answer);
    return all_.ReduceScatterSum(input, shard);
  }
  absl::Status AllGather(absl::Span<const std::byte> shard, absl::Span<std::byte> all) override {
    return all_.AllGather(shard, all);
  }
  absl::Status AllReduceSum(absl::Span<double> values) override { return absl::OkStatus(); }
  absl::Status Broadcast(absl::Span<std::byte> bytes) override { return absl::OkStatus(); }
  absl::Status Barrier() override { return absl::OkStatus(); }

  absl::Status answer;
  std::vector<const float*> reduced;

 private:
  SingleCollective all_;
};

TEST(BucketReducer, OneMicroStepIsReducedWhereBackwardWroteIt) {
  Fixture fixture(1);
  NotingCollective collective;
  Sink sink;
  BucketReducer reducer(*fixture.layout, fixture.buckets, fixture.backward_order,
                        {absl::MakeSpan(fixture.gradients)}, collective, sink.Consumer(),
                        {.accumulation = Accumulation::kWorker, .checked_as = {}});
  reducer.StartMicroStep(0, 1);
  for (const int p : fixture.backward_order) {
    fixture.Write(p, 5.0f);
    reducer.GradientReady(p);
  }
  ASSERT_TRUE(reducer.FinishMicroStep().ok());
  EXPECT_EQ(sink.consumed.size(), 3);
  EXPECT_TRUE(sink.consumed[0].final);
  ASSERT_EQ(collective.reduced.size(), 3);
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(collective.reduced[i], fixture.gradients.data() + fixture.buckets[2 - i].begin);
  }
}

// ---------------------------------------------------------------- backward that reaches nothing

TEST(BucketReducer, ABackwardThatReachesNothingTakesPartWithZeros) {
  for (const Accumulation accumulation : {Accumulation::kService, Accumulation::kWorker}) {
    Sink sinks[2];
    RunRanks(2, [&](Collective& collective) {
      Fixture fixture(2);
      BucketReducer reducer(*fixture.layout, fixture.buckets, fixture.backward_order,
                            {absl::MakeSpan(fixture.gradients)}, collective,
                            sinks[collective.rank()].Consumer(),
                            {.accumulation = accumulation, .checked_as = {}});
      for (int p = 0; p < 4; ++p) fixture.Write(p, 1.0f + p);
      reducer.StartMicroStep(0, 1);
      if (collective.rank() == 0) {
        for (const int p : fixture.backward_order) reducer.GradientReady(p);
      }
      const ReducedMicroStep reduced = reducer.FinishMicroStep().value();
      EXPECT_EQ(reduced.reached_nothing(), collective.rank() == 1);
    });
    for (int rank = 0; rank < 2; ++rank) {  // Rank 1's share were zeros, not what its memory held.
      for (const Consumed& consumed : sinks[rank].consumed) {
        for (size_t e = 0; e < consumed.shard.size(); ++e) {
          ASSERT_EQ(consumed.shard[e], 1 + (512 * consumed.bucket + 256 * rank + e) / 384);
        }
      }
    }
  }
}

// ---------------------------------------------------------------- gradients that are not finite

TEST(BucketReducer, FindsTheFirstElementThatIsNotFiniteOnThisRank) {
  const std::vector<int> onward = {0, 1, 2, 3}, backward = {3, 2, 1, 0};
  for (const bool sums : {false, true}) {
    RunRanks(2, [&](Collective& collective) {
      const std::vector<int>& order = sums ? onward : backward;
      Fixture fixture(2);
      Sink sink;
      BucketReducer reducer(*fixture.layout, fixture.buckets, order,
                            {absl::MakeSpan(fixture.gradients)}, collective, sink.Consumer(),
                            {.accumulation = sums ? Accumulation::kWorker : Accumulation::kService,
                             .checked_as = {DType::kBFloat16}});
      for (uint32_t micro_step = 0; micro_step < 2; ++micro_step) {
        for (int p = 0; p < 4; ++p) fixture.Write(p, 1.0f);
        if (collective.rank() == 1 && micro_step == 1) {
          // In the second bucket of parameter 1, and in a parameter that is reduced before or
          // after.
          fixture.gradients[fixture.layout->place(1).offset + 300] =
              -std::numeric_limits<float>::infinity();
          fixture.gradients[fixture.layout->place(3).offset + 7] = std::nanf("");
        }
        reducer.StartMicroStep(micro_step, 2);
        for (const int p : order) reducer.GradientReady(p);
        const ReducedMicroStep reduced = reducer.FinishMicroStep().value();
        ASSERT_EQ(reduced.non_finite.has_value(), collective.rank() == 1 && micro_step == 1);
        if (!reduced.non_finite.has_value()) continue;
        EXPECT_EQ(reduced.non_finite->parameter, 1);
        EXPECT_EQ(reduced.non_finite->element, 300);
        EXPECT_EQ(reduced.non_finite->value, -std::numeric_limits<float>::infinity());
      }
    });
  }
}

// ---------------------------------------------------------------- errors, and ends

TEST(BucketReducer, AnErrorOfTheCollectiveEndsTheMicroStepAndStays) {
  Fixture fixture(1);
  NotingCollective collective;
  collective.answer = absl::UnavailableError("rank 1 is gone");
  Sink sink;
  BucketReducer reducer(*fixture.layout, fixture.buckets, fixture.backward_order,
                        {absl::MakeSpan(fixture.gradients)}, collective, sink.Consumer());
  reducer.StartMicroStep(0, 1);
  for (const int p : fixture.backward_order) reducer.GradientReady(p);
  EXPECT_EQ(reducer.FinishMicroStep().status(), collective.answer);
  reducer.StartMicroStep(1, 2);
  reducer.GradientReady(3);
  for (int again = 0; again < 2; ++again) {
    EXPECT_EQ(reducer.FinishMicroStep().status(), collective.answer);
  }
  EXPECT_EQ(collective.reduced.size(), 1);
  EXPECT_TRUE(sink.consumed.empty());
}

TEST(BucketReducer, EndsInTheMiddleOfAMicroStep) {
  Fixture fixture(1);
  SingleCollective collective;
  Sink sink;
  BucketReducer reducer(*fixture.layout, fixture.buckets, fixture.backward_order,
                        {absl::MakeSpan(fixture.gradients)}, collective, sink.Consumer());
  reducer.StartMicroStep(0, 1);
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
        reducer.StartMicroStep(0, 1);
        reducer.GradientReady(0);
        reducer.GradientReady(0);
      },
      "complete once");
}

}  // namespace
}  // namespace ballast::worker
