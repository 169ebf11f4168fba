#include "gpu_worker/buckets/bucket_order.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>
#include <string>

#include "cpu_optimizer_service/common/buckets.h"
#include "gpu_worker/training/training_job.h"
#include "tests/support/messages.h"

namespace ballast::worker {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;

TEST(BucketOrder, ReducesABucketWhenTheLastOfItsParametersIsThere) {
  LayoutSpec spec;
  for (int p = 0; p < 4; ++p) {  // A block and a half each.
    spec.parameters.push_back({.name = "p" + std::to_string(p), .shape = {384}});
  }
  const std::vector<Bucket> buckets = MakeBuckets(FlatElements(spec), 1, 512);
  spec.partitions = PartitionsOf(buckets, 1);
  const Layout layout = Layout::Create(spec).value();
  const BucketOrder order = MakeBucketOrder(layout, buckets, std::vector<int>{2, 0, 3, 1});
  EXPECT_THAT(order.parameters_of_bucket,
              ElementsAre(ElementsAre(0, 1), ElementsAre(1, 2), ElementsAre(2, 3)));
  EXPECT_THAT(order.buckets_of_parameter,
              ElementsAre(ElementsAre(0), ElementsAre(0, 1), ElementsAre(1, 2), ElementsAre(2)));
  EXPECT_THAT(order.reduction, ElementsAre(2, 0, 1));
}

TEST(BucketOrder, ShardsOfAllRanksTileTheFlatSpacesWithTheirChunks) {
  for (uint64_t seed = 0; seed < 50; ++seed) {
    std::mt19937_64 random(seed);
    std::vector<ModelParameter> parameters;
    for (int p = 0; p < 6; ++p) {
      parameters.push_back({.name = "p" + std::to_string(p),
                            .shape = {static_cast<int64_t>(1 + random() % 3000)},
                            .decay = random() % 3 != 0});
    }
    const int world_size = 1 + random() % 4;
    const TrainingJob job =
        MakeTrainingJob(parameters,
                        {.world_size = world_size,
                         .bucket_elements = static_cast<int64_t>(1 + random() % 2000),
                         .chunk_elements = static_cast<int64_t>(256 * (1 + random() % 3))})
            .value();
    std::vector<int64_t> reached(job.layout.group_count(), 0);
    std::vector<std::vector<int>> chunks(world_size);
    for (const Bucket& bucket : job.buckets) {
      for (int rank = 0; rank < world_size; ++rank) {
        const RankShard shard = ShardOf(job.layout, bucket, rank);
        if (shard.elements == 0) {
          EXPECT_THAT(shard.chunks, IsEmpty());
          continue;
        }
        EXPECT_EQ(shard.begin, reached[bucket.group]);
        for (const int chunk : shard.chunks) {
          EXPECT_EQ(job.layout.chunks()[chunk].begin, reached[bucket.group]);
          reached[bucket.group] += job.layout.chunks()[chunk].elements;
          chunks[rank].push_back(chunk);
        }
        EXPECT_EQ(shard.begin + shard.elements, reached[bucket.group]);
      }
    }
    for (int group = 0; group < job.layout.group_count(); ++group) {
      EXPECT_EQ(reached[group], job.layout.flat_elements(group));
    }
    for (int rank = 0; rank < world_size; ++rank) {
      EXPECT_THAT(chunks[rank], testing::ElementsAreArray(job.layout.chunks_of_rank(rank)));
    }
  }
}

TEST(BucketOrder, AnErrorOfABackwardThatReachedNothingNamesRankAndParameters) {
  LayoutSpec spec;
  spec.parameters = {{.name = "frozen", .shape = {1}, .trainable = false},
                     {.name = "wte", .shape = {300}}};
  spec.partitions = {{.begin = 0, .end = 512}};
  const absl::Status status = NoParameterReached(Layout::Create(spec).value(), 3, 2);
  EXPECT_TRUE(Refused(status, absl::StatusCode::kFailedPrecondition));
}

}  // namespace
}  // namespace ballast::worker
