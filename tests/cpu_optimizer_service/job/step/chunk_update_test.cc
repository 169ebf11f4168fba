#include "cpu_optimizer_service/job/step/chunk_update.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "cpu_optimizer_service/common/float_format.h"
#include "cpu_optimizer_service/host/task_pool.h"
#include "tests/cpu_optimizer_service/host/topology_for_tests.h"
#include "tests/cpu_optimizer_service/job/job_driver.h"

namespace ballast {
namespace {

constexpr int64_t kElements = 2048;

// One chunk of parameters of these sizes, updated from TestValue, with counts by parameter.
struct Updated {
  std::vector<float> planes[3];
  std::vector<uint16_t> shard = std::vector<uint16_t>(kElements, 0xdead);
};
Updated Update(const std::vector<int64_t>& sizes, const std::vector<int64_t>& counts,
               bool in_place) {
  const JobSpec spec = MakeJobSpec({.group_sizes = {sizes}, .bucket_elements = kElements});
  const Layout layout = Layout::Create(spec.layout).value();
  EXPECT_EQ(layout.chunks().size(), 1u);
  const int64_t elements = layout.chunks()[0].elements;
  Updated result;
  std::vector<float> from[3];
  Slot source, destination;
  for (int plane = 0; plane < 3; ++plane) {
    for (int64_t i = 0; i < elements; ++i) {
      const float value = layout.ParameterAt(0, i) == -1 ? 0.0f : TestValue(plane + 1, 0, i);
      from[plane].push_back(plane == 2 ? value * value : value);
    }
    result.planes[plane] = in_place ? from[plane] : std::vector<float>(elements, -1.0f);
    source.planes[plane] = in_place ? result.planes[plane].data() : from[plane].data();
    destination.planes[plane] = result.planes[plane].data();
  }
  std::vector<float> gradient(elements, 0.0f);
  for (int64_t i = 0; i < elements; ++i) {
    if (layout.ParameterAt(0, i) != -1) gradient[i] = TestValue(9, 0, i);
  }
  const HyperParameters values;
  UpdateChunk({.layout = &layout,
               .chunk = 0,
               .gradient = {gradient.data(), DType::kFloat32},
               .from = source,
               .to = destination,
               .hyper_parameters = &values,
               .multiplier = 0.5f,
               .shard = result.shard.data()},
              [&](int parameter) { return counts[parameter]; });
  return result;
}

TEST(ChunkUpdate, ManySmallParametersGiveTheBitsOfOneLargeOne) {
  const Updated one = Update({2048}, {5}, true);
  const Updated many = Update({1, 7, 0, 500, 1000, 540}, {5, 5, 5, 5, 5, 5}, true);
  for (int plane = 0; plane < 3; ++plane) EXPECT_EQ(one.planes[plane], many.planes[plane]);
  EXPECT_EQ(one.shard, many.shard);
}

TEST(ChunkUpdate, InPlaceAndIntoAFreshSlotGiveTheSame) {
  const Updated in_place = Update({300, 700, 900}, {1, 0, 3}, true);
  const Updated fresh = Update({300, 700, 900}, {1, 0, 3}, false);
  for (int plane = 0; plane < 3; ++plane) EXPECT_EQ(in_place.planes[plane], fresh.planes[plane]);
  EXPECT_EQ(in_place.shard, fresh.shard);
}

TEST(ChunkUpdate, ParametersAreUpdatedWithTheirOwnCountAndSkippedOnesKept) {
  const Updated mixed = Update({300, 700, 900}, {1, 0, 3}, false);
  const Updated first = Update({300, 700, 900}, {1, 1, 1}, false);
  const Updated third = Update({300, 700, 900}, {3, 3, 3}, false);
  for (int64_t i = 0; i < 2048; ++i) {
    const float got = mixed.planes[0][i];
    if (i < 300) EXPECT_EQ(got, first.planes[0][i]);
    if (i >= 300 && i < 1000) EXPECT_EQ(got, TestValue(1, 0, i));
    if (i >= 1000 && i < 1900) EXPECT_EQ(got, third.planes[0][i]);
    if (i >= 1900) EXPECT_EQ(got, 0.0f);
    EXPECT_EQ(mixed.shard[i], FloatToBFloat16(got));
  }
  EXPECT_NE(first.planes[0], third.planes[0]);
}

// The state that an update is tried on: two parameters, of which the second is left as it is.
struct Tried {
  Tried() : spec(MakeJobSpec({.group_sizes = {{3000, 1000}}, .bucket_elements = 4096})) {
    for (int plane = 0; plane < 4; ++plane) {
      for (int64_t i = 0; i < 4096; ++i) {
        const float value = layout.ParameterAt(0, i) == -1 ? 0.0f : TestValue(plane + 1, 0, i);
        planes[plane].push_back(plane >= 2 ? value * value : value);
      }
      slot.planes[plane] = planes[plane].data();
    }
    for (int64_t i = 0; i < 4096; ++i) gradient.push_back(TestValue(9, 0, i));
  }
  ChunkUpdate Update() {
    return {.layout = &layout,
            .chunk = 0,
            .gradient = {gradient.data(), DType::kFloat32},
            .from = slot,
            .to = {},
            .hyper_parameters = &values};
  }
  static int64_t CountOf(int parameter) { return parameter == 0 ? 3 : 0; }

  JobSpec spec;
  Layout layout = Layout::Create(spec.layout).value();
  HyperParameters values = {.amsgrad = true};
  std::vector<float> gradient, planes[4];
  Slot slot;
};

TEST(TryUpdateChunk, KnowsTheLargestMagnitudesOfTheUpdateAndWritesNothing) {
  Tried tried;
  tried.planes[0][3500] = -7;    // Left as it is, and the largest.
  tried.planes[3][17] = 5;       // The largest of the two second moments.
  tried.gradient[2500] = -1e4f;  // Makes the largest exp_avg, in the second stretch of elements.
  const std::vector<float> before[] = {tried.planes[0], tried.planes[1], tried.planes[2],
                                       tried.planes[3]};
  const TrialUpdate trial = TryUpdateChunk(tried.Update(), Tried::CountOf);
  for (int plane = 0; plane < 4; ++plane) EXPECT_EQ(tried.planes[plane], before[plane]);
  ASSERT_FALSE(trial.non_finite.has_value());

  ChunkUpdate update = tried.Update();
  update.to = tried.slot;
  UpdateChunk(update, Tried::CountOf);
  double largest[4] = {};
  for (int plane = 0; plane < 4; ++plane) {
    for (const float x : tried.planes[plane]) {
      largest[plane] = std::max<double>(largest[plane], std::fabs(x));
    }
  }
  EXPECT_EQ(trial.largest.planes, std::to_array(largest));
  EXPECT_EQ(largest[0], 7);
  EXPECT_GT(largest[1], 900);
}

TEST(TryUpdateChunk, FindsWhereTheStateWouldNotBeFinite) {
  const auto expect_found = [](Tried& tried, Plane plane, int64_t element) {
    const TrialUpdate trial = TryUpdateChunk(tried.Update(), Tried::CountOf);
    ASSERT_TRUE(trial.non_finite.has_value());
    EXPECT_EQ(trial.non_finite->plane, plane);
    EXPECT_EQ(trial.non_finite->element, element);
    EXPECT_FALSE(std::isfinite(trial.non_finite->value));
  };
  Tried large;
  large.gradient[2999] = 1e21f;  // Its square times 1 - beta2 is 1e39.
  expect_found(large, Plane::kExpAvgSq, 2999);
  large.gradient[2999] = 1e20f;
  EXPECT_FALSE(TryUpdateChunk(large.Update(), Tried::CountOf).non_finite.has_value());
  Tried no_denominator;
  no_denominator.values.eps = 0;
  for (const int plane : {2, 3}) no_denominator.planes[plane][2048] = 0;
  no_denominator.gradient[2048] = 0;
  expect_found(no_denominator, Plane::kMaster, 2048);
  Tried left_alone;
  left_alone.gradient[3500] = 3e38f;
  EXPECT_FALSE(TryUpdateChunk(left_alone.Update(), Tried::CountOf).non_finite.has_value());
}

// P7: nor on nodes.
TEST(ChunkUpdate, BitsDependNeitherOnThreadsNorOnNodes) {
  const JobSpec spec = MakeJobSpec(
      {.group_sizes = {{5000, 30, 70000}}, .bucket_elements = 1 << 20, .chunk_elements = 1024});
  const Layout layout = Layout::Create(spec.layout).value();
  const int64_t elements = layout.flat_elements(0);
  const HyperParameters values;
  const auto update_with = [&](TaskPool& pool) {
    std::vector<float> gradient, planes[3];
    for (int64_t i = 0; i < elements; ++i) {
      gradient.push_back(TestValue(9, 0, i));
      for (int plane = 0; plane < 3; ++plane) {
        planes[plane].push_back(std::fabs(TestValue(plane + 1, 0, i)));
      }
    }
    pool.ForEach(static_cast<int64_t>(layout.chunks().size()), [&](int64_t chunk) {
      const int64_t begin = layout.chunks()[chunk].begin;
      Slot slot;
      for (int plane = 0; plane < 3; ++plane) slot.planes[plane] = planes[plane].data() + begin;
      UpdateChunk({.layout = &layout,
                   .chunk = static_cast<int>(chunk),
                   .gradient = {gradient.data() + begin, DType::kFloat32},
                   .from = slot,
                   .to = slot,
                   .hyper_parameters = &values},
                  [](int parameter) { return parameter + 1; });
    });
    return std::vector<std::vector<float>>{planes[0], planes[1], planes[2]};
  };
  TaskPool one(1);
  const auto expected = update_with(one);
  for (const int nodes : {1, 2, 3}) {
    TaskPool pool(4, SeveralNodesInOne(nodes));
    EXPECT_EQ(update_with(pool), expected) << nodes;
  }
}

}  // namespace
}  // namespace ballast
