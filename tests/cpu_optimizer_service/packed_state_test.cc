// Jobs with packed state: what is refused, what they cost, and how their state changes its format.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <filesystem>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/packed/codes.h"
#include "cpu_optimizer_service/common/plan/memory_need.h"
#include "tests/cpu_optimizer_service/job/job_driver.h"
#include "tests/cpu_optimizer_service/job/outcome.h"
#include "tests/support/messages.h"

namespace ballast {
namespace {

namespace fs = std::filesystem;

JobSpec Spec(StateFormat format, int64_t rows = 128) {
  JobSpec spec;
  spec.name = absl::StrCat("job-", Name(format));
  spec.groups = {{.name = "matrices"}, {.name = "others"}};
  for (GroupSpec& group : spec.groups) group.hyper_parameters.beta2 = 0.97;
  spec.layout.group_count = 2;
  spec.layout.parameters = {{.name = "a", .shape = {rows, 100}},
                            {.name = "bias", .shape = {50}},
                            {.name = "b", .shape = {64, 65}, .group = 1}};
  spec.layout.states = {{.format = format}, {}};
  EXPECT_TRUE(CutInBuckets(1 << 20, spec.layout).ok());
  return spec;
}

class PackedJobTest : public testing::Test {
 protected:
  PackedJobTest() : root_(fs::path(testing::TempDir()) / ("packed" + std::to_string(getpid()))) {
    fs::create_directories(root_);
  }
  ~PackedJobTest() override { fs::remove_all(root_); }

  std::unique_ptr<JobDriver> Trained(StateFormat format) {
    auto driver = std::make_unique<JobDriver>(engine_, Spec(format));
    driver->UploadWeights();
    driver->AttachAll();
    for (int step = 1; step <= 3; ++step) driver->Step(step);
    return driver;
  }
  std::vector<float> Values(Job& job, int parameter, Plane plane) {
    std::vector<float> values(job.layout().place(parameter).elements);
    job.TakeSnapshot({parameter}).value().Read(parameter, plane, 0, absl::MakeSpan(values));
    return values;
  }
  absl::Status Load(Job& job, const std::string& path, bool convert) {
    Outcome<CheckpointInfo> loaded;
    (void)job.Load({.path = path, .convert_state = convert}, loaded.done());
    return loaded.Get().status();
  }

  const fs::path root_;
  Engine engine_{{.memory_limit_bytes = int64_t{1} << 30, .threads = 2}};
};

constexpr Plane kPlanes[] = {Plane::kMaster, Plane::kExpAvg, Plane::kExpAvgSq};

TEST_F(PackedJobTest, OfAFormatThatItsRuleDoesNotHaveIsRefused) {
  JobSpec spec = Spec(StateFormat::kBFloat16);
  spec.groups[0].hyper_parameters.beta2 = 0.999;
  EXPECT_TRUE(Refused(engine_.CreateJob(spec), absl::StatusCode::kInvalidArgument));
  spec = Spec(StateFormat::k8Bit);
  spec.groups[0].hyper_parameters.amsgrad = true;
  EXPECT_TRUE(Refused(engine_.CreateJob(spec), absl::StatusCode::kInvalidArgument));
  spec.groups[0].hyper_parameters = DefaultsOf(Rule::kLion);
  EXPECT_TRUE(Refused(engine_.CreateJob(spec), absl::StatusCode::kInvalidArgument));
}

TEST_F(PackedJobTest, ABeta2ThatBFloat16DoesNotFollowIsRefusedLaterToo) {
  const auto driver = Trained(StateFormat::kBFloat16);
  EXPECT_TRUE(
      Refused(driver->job().UpdateGroup(0, {.beta2 = 0.99}), absl::StatusCode::kInvalidArgument));
  EXPECT_TRUE(driver->job().UpdateGroup(1, {.beta2 = 0.99}).ok()) << "that group is in fp32";
}

TEST_F(PackedJobTest, ReturnsTheWeightsThatItHas) {
  const auto driver = Trained(StateFormat::k8Bit);
  const std::vector<float> master = Values(driver->job(), 0, Plane::kMaster);
  const Chunk& chunk = driver->layout().chunks()[0];
  ASSERT_EQ(chunk.format, StateFormat::k8Bit);
  const std::vector<std::byte> shard = driver->listener(0).shards().at(0).value();
  for (size_t i = 0; i < master.size(); ++i) {
    uint16_t weight = 0;
    std::memcpy(&weight, shard.data() + 2 * i, sizeof(weight));
    ASSERT_EQ(weight, PackWeight(master[i])) << i;
  }
}

TEST_F(PackedJobTest, LoadsTheStateOfAnotherFormatOnlyWhenAsked) {
  for (const StateFormat from : kStateFormats) {
    const auto source = Trained(from);
    const std::string path = (root_ / std::string(Name(from))).string();
    ASSERT_TRUE(source->job().Save(path).ok());
    for (const StateFormat to : kStateFormats) {
      SCOPED_TRACE(absl::StrCat(Name(from), " to ", Name(to)));
      JobSpec spec = Spec(to);
      spec.name = "target";
      JobDriver target(engine_, spec);
      if (from != to) {
        EXPECT_TRUE(
            Refused(Load(target.job(), path, false), absl::StatusCode::kFailedPrecondition));
      }
      ASSERT_EQ(Load(target.job(), path, from != to), absl::OkStatus());
      for (const int parameter : {0, 1, 2}) {
        for (const Plane plane : kPlanes) {
          const std::vector<float> there = Values(source->job(), parameter, plane);
          const std::vector<float> here = Values(target.job(), parameter, plane);
          // In fp32 every value of the other formats can be stored.
          const bool exact = from == to || to == StateFormat::kFloat32 || plane == Plane::kMaster ||
                             parameter != 0;
          if (exact) EXPECT_EQ(here, there) << parameter << Name(plane);
          float largest = 0;
          for (const float value : there) largest = std::max(largest, std::fabs(value));
          for (size_t i = 0; i < here.size(); ++i) {
            ASSERT_NEAR(here[i], there[i], largest / 15) << parameter << Name(plane) << i;
          }
        }
      }
      // And back, to what it was.
      const std::string converted = (root_ / "converted").string();
      ASSERT_TRUE(target.job().Save(converted).ok());
      JobSpec again = Spec(to);
      again.name = "again";
      JobDriver same(engine_, again);
      ASSERT_EQ(Load(same.job(), converted, false), absl::OkStatus());
      EXPECT_EQ(same.job().StateHash(), target.job().StateHash());
      fs::remove_all(converted);
      ASSERT_TRUE(engine_.CloseJob("target").ok());
      ASSERT_TRUE(engine_.CloseJob("again").ok());
    }
  }
}

TEST_F(PackedJobTest, CostsWhatItsFormatSays) {
  constexpr int64_t kRows = 20'000;
  const int64_t elements = kRows * 100;
  const auto bytes_of = [&](StateFormat format) {
    const JobSpec spec = Spec(format, kRows);
    const MemoryNeed need = NeedOf(spec, Layout::Create(spec.layout).value());
    return static_cast<double>(need.state_bytes) / static_cast<double>(elements);
  };
  EXPECT_NEAR(bytes_of(StateFormat::kFloat32), 12, 0.1);
  EXPECT_NEAR(bytes_of(StateFormat::kBFloat16), 8, 0.1);
  EXPECT_NEAR(bytes_of(StateFormat::k8Bit), 6.125, 0.1);
  const auto driver = Trained(StateFormat::k8Bit);
  const CheckpointInfo saved = driver->job().Save((root_ / "sizes").string()).value();
  const double of_a = 128 * 100 * 6.125, others = (50 + 64 * 65) * 12;
  EXPECT_NEAR(static_cast<double>(saved.size_bytes), of_a + others, 4000) << "and headers";
}

}  // namespace
}  // namespace ballast
