#include "cpu_optimizer_service/gradients/part_sums.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "cpu_optimizer_service/gradients/square_sums.h"
#include "tests/support/block_sums.h"
#include "tests/support/messages.h"
#include "tests/support/random_layout.h"

namespace ballast {
namespace {

using Values = std::vector<std::vector<float>>;  // By parameter.

Values RandomValues(const LayoutSpec& spec, std::mt19937& random) {
  Values values;
  for (const ParameterSpec& parameter : spec.parameters) {
    int64_t elements = 1;
    for (const int64_t size : parameter.shape) elements *= size;
    std::vector<float>& of = values.emplace_back(elements);
    // So different that an order of addition would show.
    for (float& value : of) {
      value = std::ldexp(std::normal_distribution<float>()(random),
                         static_cast<int>(random() % 60) - 30);
    }
  }
  return values;
}

// The sums of the gradient of some ranks.
PartSums SumsOf(const LayoutSpec& spec, std::vector<int> ranks, const Values& values) {
  const Layout layout = Layout::CreateForRanks(spec, std::move(ranks)).value();
  std::vector<std::vector<float>> chunks;
  for (int chunk = 0; chunk < static_cast<int>(layout.chunks().size()); ++chunk) {
    std::vector<float>& held = chunks.emplace_back(layout.chunks()[chunk].elements);
    layout.VisitPieces(chunk, [&](const ChunkPiece& piece) {
      std::copy_n(values[piece.parameter].begin() + piece.parameter_offset, piece.elements,
                  held.begin() + piece.chunk_offset);
    });
  }
  const auto view = [&](int chunk) { return GradientView{chunks[chunk].data()}; };
  SquareSums sums(layout);
  for (int chunk = 0; chunk < static_cast<int>(chunks.size()); ++chunk) {
    sums.SumChunk(chunk, view(chunk));
  }
  return sums.Combine(view, [](int64_t count, absl::FunctionRef<void(int64_t)> body) {
    for (int64_t i = 0; i < count; ++i) body(i);
  });
}

// Ranks are dealt to members by chance; a member may have none.
std::vector<PartSums> SumsByMember(const LayoutSpec& spec, const Values& values,
                                   std::mt19937& random) {
  std::vector<std::vector<int>> ranks(1 + random() % 4);
  for (int rank = 0; rank < spec.world_size; ++rank) ranks[random() % ranks.size()].push_back(rank);
  std::vector<PartSums> parts;
  for (const std::vector<int>& of_member : ranks) parts.push_back(SumsOf(spec, of_member, values));
  return parts;
}

absl::StatusOr<std::vector<double>> Together(const LayoutSpec& spec,
                                             const std::vector<PartSums>& parts) {
  std::vector<const PartSums*> all;
  for (const PartSums& part : parts) all.push_back(&part);
  return GroupSums(Layout::CreateForRanks(spec, {}).value(), all);
}

TEST(PartSums, AreTheSameTogetherForAnyMembers) {
  std::mt19937 random(3);
  int cut = 0;
  for (int turn = 0; turn < 200; ++turn) {
    const LayoutSpec spec = RandomLayout(random, /*has_mesh=*/turn % 2 == 0);
    const Values values = RandomValues(spec, random);
    std::vector<ExactSum> expected(2);
    for (int p = 0; p < kRandomParameters; ++p) {
      AddBlocks(values[p], expected[spec.parameters[p].group]);
    }
    const std::vector<PartSums> parts = SumsByMember(spec, values, random);
    ASSERT_EQ(Together(spec, parts).value(), Rounded(expected));
    for (const PartSums& part : parts) cut += part.cut.empty() ? 0 : 1;
  }
  EXPECT_GT(cut, 50) << "members have blocks in common";
}

TEST(PartSums, ShowWhateverIsNotFinite) {
  std::mt19937 random(4);
  for (int turn = 0; turn < 200; ++turn) {
    const LayoutSpec spec = RandomLayout(random, /*has_mesh=*/turn % 2 == 0);
    Values values = RandomValues(spec, random);
    const int p = static_cast<int>(random() % kRandomParameters);
    if (values[p].empty()) continue;
    values[p][random() % values[p].size()] = std::numeric_limits<float>::infinity();
    const std::vector<PartSums> parts = SumsByMember(spec, values, random);
    const std::vector<double> sums = Together(spec, parts).value();
    const int group = spec.parameters[p].group;
    ASSERT_TRUE(std::isinf(sums[group]));
    ASSERT_TRUE(std::isfinite(sums[1 - group]));
    ASSERT_EQ(std::ranges::count_if(parts, &PartSums::finite),
              static_cast<int64_t>(parts.size()) - 1);
  }
}

// Two ranks with 300 elements each of a parameter of 600.
LayoutSpec TwoHalves() {
  LayoutSpec spec;
  spec.world_size = 2;
  spec.mesh = {{"dp", 2}};
  spec.parameters = {{.name = "w", .shape = {600}, .placements = {{.shard_dim = 0}}}};
  return spec;
}

TEST(PartSums, OfABlockNeedAllOfItsElementsOnce) {
  const LayoutSpec spec = TwoHalves();
  const Values values = {std::vector<float>(600, 2)};
  const PartSums first = SumsOf(spec, {0}, values);
  const PartSums second = SumsOf(spec, {1}, values);
  EXPECT_EQ(Together(spec, {first, second}).value(), std::vector<double>{2400});
  const auto refused = [&](std::vector<PartSums> parts) {
    return Refused(Together(spec, parts), absl::StatusCode::kInvalidArgument);
  };
  EXPECT_TRUE(refused({first}));
  EXPECT_TRUE(refused({first, first}));
  const auto with = [&](CutRun run) {
    PartSums part = second;
    part.cut = {std::move(run)};
    return part;
  };
  EXPECT_TRUE(refused({first, with({.parameter = 1, .begin = 0, .values = {1}})}));
  EXPECT_TRUE(refused({first, with({.parameter = -1, .begin = 0, .values = {1}})}));
  EXPECT_TRUE(refused({first, with({.parameter = 0, .begin = 599, .values = {1, 2}})}));
  EXPECT_TRUE(refused({first, with({.parameter = 0, .begin = -1, .values = {1, 2}})}));
  EXPECT_TRUE(
      refused({first, with({.parameter = 0, .begin = 500, .values = std::vector<float>(20)})}));
  PartSums groups = second;
  groups.groups.resize(2);
  EXPECT_TRUE(refused({first, groups}));
}

}  // namespace
}  // namespace ballast
