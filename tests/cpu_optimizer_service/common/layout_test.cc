#include "cpu_optimizer_service/common/layout.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <string>

#include "cpu_optimizer_service/common/buckets.h"
#include "tests/support/messages.h"

namespace ballast::layout_test {
namespace {

using ::testing::ElementsAre;

LayoutSpec Spec() {
  LayoutSpec spec;
  spec.world_size = 2;
  spec.group_count = 3;
  spec.parameters = {{.name = "a", .shape = {10, 30}, .group = 0},
                     {.name = "zero", .shape = {4, 0}, .group = 0},
                     {.name = "b", .shape = {500}, .group = 0},
                     {.name = "frozen", .shape = {7}, .group = 0, .trainable = false},
                     {.name = "scalar", .shape = {}, .group = 2}};
  // Flat: group 0 holds 800 elements in 1024, group 1 none, group 2 one in 256.
  spec.partitions = {{.rank = 1, .group = 0, .begin = 512, .end = 1024},
                     {.rank = 0, .group = 0, .begin = 0, .end = 512},
                     {.rank = 0, .group = 2, .begin = 0, .end = 256}};
  return spec;
}

void ExpectInvalid(const LayoutSpec& spec) {
  EXPECT_TRUE(Refused(Layout::Create(spec), absl::StatusCode::kInvalidArgument));
}

TEST(Layout, PlacesParametersInFlatSpacesPaddedToBlocks) {
  const Layout layout = Layout::Create(Spec()).value();
  EXPECT_EQ(layout.flat_elements(0), 1024);
  EXPECT_EQ(layout.flat_elements(1), 0);
  EXPECT_EQ(layout.flat_elements(2), 256);
  EXPECT_EQ(layout.place(0).offset, 0);
  EXPECT_EQ(layout.place(1).offset, 300);
  EXPECT_EQ(layout.place(1).elements, 0);
  EXPECT_EQ(layout.place(2).offset, 300);
  EXPECT_EQ(layout.place(3).offset, -1);
  EXPECT_EQ(layout.place(4).elements, 1);
  EXPECT_EQ(layout.FindParameter("b"), 2);
  EXPECT_EQ(layout.FindParameter("c"), -1);
  EXPECT_EQ(layout.ParameterAt(0, 299), 0);
  EXPECT_EQ(layout.ParameterAt(0, 300), 2);
  EXPECT_EQ(layout.ParameterAt(0, 800), -1);
}

TEST(Layout, CutsPartitionsIntoChunksRankByRank) {
  LayoutSpec spec = Spec();
  spec.chunk_elements = 256;
  const Layout layout = Layout::Create(spec).value();
  ASSERT_EQ(layout.chunks().size(), 5u);
  EXPECT_THAT(std::vector<int>(layout.chunks_of_rank(0).begin(), layout.chunks_of_rank(0).end()),
              ElementsAre(0, 1, 2));
  EXPECT_EQ(layout.partition_elements(0), 768);
  EXPECT_EQ(layout.partition_elements(1), 512);
  EXPECT_THAT(layout.ChunksOfParameter(0), ElementsAre(0, 1));
  EXPECT_THAT(layout.ChunksOfParameter(1), ElementsAre());
  EXPECT_THAT(layout.ChunksOfParameter(2), ElementsAre(1, 3, 4));
  EXPECT_THAT(layout.ChunksOfParameter(3), ElementsAre());
  EXPECT_THAT(layout.ChunksOfParameter(4), ElementsAre(2));
  const std::vector<ChunkPiece> pieces = layout.Pieces(1);
  ASSERT_EQ(pieces.size(), 2u);
  EXPECT_EQ(pieces[0].parameter, 0);
  EXPECT_EQ(pieces[0].parameter_offset, 256);
  EXPECT_EQ(pieces[0].chunk_offset, 0);
  EXPECT_EQ(pieces[0].elements, 44);
  EXPECT_EQ(pieces[1].parameter, 2);
  EXPECT_EQ(pieces[1].chunk_offset, 44);
  EXPECT_EQ(pieces[1].elements, 212);
  EXPECT_EQ(layout.Pieces(4).size(), 1u);
}

TEST(Layout, RefusesGapsOverlapsAndEdgesWithinBlocks) {
  LayoutSpec gap = Spec();
  gap.partitions[0].begin = 768;
  ExpectInvalid(gap);
  LayoutSpec overlap = Spec();
  overlap.partitions[1].end = 768;
  ExpectInvalid(overlap);
  LayoutSpec tail = Spec();
  tail.partitions.pop_back();
  ExpectInvalid(tail);
  LayoutSpec edge = Spec();
  edge.partitions[0].begin = edge.partitions[1].end = 500;
  ExpectInvalid(edge);
  LayoutSpec beyond = Spec();
  beyond.partitions[0].end = 1280;
  ExpectInvalid(beyond);
  LayoutSpec empty = Spec();
  empty.partitions.push_back({.rank = 0, .group = 1, .begin = 0, .end = 0});
  ExpectInvalid(empty);
  LayoutSpec rank = Spec();
  rank.partitions[0].rank = 2;
  ExpectInvalid(rank);
  LayoutSpec group = Spec();
  group.partitions[0].group = -1;
  ExpectInvalid(group);
}

TEST(Layout, RefusesWhatCannotBeAParameter) {
  LayoutSpec twice = Spec();
  twice.parameters[2].name = "a";
  ExpectInvalid(twice);
  LayoutSpec nameless = Spec();
  nameless.parameters[0].name = "";
  ExpectInvalid(nameless);
  LayoutSpec negative = Spec();
  negative.parameters[0].shape = {-1};
  ExpectInvalid(negative);
  LayoutSpec group = Spec();
  group.parameters[0].group = 3;
  ExpectInvalid(group);
  LayoutSpec huge = Spec();
  huge.parameters[0].shape = {std::numeric_limits<int64_t>::max(), 8, 0};
  ExpectInvalid(huge);
  LayoutSpec many = Spec();
  for (auto& parameter : many.parameters) parameter.shape = {kMaxFlatElements};
  ExpectInvalid(many);
}

TEST(Layout, RefusesAbsurdNumbers) {
  LayoutSpec spec = Spec();
  spec.chunk_elements = 255;
  ExpectInvalid(spec);
  spec.chunk_elements = kMaxChunkElements * 2;
  ExpectInvalid(spec);
  spec = Spec();
  spec.world_size = 0;
  ExpectInvalid(spec);
  spec = Spec();
  spec.group_count = 0;
  ExpectInvalid(spec);
}

TEST(Layout, RanksWithNothingAndEmptyGroupsCostNothing) {
  LayoutSpec spec;
  spec.world_size = 4;
  spec.group_count = 2;
  spec.parameters = {{.name = "p", .shape = {8}, .group = 1},
                     {.name = "z", .shape = {0}, .group = 0}};
  spec.partitions = PartitionsOf(MakeBuckets(FlatElements(spec), 4, 1024), 4);
  const Layout layout = Layout::Create(spec).value();
  EXPECT_EQ(layout.chunks().size(), 1u);
  EXPECT_EQ(layout.chunks_of_rank(0).size(), 1u);
  for (const int rank : {1, 2, 3}) EXPECT_TRUE(layout.chunks_of_rank(rank).empty());
  LayoutSpec nothing;
  EXPECT_TRUE(Layout::Create(nothing).ok());
}

TEST(Layout, NamesTheFirstDifference) {
  EXPECT_EQ(FirstDifference(Spec(), Spec()), "");
  LayoutSpec order = Spec();
  std::swap(order.partitions[0], order.partitions[2]);
  EXPECT_EQ(FirstDifference(Spec(), order), "");
  LayoutSpec owner = Spec();
  std::swap(owner.partitions[0].rank, owner.partitions[1].rank);
  EXPECT_TRUE(Says(FirstDifference(Spec(), owner)));
  LayoutSpec frozen = Spec();
  frozen.parameters[3].trainable = true;
  EXPECT_TRUE(Says(FirstDifference(Spec(), frozen)));
}

TEST(Layout, OfSomeRanksRefusesARankThatDoesNotExist) {
  for (const int rank : {-1, 2}) {
    EXPECT_TRUE(
        Refused(Layout::CreateForRanks(Spec(), {rank}), absl::StatusCode::kInvalidArgument));
  }
}

TEST(Layout, OfSomeRanksRefusesPartitionsThatLeaveOutOtherRanksElements) {
  LayoutSpec spec = Spec();
  spec.partitions.erase(spec.partitions.begin());
  EXPECT_TRUE(Refused(Layout::CreateForRanks(spec, {0}), absl::StatusCode::kInvalidArgument));
}

TEST(Buckets, SplitAmongRanksAtBlockEdgesForAnyWorldSize) {
  for (const int world_size : {1, 2, 3, 4, 7}) {
    const std::vector<int64_t> flat = {256 * 11, 0, 256};
    const std::vector<Bucket> buckets = MakeBuckets(flat, world_size, 1024);
    int64_t covered = 0;
    for (const Bucket& bucket : buckets) {
      EXPECT_EQ(bucket.shard_elements % kBlockElements, 0);
      EXPECT_GE(world_size * bucket.shard_elements, bucket.end - bucket.begin);
      covered += bucket.end - bucket.begin;
    }
    EXPECT_EQ(covered, 256 * 12);
    LayoutSpec spec;
    spec.world_size = world_size;
    spec.group_count = 3;
    spec.parameters = {{.name = "a", .shape = {256 * 11}, .group = 0},
                       {.name = "b", .shape = {3}, .group = 2}};
    spec.partitions = PartitionsOf(buckets, world_size);
    EXPECT_TRUE(Layout::Create(spec).ok()) << world_size << " ranks";
  }
}

LayoutSpec PackedSpec() {
  LayoutSpec spec;
  spec.group_count = 2;
  spec.parameters = {
      {.name = "a", .shape = {100, 50}},    {.name = "bias", .shape = {5000}},
      {.name = "scale", .shape = {3}},      {.name = "b", .shape = {64, 64}},
      {.name = "small", .shape = {63, 65}}, {.name = "other", .shape = {64, 64}, .group = 1}};
  spec.states = {{.format = StateFormat::k8Bit}, {}};
  EXPECT_TRUE(CutInBuckets(1 << 20, spec).ok());
  return spec;
}

TEST(Layout, GivesEachChunkOneFormat) {
  const Layout layout = Layout::Create(PackedSpec()).value();
  std::vector<std::pair<int64_t, StateFormat>> chunks;
  for (const Chunk& chunk : layout.chunks()) {
    if (chunk.group == 0) chunks.emplace_back(chunk.begin, chunk.format);
  }
  EXPECT_THAT(
      chunks,
      ElementsAre(std::pair(0, StateFormat::k8Bit), std::pair(5120, StateFormat::kFloat32),
                  std::pair(10496, StateFormat::k8Bit), std::pair(14592, StateFormat::kFloat32)));
  EXPECT_EQ(layout.format(0), StateFormat::k8Bit);
  for (const int in_fp32 : {1, 2, 4, 5}) {
    EXPECT_EQ(layout.format(in_fp32), StateFormat::kFloat32) << in_fp32;
  }
  EXPECT_EQ(layout.place(1).offset, 5120) << "of a packed group each begins with a block";
  EXPECT_EQ(layout.place(2).offset, 10240);
  EXPECT_EQ(layout.ParameterAt(0, 5000), -1);
  EXPECT_EQ(layout.flat_elements(0), FlatElements(PackedSpec())[0]);
}

TEST(Layout, OfPackedStateRefusesShardsThatCutItsGroups) {
  LayoutSpec spec = PackedSpec();
  spec.world_size = 2;
  spec.partitions.clear();
  spec.mesh = {{"tp", 2}};
  for (ParameterSpec& parameter : spec.parameters) parameter.placements = {Placement()};
  EXPECT_TRUE(Layout::Create(spec).ok());
  spec.parameters[3].placements = {{.shard_dim = 0}};  // 32 rows of 64.
  EXPECT_EQ(Layout::Create(spec).value().format(3), StateFormat::k8Bit);
  spec.parameters[0].placements = {{.shard_dim = 1}};
  ExpectInvalid(spec);
  spec.states[0].fallback = true;
  const Layout layout = Layout::Create(spec).value();
  EXPECT_EQ(layout.format(0), StateFormat::kFloat32);
  EXPECT_EQ(layout.format(3), StateFormat::k8Bit);
  // Of a part, the same.
  EXPECT_EQ(Layout::CreateForRanks(spec, {1}).value().format(0), StateFormat::kFloat32);
}

TEST(Layout, RefusesStatesThatAreNotThoseOfTheGroups) {
  LayoutSpec spec = PackedSpec();
  spec.states.pop_back();
  ExpectInvalid(spec);
}

TEST(Layout, NamesADifferenceOfStates) {
  const LayoutSpec a = PackedSpec();
  LayoutSpec b = a;
  b.states[0].fallback = true;
  EXPECT_TRUE(Says(FirstDifference(a, b)));
  b.states.clear();
  EXPECT_TRUE(Says(FirstDifference(a, b)));
  LayoutSpec plain = a;
  plain.states = {{}, {}};
  EXPECT_EQ(FirstDifference(plain, b), "") << "fp32 is what there is without states";
}

}  // namespace
}  // namespace ballast::layout_test
