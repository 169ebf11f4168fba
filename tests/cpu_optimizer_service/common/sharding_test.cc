#include "cpu_optimizer_service/common/sharding.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "tests/support/messages.h"

namespace ballast::sharding_test {
namespace {

using testing::ElementsAre;

constexpr Placement kReplicate;
constexpr Placement kShard0 = {.shard_dim = 0};
constexpr Placement kShard1 = {.shard_dim = 1};

// torch.chunk of a list of indices: pieces of ceil(size / count), as many as there are; then, as
// DTensor has it, empty ones for the other ranks.
std::vector<std::vector<int64_t>> TorchChunk(const std::vector<int64_t>& indices, int count) {
  std::vector<std::vector<int64_t>> pieces;
  const int64_t size = static_cast<int64_t>(indices.size());
  const int64_t split_size = (size + count - 1) / count;
  for (int64_t at = 0; at < size; at += split_size) {
    pieces.emplace_back(indices.begin() + at, indices.begin() + std::min(at + split_size, size));
  }
  pieces.resize(count);
  return pieces;
}

// The elements that a rank has, as DTensor distributes a tensor: dimension after dimension of the
// mesh, each cutting what the rank has by then.
std::vector<int64_t> TorchElements(const std::vector<int64_t>& shape,
                                   const std::vector<Placement>& placements,
                                   const std::vector<MeshDim>& mesh, int owner, int rank) {
  std::vector<std::vector<int64_t>> indices;  // By dimension of the parameter.
  for (const int64_t size : shape) {
    indices.emplace_back();
    for (int64_t i = 0; i < size; ++i) indices.back().push_back(i);
  }
  std::vector<int> coordinates(mesh.size());
  for (size_t m = mesh.size(); m-- > 0;) {
    coordinates[m] = rank % mesh[m].size;
    rank /= mesh[m].size;
  }
  int replica = 0;
  for (size_t m = 0; m < mesh.size(); ++m) {
    if (placements[m].shard_dim == Placement::kReplicate) {
      replica = replica * mesh[m].size + coordinates[m];
      continue;
    }
    std::vector<int64_t>& mine = indices[placements[m].shard_dim];
    mine = TorchChunk(mine, mesh[m].size)[coordinates[m]];
  }
  if (replica != owner) return {};
  std::vector<int64_t> elements = {0};
  for (size_t d = 0; d < shape.size(); ++d) {
    std::vector<int64_t> longer;
    for (const int64_t element : elements) {
      for (const int64_t i : indices[d]) longer.push_back(element * shape[d] + i);
    }
    elements = std::move(longer);
  }
  return elements;
}

void ExpectAsTorch(const std::vector<int64_t>& shape, const std::vector<Placement>& placements,
                   const std::vector<MeshDim>& mesh, int owner) {
  int world_size = 1;
  for (const MeshDim& dim : mesh) world_size *= dim.size;
  int64_t elements = 1;
  for (const int64_t size : shape) elements *= size;
  const ParameterShards shards(shape, placements, mesh, owner);
  std::map<int64_t, std::pair<int, int64_t>> owners;  // By element: rank, place in its shard.
  for (int rank = 0; rank < world_size; ++rank) {
    const std::vector<int64_t> expected = TorchElements(shape, placements, mesh, owner, rank);
    const Shard shard = shards.OfRank(rank);
    ASSERT_EQ(shard.elements(), static_cast<int64_t>(expected.size())) << "rank " << rank;
    for (int64_t local = 0; local < shard.elements(); ++local) {
      ASSERT_EQ(shard.OffsetInParameter(local), expected[local]) << "rank " << rank;
      if (local % shard.run_elements() != 0) {
        ASSERT_EQ(expected[local], expected[local - 1] + 1);
      }
      ASSERT_TRUE(owners.emplace(expected[local], std::pair(rank, local)).second);
    }
  }
  ASSERT_EQ(static_cast<int64_t>(owners.size()), elements) << "each element has one owner";
  for (int64_t element = 0; element < elements; ++element) {
    const ParameterShards::Run run = shards.Find(element);
    ASSERT_GE(run.elements, 1);
    for (int64_t i = 0; i < run.elements; ++i) {
      ASSERT_EQ(owners[element + i], std::pair(run.rank, run.local + i)) << element << " + " << i;
    }
  }
}

// Whichever replica is the owner.
void ExpectAsTorch(const std::vector<int64_t>& shape, const std::vector<Placement>& placements,
                   const std::vector<MeshDim>& mesh) {
  ASSERT_EQ(CheckPlacements(placements, mesh, shape), absl::OkStatus());
  int replicas = 1;
  for (size_t m = 0; m < mesh.size(); ++m) {
    if (placements[m].shard_dim == Placement::kReplicate) replicas *= mesh[m].size;
  }
  for (int owner = 0; owner < replicas; ++owner) ExpectAsTorch(shape, placements, mesh, owner);
}

TEST(ParameterShards, CutUnevenlyAsTorchDoes) {
  // Five rows for four ranks: 2, 2, 1, 0.
  const std::vector<int64_t> shape = {5, 3};
  const std::vector<MeshDim> mesh = {{"dp", 4}};
  const std::vector<Placement> placements = {kShard0};
  const ParameterShards shards(shape, placements, mesh, /*owner=*/0);
  std::vector<int64_t> elements;
  for (int rank = 0; rank < 4; ++rank) elements.push_back(shards.OfRank(rank).elements());
  EXPECT_THAT(elements, ElementsAre(6, 6, 3, 0));
  EXPECT_EQ(shards.OfRank(1).OffsetInParameter(0), 6);
  EXPECT_EQ(shards.Find(14).rank, 2);
  ExpectAsTorch(shape, placements, mesh);
}

TEST(ParameterShards, OfColumnsAreRunsOfEachRow) {
  const std::vector<int64_t> shape = {4, 6};
  const std::vector<MeshDim> mesh = {{"tp", 2}};
  const std::vector<Placement> placements = {kShard1};
  const Shard shard = ParameterShards(shape, placements, mesh, /*owner=*/0).OfRank(1);
  EXPECT_EQ(shard.elements(), 12);
  EXPECT_EQ(shard.run_elements(), 3);
  EXPECT_EQ(shard.OffsetInParameter(3), 9);
  ExpectAsTorch(shape, placements, mesh);
}

TEST(ParameterShards, OfReplicasHaveOneOwner) {
  ExpectAsTorch({7, 4}, {kReplicate, kShard0}, {{"replicate", 2}, {"shard", 3}});
  ExpectAsTorch({7, 4}, {kShard0, kReplicate}, {{"shard", 3}, {"replicate", 2}});
  ExpectAsTorch({7, 4}, {kReplicate}, {{"dp", 3}});
  ExpectAsTorch({}, {kReplicate, kReplicate}, {{"dp", 3}, {"tp", 2}});
  ExpectAsTorch({0, 4}, {kShard0}, {{"dp", 3}});
}

TEST(ParameterShards, CutTheSameDimensionOneAfterTheOther) {
  // Ten rows: 5 and 5, each again into 2, 2, 1.
  ExpectAsTorch({10, 2}, {kShard0, kShard0}, {{"dp", 2}, {"tp", 3}});
  ExpectAsTorch({3}, {kShard0, kShard0}, {{"dp", 2}, {"tp", 4}});
}

TEST(ParameterShards, AreTorchsForAnyShapeMeshAndPlacements) {
  std::mt19937 random(7);
  for (int turn = 0; turn < 2000; ++turn) {
    std::vector<int64_t> shape(random() % 4);
    for (int64_t& size : shape) size = random() % 8;
    std::vector<MeshDim> mesh(1 + random() % 3);
    std::vector<Placement> placements(mesh.size());
    for (size_t m = 0; m < mesh.size(); ++m) {
      mesh[m] = {std::to_string(m), static_cast<int>(1 + random() % 4)};
      if (!shape.empty() && random() % 3 != 0) {
        placements[m].shard_dim = static_cast<int>(random() % shape.size());
      }
    }
    ExpectAsTorch(shape, placements, mesh);
  }
}

TEST(CheckMesh, RefusesWhatIsNotAMeshOfTheWorld) {
  EXPECT_EQ(CheckMesh(std::vector<MeshDim>{{"dp", 2}, {"tp", 3}}, 6), absl::OkStatus());
  const auto expect_refused = [](const std::vector<MeshDim>& mesh, int world_size) {
    EXPECT_TRUE(Refused(CheckMesh(mesh, world_size), absl::StatusCode::kInvalidArgument));
  };
  expect_refused({}, 1);
  expect_refused({{"dp", 2}, {"tp", 3}}, 5);
  expect_refused({{"dp", 2}, {"dp", 3}}, 6);
  expect_refused({{"", 2}}, 2);
  expect_refused({{"dp", 0}}, 2);
  expect_refused({{"dp", -2}, {"tp", -3}}, 6);
  // No product overflows.
  expect_refused({{"a", 65536}, {"", 65536}}, 65536);
  std::vector<MeshDim> large;
  for (int i = 0; i < 8; ++i) large.push_back({std::to_string(i), 65536});
  expect_refused(large, 65536);
}

TEST(CheckPlacements, RefusesWhatDoesNotFitTheShape) {
  const std::vector<MeshDim> mesh = {{"dp", 2}, {"tp", 3}};
  const auto expect_refused = [&](const std::vector<Placement>& placements,
                                  const std::vector<int64_t>& shape) {
    EXPECT_TRUE(
        Refused(CheckPlacements(placements, mesh, shape), absl::StatusCode::kInvalidArgument));
  };
  expect_refused({kShard0}, {4});
  expect_refused({kShard0, kShard1}, {4});
  expect_refused({kShard0, kReplicate}, {});
  expect_refused({{.shard_dim = -2}, kReplicate}, {4});
}

TEST(Sharding, SaysWhetherRunsAreWhole) {
  std::mt19937 random(5);
  int whole = 0;
  constexpr int kTurns = 2000;
  for (int turn = 0; turn < kTurns; ++turn) {
    std::vector<int64_t> shape;
    int64_t elements = 1;
    for (int d = 0; d < 1 + turn % 3; ++d) {
      shape.push_back(1 + random() % 8);
      elements *= shape.back();
    }
    std::vector<MeshDim> mesh;
    std::vector<Placement> placements;
    int ranks = 1;
    for (size_t m = 0; m < 1 + random() % 2; ++m) {
      mesh.push_back({std::to_string(m), static_cast<int>(1 + random() % 4)});
      ranks *= mesh.back().size;
      placements.push_back({.shard_dim = static_cast<int>(random() % (shape.size() + 1)) - 1});
    }
    const ParameterShards shards(shape, placements, mesh, /*owner=*/0);
    constexpr int64_t kGroup = 4;
    bool expected = true;
    for (int rank = 0; rank < ranks; ++rank) {
      const Shard shard = shards.OfRank(rank);
      for (int64_t local = 0; local < shard.elements(); local += shard.run_elements()) {
        const int64_t begin = shard.OffsetInParameter(local);
        const int64_t end = begin + shard.run_elements();
        expected &= begin % kGroup == 0 && (end % kGroup == 0 || end == elements);
      }
    }
    ASSERT_EQ(AreRunsWhole(shape, placements, mesh, kGroup), expected) << turn;
    whole += expected ? 1 : 0;
  }
  EXPECT_GT(whole, kTurns / 10);
  EXPECT_LT(whole, kTurns * 9 / 10);
}

}  // namespace
}  // namespace ballast::sharding_test
