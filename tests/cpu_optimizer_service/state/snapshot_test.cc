#include "cpu_optimizer_service/state/snapshot.h"

#include <gtest/gtest.h>

#include <cmath>

#include "tests/cpu_optimizer_service/job/job_driver.h"

namespace ballast {
namespace {

TEST(Snapshot, ReadsPlanesInPiecesAcrossChunks) {
  Engine engine({.memory_limit_bytes = int64_t{16} << 20, .threads = 1});
  JobDriver driver(engine, MakeJobSpec({.group_sizes = {{100, 1000}}, .chunk_elements = 256}));
  driver.UploadWeights();
  const Snapshot snapshot = driver.job().TakeSnapshot({1}).value();
  std::vector<float> piece(600);
  snapshot.Read(1, Plane::kMaster, 300, absl::MakeSpan(piece));
  for (int64_t i = 0; i < 600; ++i) EXPECT_EQ(piece[i], TestValue(1, 0, 100 + 300 + i));
  EXPECT_TRUE(snapshot.has_plane(1, Plane::kExpAvg));
  EXPECT_FALSE(snapshot.has_plane(1, Plane::kMaxExpAvgSq));
}

TEST(Snapshot, SummariesCountAndMeasure) {
  Engine engine({.memory_limit_bytes = int64_t{16} << 20, .threads = 1});
  JobDriver driver(engine, MakeJobSpec({.group_sizes = {{6}}}));
  std::vector<float> weights(256, 0.0f);
  weights[0] = 3;
  weights[1] = -4;
  weights[2] = 0.05f;
  const auto piece = absl::MakeConstSpan(reinterpret_cast<const std::byte*>(weights.data()), 1024);
  ASSERT_TRUE(driver.job().WriteInitialWeights(0, {piece}).value());
  const PlaneSummary summary =
      Summarize(driver.job().TakeSnapshot({0}).value(), 0, {{0, 2}, {2, 6}}, Plane::kMaster);
  EXPECT_NEAR(summary.norm(), std::sqrt(25.0025), 1e-7);
  EXPECT_NEAR(summary.mean(), -0.95 / 6, 1e-7);
  EXPECT_EQ(summary.min, -4);
  EXPECT_EQ(summary.max, 3);
  EXPECT_EQ(summary.zeros, 3);
  EXPECT_EQ(summary.non_finite, 0);               // checkpoint_test.cc has one that is not.
  EXPECT_EQ(summary.magnitude_histogram[12], 2);  // 1 <= |x| < 10
  EXPECT_EQ(summary.magnitude_histogram[10], 1);  // 0.01 <= |x| < 0.1
}

}  // namespace
}  // namespace ballast
