#include "cpu_optimizer_service/state/checkpoint.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "cpu_optimizer_service/common/system/sha256.h"
#include "tests/cpu_optimizer_service/job/job_driver.h"

namespace ballast {
namespace {

using ::testing::HasSubstr;
namespace fs = std::filesystem;

// Passes everything on to the real files until `bytes_left` have been written: then the disk is
// full.
class FillingFileSystem : public FileSystem {
 public:
  class File : public WritableFile {
   public:
    File(FillingFileSystem& owner, std::unique_ptr<WritableFile> file)
        : owner_(owner), file_(std::move(file)) {}
    absl::Status Append(absl::Span<const std::byte> bytes) override {
      owner_.bytes_left -= static_cast<int64_t>(bytes.size());
      if (owner_.bytes_left < 0) return absl::ResourceExhaustedError("disk full");
      return file_->Append(bytes);
    }
    absl::Status Close() override { return file_->Close(); }

   private:
    FillingFileSystem& owner_;
    std::unique_ptr<WritableFile> file_;
  };
  absl::StatusOr<std::unique_ptr<WritableFile>> Create(const std::string& path) override {
    auto file = PosixFileSystem().Create(path);
    if (!file.ok()) return file.status();
    return std::make_unique<File>(*this, *std::move(file));
  }
  absl::StatusOr<std::unique_ptr<ReadableFile>> Open(const std::string& path) override {
    return PosixFileSystem().Open(path);
  }
  bool Exists(const std::string& path) override { return PosixFileSystem().Exists(path); }
  absl::Status CreateDirectory(const std::string& path) override {
    return PosixFileSystem().CreateDirectory(path);
  }
  absl::Status Exchange(const std::string& from, const std::string& to) override {
    return PosixFileSystem().Exchange(from, to);
  }
  absl::Status RemoveAll(const std::string& path) override {
    return PosixFileSystem().RemoveAll(path);
  }

  int64_t bytes_left = 0;
};

class CheckpointTest : public testing::Test {
 protected:
  CheckpointTest()
      : root_(fs::path(testing::TempDir()) / ("checkpoint" + std::to_string(getpid()))) {
    fs::remove_all(root_);
    fs::create_directories(root_);
  }
  ~CheckpointTest() override { fs::remove_all(root_); }

  std::string Path(const std::string& name) const { return (root_ / name).string(); }
  static JobSpec Spec(int world_size) {
    JobSpec spec = MakeJobSpec(
        {.group_sizes = {{1000, 0, 24}, {3000}}, .world_size = world_size, .chunk_elements = 512});
    spec.groups[1].hyper_parameters.amsgrad = true;
    spec.max_norm = 1.0;
    return spec;
  }

  const fs::path root_;
  Engine engine_{{.memory_limit_bytes = int64_t{64} << 20, .threads = 2}};
};

TEST_F(CheckpointTest, LoadedOntoAnyWorldSizeGoesOnWithTheSameBits) {
  Engine uninterrupted_engine({.memory_limit_bytes = int64_t{64} << 20, .threads = 2});
  JobDriver uninterrupted(uninterrupted_engine, Spec(2));
  JobDriver first(engine_, Spec(2));
  for (JobDriver* driver : {&uninterrupted, &first}) {
    driver->UploadWeights();
    driver->AttachAll();
    driver->Step(1, 2, {.overrides = {{0, {.lr = 0.05}}}});
    driver->Step(2);
  }
  ASSERT_TRUE(first.job().Save(Path("saved")).ok());
  uninterrupted.Step(3);
  uninterrupted.Step(4, 3);
  for (const int world_size : {1, 2, 3, 4}) {
    Engine engine({.memory_limit_bytes = int64_t{64} << 20, .threads = 2});
    JobDriver resumed(engine, Spec(world_size));
    ASSERT_TRUE(resumed.job().Load(Path("saved")).ok());
    EXPECT_EQ(resumed.job().Status().committed_step, 2u);
    EXPECT_EQ(resumed.job().Status().hyper_parameters[0].lr, 0.05);
    EXPECT_EQ(resumed.job().StateHash(), first.job().StateHash());
    resumed.AttachAll();
    resumed.Step(3);
    resumed.Step(4, 3);
    EXPECT_EQ(resumed.job().StateHash(), uninterrupted.job().StateHash()) << world_size << " ranks";
  }
}

TEST_F(CheckpointTest, ALoadBringsBackTheTrainersStateAndTheRecordOfTheLastStep) {
  const std::string any("\0\xff\"\n", 4);
  JobDriver first(engine_, Spec(2));
  first.UploadWeights();
  first.AttachAll();
  first.Step(1);
  // A skipped step: its norm is no number of JSON's. Then a change that it did not use.
  first.BeginAll({.scale = {.loss_scale = 8},
                  .overrides = {{0, {.lr = 0.05}}, {1, {.lr = 0.25}}},
                  .trainer_state = any});
  first.SendAllWith(NAN, 0, 7, 2, 0);
  first.EndMicroStepAll(0);
  first.SealAll(1);
  ASSERT_TRUE(first.job().UpdateGroup(0, {.lr = 0.5}).ok());
  ASSERT_TRUE(first.job().Save(Path("saved")).ok());
  const StepRecord saved = first.job().Status().recent_steps.back();
  first.Step(3);

  // The job itself, gone on meanwhile; and another, whose groups are in another order.
  JobSpec turned = Spec(1);
  turned.name = "turned";
  std::swap(turned.groups[0], turned.groups[1]);
  for (ParameterSpec& parameter : turned.layout.parameters) parameter.group = 1 - parameter.group;
  turned.layout.partitions = {{.rank = 0, .group = 0, .begin = 0, .end = 3072},
                              {.rank = 0, .group = 1, .begin = 0, .end = 1024}};
  JobDriver other(engine_, turned);
  for (JobDriver* driver : {&first, &other}) {
    ASSERT_TRUE(driver->job().Load(Path("saved")).ok());
    const JobStatus status = driver->job().Status();
    EXPECT_EQ(status.trainer_state, any);
    ASSERT_EQ(status.recent_steps.size(), 1u);  // Not those of steps that are gone.
    const StepRecord& record = status.recent_steps[0];
    EXPECT_EQ(record.outcome.step, 2u);
    EXPECT_FALSE(record.outcome.decision.apply);
    EXPECT_TRUE(std::isnan(record.outcome.decision.norm));
    EXPECT_EQ(record.outcome.skip_reason, saved.outcome.skip_reason);
    EXPECT_EQ(record.micro_steps, 1u);
    EXPECT_EQ(record.loss_scale, 8);
    const int group0 = driver == &first ? 0 : 1;
    EXPECT_EQ(record.hyper_parameters[group0].lr, 0.05);
    EXPECT_EQ(record.hyper_parameters[1 - group0].lr, 0.25);
    EXPECT_EQ(status.hyper_parameters[group0].lr, 0.5);
    EXPECT_TRUE(record.hyper_parameters[1 - group0].amsgrad);
    // A checkpoint of what was loaded says the same.
    ASSERT_TRUE(driver->job().Save(Path("again")).ok());
    ASSERT_TRUE(driver->job().Load(Path("again")).ok());
    EXPECT_EQ(driver->job().Status().trainer_state, any);
    EXPECT_EQ(driver->job().Status().recent_steps[0].outcome.skip_reason,
              saved.outcome.skip_reason);
  }
}

TEST_F(CheckpointTest, WhatTheIndexSaysOfTheLastStepIsCheckedAndMayBeAbsent) {
  JobDriver driver(engine_, Spec(1));
  driver.UploadWeights();
  driver.AttachAll();
  driver.Step(1, 1, {.trainer_state = "state"});
  ASSERT_TRUE(driver.job().Save(Path("saved")).ok());
  const auto load_with = [&](const auto& change) {
    std::ifstream in(Path("saved") + "/index.json");
    nlohmann::json index = nlohmann::json::parse(in);
    change(index);
    index.erase("sha256");
    Sha256 sha256;
    sha256.Add(index.dump());
    index["sha256"] = sha256.Hex();
    fs::remove_all(Path("changed"));
    fs::copy(Path("saved"), Path("changed"), fs::copy_options::recursive);
    std::ofstream(Path("changed") + "/index.json") << index;
    return driver.job().Load(Path("changed")).status();
  };
  using nlohmann::json;
  const std::vector<std::function<void(json&)>> kDamages = {
      [](json& index) { index["trainer_state"] = "abc"; },  // Half a byte,
      [](json& index) { index["trainer_state"] = "zz"; },   // no number,
      [](json& index) { index["trainer_state"] = 7; },      // no text,
      [](json& index) { index["trainer_state"] = std::string(2 * kMaxTrainerStateBytes + 2, 'a'); },
      [](json& index) { index["last_step"]["norm"] = "many"; },
      [](json& index) { index["last_step"].erase("applied"); },
      [](json& index) { index["last_step"]["hyper_parameters"].erase(0); },
      [](json& index) {
        index["last_step"]["unused_parameters"] = std::vector<std::string>(kRecordedNames + 1);
      },
  };
  for (size_t i = 0; i < kDamages.size(); ++i) {
    EXPECT_EQ(load_with(kDamages[i]).code(), absl::StatusCode::kDataLoss) << i;
    EXPECT_EQ(driver.job().Status().trainer_state, "state") << i;
  }
  const absl::Status older = load_with([](json& index) {
    index.erase("trainer_state");
    index.erase("last_step");
  });
  EXPECT_TRUE(older.ok()) << older;
  EXPECT_EQ(driver.job().Status().trainer_state, "");
  EXPECT_TRUE(driver.job().Status().recent_steps.empty());
}

TEST_F(CheckpointTest, LoadRaisesTheGenerationAndDetaches) {
  JobDriver driver(engine_, Spec(1));
  driver.UploadWeights();
  driver.AttachAll();
  driver.Step(1);
  ASSERT_TRUE(driver.job().Save(Path("saved")).ok());
  const std::string saved = driver.job().StateHash();
  driver.Step(2);
  driver.BeginAll();
  driver.SendAll(3, 0);
  const uint64_t generation = driver.job().Status().generation;
  ASSERT_TRUE(driver.job().Load(Path("saved")).ok());
  EXPECT_EQ(driver.job().Status().generation, generation + 1);
  EXPECT_EQ(driver.listener(0).detached().code(), absl::StatusCode::kAborted);
  EXPECT_EQ(driver.job().StateHash(), saved);
  EXPECT_EQ(driver.job().Status().phase, JobPhase::kReady);
}

TEST_F(CheckpointTest, AFullDiskLeavesNothingAndTheOlderCheckpointStands) {
  FillingFileSystem disk;
  Engine engine({.memory_limit_bytes = int64_t{64} << 20, .threads = 1, .file_system = &disk});
  JobDriver driver(engine, Spec(1));
  driver.UploadWeights();
  driver.AttachAll();
  disk.bytes_left = 1 << 30;
  ASSERT_TRUE(driver.job().Save(Path("saved")).ok());
  const std::string saved = driver.job().StateHash();
  driver.Step(1);
  for (const int64_t bytes : {0, 100, 10000, 40000}) {
    disk.bytes_left = bytes;
    EXPECT_EQ(driver.job().Save(Path("saved")).status().code(),
              absl::StatusCode::kResourceExhausted);
    EXPECT_EQ(driver.job().Save(Path("other")).status().code(),
              absl::StatusCode::kResourceExhausted);
  }
  EXPECT_EQ(std::distance(fs::directory_iterator(root_), fs::directory_iterator()), 1);
  ASSERT_TRUE(driver.job().Load(Path("saved")).ok());
  EXPECT_EQ(driver.job().StateHash(), saved);
}

TEST_F(CheckpointTest, NeverReplacesWhatIsNotACheckpoint) {
  JobDriver driver(engine_, Spec(1));
  driver.UploadWeights();
  fs::create_directories(Path("precious"));
  std::ofstream(Path("precious") + "/notes.txt") << "keep";
  EXPECT_EQ(driver.job().Save(Path("precious")).status().code(),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_TRUE(fs::exists(Path("precious") + "/notes.txt"));
  EXPECT_EQ(driver.job().Save("").status().code(), absl::StatusCode::kInvalidArgument);
}

TEST_F(CheckpointTest, DamageIsDataLossAndChangesNothing) {
  JobDriver driver(engine_, Spec(1));
  driver.UploadWeights();
  driver.AttachAll();
  driver.Step(1);
  ASSERT_TRUE(driver.job().Save(Path("saved")).ok());
  driver.Step(2);
  const std::string before = driver.job().StateHash();
  const auto load_damaged = [&](const std::string& file, const auto& damage) {
    fs::remove_all(Path("damaged"));
    fs::copy(Path("saved"), Path("damaged"), fs::copy_options::recursive);
    damage(Path("damaged") + "/" + file);
    const absl::Status status = driver.job().Load(Path("damaged")).status();
    EXPECT_EQ(driver.job().StateHash(), before);
    return status;
  };
  const auto flip = [](const std::string& path) {
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(-5, std::ios::end);
    file.put('\x7f');
  };
  const auto cut = [](const std::string& path) { fs::resize_file(path, fs::file_size(path) - 1); };
  const auto blow_up = [](const std::string& path) {
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    file.write("\xff\xff\xff\xff\xff\xff\xff\x7f", 8);
  };
  const auto truncate = [](const std::string& path) { fs::resize_file(path, 3); };
  for (const char* file :
       {"master.safetensors", "exp_avg.safetensors", "max_exp_avg_sq.safetensors"}) {
    EXPECT_EQ(load_damaged(file, flip).code(), absl::StatusCode::kDataLoss) << file;
    EXPECT_EQ(load_damaged(file, cut).code(), absl::StatusCode::kDataLoss) << file;
    EXPECT_EQ(load_damaged(file, blow_up).code(), absl::StatusCode::kDataLoss) << file;
    EXPECT_EQ(load_damaged(file, truncate).code(), absl::StatusCode::kDataLoss) << file;
  }
  EXPECT_EQ(load_damaged("index.json", truncate).code(), absl::StatusCode::kDataLoss);
  const auto rewrite = [](const std::string& path) {
    std::ofstream(path) << R"({"format": "ballast-checkpoint", "version": 1, "step": "three"})";
  };
  EXPECT_EQ(load_damaged("index.json", rewrite).code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(driver.job().Load(Path("nowhere")).status().code(), absl::StatusCode::kNotFound);
}

TEST_F(CheckpointTest, AChangedIndexIsDataLoss) {
  JobDriver driver(engine_, Spec(1));
  driver.UploadWeights();
  ASSERT_TRUE(driver.job().Save(Path("saved")).ok());
  std::ifstream in(Path("saved") + "/index.json");
  const std::string text((std::istreambuf_iterator<char>(in)), std::istreambuf_iterator<char>());
  for (const auto& [from, to] : std::vector<std::pair<std::string, std::string>>{
           {"\"lr\": 0.001", "\"lr\": 0.002"},
           {"\"step\": 0", "\"step\": -1"},
           {"\"update_count\": 0", "\"update_count\": 9223372036854775807"}}) {
    std::string changed = text;
    ASSERT_NE(changed.find(from), std::string::npos) << from;
    changed.replace(changed.find(from), from.size(), to);
    std::ofstream(Path("saved") + "/index.json") << changed;
    EXPECT_EQ(driver.job().Load(Path("saved")).status().code(), absl::StatusCode::kDataLoss) << to;
  }
  std::ofstream(Path("saved") + "/index.json") << text;
  EXPECT_TRUE(driver.job().Load(Path("saved")).ok());
}

TEST_F(CheckpointTest, AJobOfOtherParametersIsRefusedWithTheFirstDifference) {
  JobDriver driver(engine_, Spec(1));
  driver.UploadWeights();
  ASSERT_TRUE(driver.job().Save(Path("saved")).ok());
  JobSpec other = Spec(1);
  other.name = "other";
  other.layout.parameters[3].shape = {3, 1000};
  JobDriver different(engine_, other);
  const absl::Status status = different.job().Load(Path("saved")).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()), HasSubstr("p3 has shape [3000] there and [3, 1000]"));
  EXPECT_EQ(different.job().Status().phase, JobPhase::kAwaitingWeights);
}

}  // namespace
}  // namespace ballast
