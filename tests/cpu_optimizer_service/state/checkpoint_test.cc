#include "cpu_optimizer_service/state/checkpoint.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <atomic>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "cpu_optimizer_service/common/system/sha256.h"
#include "cpu_optimizer_service/state/snapshot.h"
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
      const auto size = static_cast<int64_t>(bytes.size());  // Planes are written in parallel.
      if (owner_.bytes_left.fetch_sub(size) < size)
        return absl::ResourceExhaustedError("disk full");
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
  absl::StatusOr<std::vector<std::string>> List(const std::string& directory) override {
    return PosixFileSystem().List(directory);
  }
  std::shared_ptr<const void> TryLock(const std::string& directory) override {
    return PosixFileSystem().TryLock(directory);
  }

  std::atomic<int64_t> bytes_left = 0;
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

TEST_F(CheckpointTest, OnlyAnOlderCheckpointOfTheSameRunIsReplacedUnlessForced) {
  JobDriver driver(engine_, Spec(1));
  driver.UploadWeights();
  driver.AttachAll();
  driver.Step(1);
  ASSERT_TRUE(driver.job().Save(Path("first")).ok());
  driver.Step(2);
  ASSERT_TRUE(driver.job().Save(Path("saved")).ok());
  ASSERT_TRUE(driver.job().Save(Path("saved")).ok());  // The same step, again.

  // The job itself, at an earlier step.
  ASSERT_TRUE(driver.job().Load(Path("first")).ok());
  const absl::Status earlier = driver.job().Save(Path("saved")).status();
  EXPECT_EQ(earlier.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(earlier.message()),
              testing::AllOf(HasSubstr(Path("saved")), HasSubstr("a later step"),
                             HasSubstr("at step 2"), HasSubstr("at step 1"), HasSubstr("--force")));

  // Another job of the same description and a later step.
  Engine engine({.memory_limit_bytes = int64_t{64} << 20, .threads = 2});
  JobDriver young(engine, Spec(1));
  young.UploadWeights();
  young.AttachAll();
  for (const uint64_t step : {1, 2, 3}) young.Step(step);
  const absl::Status another = young.job().Save(Path("saved")).status();
  EXPECT_EQ(another.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(another.message()), HasSubstr("a checkpoint of another job"));
  EXPECT_EQ(driver.job().Load(Path("saved"))->step, 2u);  // It stands.

  // One that goes on from it may replace it, and nobody else's.
  JobSpec spec = Spec(1);
  spec.name = "resumed";
  JobDriver resumed(engine, spec);
  ASSERT_TRUE(resumed.job().Load(Path("saved")).ok());
  resumed.AttachAll();
  resumed.Step(3);
  EXPECT_TRUE(resumed.job().Save(Path("saved")).ok());
  EXPECT_FALSE(young.job().Save(Path("saved")).ok());
  EXPECT_TRUE(young.job().Save(Path("saved"), Replace::kAny).ok());
  EXPECT_EQ(driver.job().Load(Path("saved"))->step, 3u);
}

TEST_F(CheckpointTest, ASaveRemovesWhatKilledOnesLeftAndNothingThatIsInUse) {
  JobDriver driver(engine_, Spec(1));
  driver.UploadWeights();
  for (const char* name : {"saved.partial-dead", "saved.partial-live", "saved2.partial-dead"}) {
    fs::create_directories(Path(name));
    std::ofstream(Path(name) + "/master.safetensors") << "half";
  }
  const std::shared_ptr<const void> lock = PosixFileSystem().TryLock(Path("saved.partial-live"));
  ASSERT_NE(lock, nullptr);
  ASSERT_TRUE(driver.job().Save(Path("saved")).ok());
  EXPECT_FALSE(fs::exists(Path("saved.partial-dead")));
  EXPECT_TRUE(fs::exists(Path("saved.partial-live")));
  EXPECT_TRUE(fs::exists(Path("saved2.partial-dead")));  // Another's.
}

// As of NFS, Lustre and CephFS.
int TakesNoFlags(const char*, const char*, unsigned) {
  errno = EINVAL;
  return -1;
}

TEST_F(CheckpointTest, IsReplacedWhereRenamesTakeNoFlags) {
  const std::unique_ptr<FileSystem> files = MakePosixFileSystem(TakesNoFlags);
  Engine engine(
      {.memory_limit_bytes = int64_t{64} << 20, .threads = 2, .file_system = files.get()});
  JobDriver driver(engine, Spec(1));
  driver.UploadWeights();
  driver.AttachAll();
  ASSERT_TRUE(driver.job().Save(Path("saved")).ok());
  driver.Step(1);
  ASSERT_TRUE(driver.job().Save(Path("saved")).ok());
  EXPECT_EQ(std::distance(fs::directory_iterator(root_), fs::directory_iterator()), 1);
  EXPECT_EQ(driver.job().Load(Path("saved"))->step, 1u);

  // Killed between its two moves, a save leaves the older checkpoint aside.
  fs::rename(Path("saved"), AsideOf(Path("saved")));
  EXPECT_EQ(driver.job().Load(Path("saved"))->step, 1u);
  JobDriver young(engine_, Spec(1));
  young.UploadWeights();
  EXPECT_EQ(young.job().Save(Path("saved")).status().code(),
            absl::StatusCode::kFailedPrecondition);  // It is still in the way.
  driver.AttachAll();
  driver.Step(2);
  ASSERT_TRUE(driver.job().Save(Path("saved")).ok());
  EXPECT_EQ(std::distance(fs::directory_iterator(root_), fs::directory_iterator()), 1);
  EXPECT_EQ(driver.job().Load(Path("saved"))->step, 2u);
}

TEST_F(CheckpointTest, WhatIsNoRegularFileIsRefusedAtOnce) {
  JobDriver driver(engine_, Spec(1));
  driver.UploadWeights();
  ASSERT_TRUE(driver.job().Save(Path("saved")).ok());
  for (const char* file : {"index.json", "exp_avg.safetensors"}) {
    fs::remove_all(Path("pipe"));
    fs::copy(Path("saved"), Path("pipe"), fs::copy_options::recursive);
    fs::remove(Path("pipe") + "/" + file);
    ASSERT_EQ(mkfifo((Path("pipe") + "/" + file).c_str(), 0600), 0);
    const absl::Status status = driver.job().Load(Path("pipe")).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("is not a regular file"));
  }
}

// Replaces the checksum of an index by the right one.
void Sign(nlohmann::json& index) {
  index.erase("sha256");
  Sha256 sha256;
  sha256.Add(index.dump());
  index["sha256"] = sha256.Hex();
}

nlohmann::json ReadJson(const std::string& path) {
  std::ifstream in(path);
  return nlohmann::json::parse(in);
}

TEST_F(CheckpointTest, AnIndexOfMoreThanTheJobCanHaveIsNotParsed) {
  JobDriver driver(engine_, Spec(1));
  driver.UploadWeights();
  ASSERT_TRUE(driver.job().Save(Path("saved")).ok());
  nlohmann::json index = ReadJson(Path("saved") + "/index.json");
  const nlohmann::json extra = index["parameters"][0];
  // Small enough: then the first of them is named.
  index["parameters"].push_back(extra);
  Sign(index);
  std::ofstream(Path("saved") + "/index.json") << index;
  EXPECT_THAT(std::string(driver.job().Load(Path("saved")).status().message()),
              HasSubstr("it has p0 twice"));
  for (int i = 0; i < 35'000; ++i) index["parameters"].push_back(extra);
  Sign(index);
  std::ofstream(Path("saved") + "/index.json") << index;
  const absl::Status status = driver.job().Load(Path("saved")).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()), HasSubstr("bytes, where at most"));
}

TEST_F(CheckpointTest, ValuesThatNoUpdateLeavesAreRefusedByName) {
  JobDriver driver(engine_, Spec(1));
  driver.UploadWeights();
  driver.AttachAll();
  driver.Step(1);
  ASSERT_TRUE(driver.job().Save(Path("saved")).ok());
  const std::string hash = driver.job().StateHash();
  // A checkpoint with one value of p2, the third parameter, changed, and all checksums right.
  const auto load_with = [&](const std::string& plane, float value) {
    fs::remove_all(Path("changed"));
    fs::copy(Path("saved"), Path("changed"), fs::copy_options::recursive);
    const std::string path = Path("changed") + "/" + plane + ".safetensors";
    std::ifstream in(path, std::ios::binary);
    std::string bytes((std::istreambuf_iterator<char>(in)), std::istreambuf_iterator<char>());
    uint64_t header_bytes = 0;
    std::memcpy(&header_bytes, bytes.data(), sizeof(header_bytes));
    const auto header = nlohmann::json::parse(bytes.substr(8, header_bytes));
    const size_t begin = 8 + header_bytes + header["p2"]["data_offsets"][0].get<size_t>();
    std::memcpy(bytes.data() + begin + 5 * sizeof(float), &value, sizeof(value));
    std::ofstream(path, std::ios::binary) << bytes;
    nlohmann::json index = ReadJson(Path("changed") + "/index.json");
    Sha256 sha256;
    sha256.Add(bytes);
    index["files"][plane]["sha256"] = sha256.Hex();
    Sign(index);
    std::ofstream(Path("changed") + "/index.json") << index;
    return driver.job().Load(Path("changed")).status();
  };
  for (const auto& [plane, value, text] : std::vector<std::tuple<std::string, float, std::string>>{
           {"master", NAN, "nan"},
           {"master", std::numeric_limits<float>::infinity(), "inf"},
           {"master", -std::numeric_limits<float>::infinity(), "-inf"},
           {"exp_avg", NAN, "nan"},
           {"exp_avg", std::numeric_limits<float>::infinity(), "inf"},
           {"exp_avg_sq", NAN, "nan"},
           {"exp_avg_sq", std::numeric_limits<float>::infinity(), "inf"},
           {"exp_avg_sq", -1e-30f, "-1e-30"},
           {"exp_avg_sq", -std::numeric_limits<float>::infinity(), "-inf"}}) {
    const absl::Status status = load_with(plane, value);
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << plane;
    EXPECT_THAT(std::string(status.message()),
                AllOf(HasSubstr("/changed/" + plane + ".safetensors: "),
                      HasSubstr(plane + " of p2 is " + text + " at element 5")));
    EXPECT_EQ(driver.job().StateHash(), hash);
  }
  EXPECT_TRUE(load_with("exp_avg", -1e-30f).ok());
  EXPECT_TRUE(load_with("exp_avg_sq", 0).ok());
  EXPECT_TRUE(load_with("master", std::numeric_limits<float>::lowest()).ok());
  EXPECT_TRUE(load_with("exp_avg_sq", std::numeric_limits<float>::max()).ok());
}

// Does something whenever a file of exp_avg is to be opened.
class InterruptedFileSystem : public FillingFileSystem {
 public:
  InterruptedFileSystem() { bytes_left = int64_t{1} << 30; }
  absl::StatusOr<std::unique_ptr<ReadableFile>> Open(const std::string& path) override {
    if (interrupt && path.ends_with("/exp_avg.safetensors")) interrupt();
    return FillingFileSystem::Open(path);
  }
  std::function<void()> interrupt;
};

TEST_F(CheckpointTest, ALoadThatASaveOvertakesReadsTheNewerOneOrSaysWhatHappened) {
  InterruptedFileSystem files;
  Engine engine({.memory_limit_bytes = int64_t{64} << 20, .threads = 2, .file_system = &files});
  JobDriver driver(engine, Spec(1));
  driver.UploadWeights();
  driver.AttachAll();
  ASSERT_TRUE(driver.job().Save(Path("saved")).ok());
  driver.Step(1);
  const std::string hash = driver.job().StateHash();
  int interrupts = 0;
  files.interrupt = [&] {
    if (++interrupts == 1) EXPECT_TRUE(driver.job().Save(Path("saved")).ok());
  };
  EXPECT_EQ(driver.job().Load(Path("saved")).value().step, 1u);
  EXPECT_EQ(interrupts, 2);
  EXPECT_EQ(driver.job().StateHash(), hash);

  files.interrupt = [&] {
    ++interrupts;
    EXPECT_TRUE(driver.job().UpdateGroup(0, {.lr = 1e-3 * interrupts}).ok());  // Another index.
    EXPECT_TRUE(driver.job().Save(Path("saved")).ok());
    // Another file, too.
    fs::resize_file(Path("saved") + "/exp_avg.safetensors", 8);
  };
  const absl::Status status = driver.job().Load(Path("saved")).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(status.message()), HasSubstr("was replaced by a save each time"));
  EXPECT_EQ(driver.job().StateHash(), hash);
}

TEST_F(CheckpointTest, ADirectoryOfCheckpointsIsTriedAtOnceAndKnowsWhatItHas) {
  for (const bool flags : {true, false}) {
    const auto files = flags ? nullptr : MakePosixFileSystem(TakesNoFlags);
    FileSystem& file_system = flags ? PosixFileSystem() : *files;
    const std::string path = Path(flags ? "new/one" : "new/two");
    const auto directory = CheckpointDirectory::Open(file_system, path);
    ASSERT_TRUE(directory.ok()) << directory.status();
    EXPECT_TRUE(fs::is_empty(path));
    EXPECT_TRUE((*directory)->All().empty());
  }
  std::ofstream(Path("file")) << "in the way";
  const absl::Status status = CheckpointDirectory::Open(PosixFileSystem(), Path("file")).status();
  EXPECT_THAT(std::string(status.message()), HasSubstr("no job could be saved: cannot create"));
  FillingFileSystem full;
  EXPECT_EQ(CheckpointDirectory::Open(full, Path("full")).status().code(),
            absl::StatusCode::kResourceExhausted);

  auto directory = CheckpointDirectory::Open(PosixFileSystem(), root_.string()).value();
  Engine engine(
      {.memory_limit_bytes = int64_t{64} << 20, .threads = 2, .checkpoints = directory.get()});
  const auto said = [&] { return std::string(engine.FindJob("job").status().message()); };
  EXPECT_THAT(said(), testing::AllOf(HasSubstr("there is no job job; this service began "),
                                     HasSubstr("had not saved is lost")));
  {
    JobDriver driver(engine, Spec(1));
    driver.UploadWeights();
    driver.AttachAll();
    driver.Step(1);
    ASSERT_TRUE(driver.job().Save(directory->PathOf("job")).ok());
    ASSERT_TRUE(driver.job().Save(Path("elsewhere")).ok());
  }
  ASSERT_TRUE(engine.CloseJob("job").ok());
  fs::create_directories(Path("nothing"));
  fs::create_directories(Path("job.partial-dead"));
  for (const auto& found :
       {directory->All(),
        CheckpointDirectory::Open(PosixFileSystem(), root_.string()).value()->All()}) {
    ASSERT_GE(found.size(), 1u);
    const CheckpointFacts& facts = found[found.size() == 1 ? 0 : 1];
    EXPECT_EQ(ToString(facts), "job job at step 1 in " + Path("job"));
  }
  EXPECT_THAT(said(), testing::AllOf(HasSubstr("saved was step 1, in " + Path("job")),
                                     HasSubstr("--resume=job"), HasSubstr("ballast load job job")));
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
