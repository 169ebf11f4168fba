#include "tests/bench/figures.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

namespace ballast::bench {
namespace {

TEST(Quantile, IsTheSmallestSampleThatSoManyDoNotExceed) {
  std::vector<double> samples;
  for (int i = 200; i >= 1; --i) samples.push_back(i);
  EXPECT_EQ(Quantile(samples, 0.99), 198);
  EXPECT_EQ(Quantile(samples, 0.5), 100);
  EXPECT_EQ(Quantile(samples, 1), 200);
  EXPECT_EQ(Quantile(samples, 0), 1);
  EXPECT_EQ(Quantile({7}, 0.99), 7);
  EXPECT_EQ(Quantile({}, 0.99), 0);
}

TEST(Median, IsTheMiddleOrTheMeanOfTheMiddleTwo) {
  EXPECT_EQ(Median({3, 1, 2}), 2);
  EXPECT_EQ(Median({4, 1, 3, 2}), 2.5);
  EXPECT_EQ(Median({}), 0);
}

TEST(Figures, AreWrittenAsTheReportReadsThem) {
  Figures figures("some");
  figures.Add("speed", {3, 1, 2}, "GB/s");
  figures.Add("kept", {1}, "s", /*keep=*/true);
  figures.Add("none", {}, "s");
  figures.info()["threads"] = 2;
  const std::string path =
      (std::filesystem::path(testing::TempDir()) / "ballast_figures_test.json").string();
  ASSERT_TRUE(figures.Write(path).ok());
  std::ifstream file(path);
  const auto read = nlohmann::json::parse(file);
  std::filesystem::remove(path);
  const auto expected = nlohmann::json::parse(
      R"({"name": "some", "info": {"threads": 2}, "figures": {
          "speed": {"median": 2.0, "min": 1.0, "max": 3.0, "p99": 3.0, "unit": "GB/s"},
          "kept": {"median": 1.0, "min": 1.0, "max": 1.0, "p99": 1.0, "unit": "s",
                   "samples": [1.0]}}})");
  EXPECT_EQ(read, expected);
}

TEST(Figures, NameTheFileThatCannotBeWritten) {
  const absl::Status status = Figures("some").Write("/no/such/folder/file");
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_NE(status.message().find("/no/such/folder/file"), absl::string_view::npos);
}

}  // namespace
}  // namespace ballast::bench
