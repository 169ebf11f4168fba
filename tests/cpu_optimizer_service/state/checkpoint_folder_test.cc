// Checkpoints beside each other: what a save leaves, what it deletes, and what a load takes.
#include "cpu_optimizer_service/state/checkpoint_folder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cpu_optimizer_service/common/reason.h"
#include "cpu_optimizer_service/common/system/atomic_file.h"
#include "cpu_optimizer_service/common/text/checkpoint_name.h"
#include "cpu_optimizer_service/state/checkpoint.h"
#include "cpu_optimizer_service/state/checkpoint_directory.h"
#include "cpu_optimizer_service/state/checkpoint_writer.h"
#include "tests/cpu_optimizer_service/state/checkpoint_for_tests.h"
#include "tests/support/messages.h"

namespace ballast {
namespace {

class CheckpointFolderTest : public CheckpointTest {
 protected:
  // A job of its own, as after a restart of everything.
  std::unique_ptr<JobDriver> NewJob(Engine& engine, int steps = 0) {
    auto driver = std::make_unique<JobDriver>(engine, Spec(1));
    driver->UploadWeights();
    driver->AttachAll();
    for (int step = 1; step <= steps; ++step) driver->Step(step);
    return driver;
  }
  static absl::StatusOr<CheckpointInfo> SaveByItself(JobDriver& driver, const std::string& folder) {
    return Await<CheckpointInfo>([&](Done<CheckpointInfo> done) {
      driver.job().Save({.folder = folder, .asked_for = false}, std::move(done));
    });
  }
  std::string NameOf(const absl::StatusOr<CheckpointInfo>& info) const {
    return info.ok() ? fs::path(info->directory).filename().string() : info.status().ToString();
  }
  static void Flip(const std::string& path) {
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(-5, std::ios::end);
    file.put('\x7f');
  }
  // What it read in the end, and why not what is newer.
  static void ExpectLoaded(const absl::StatusOr<CheckpointInfo>& info, uint64_t step) {
    ASSERT_TRUE(info.ok()) << info.status();
    EXPECT_EQ(info->step, step);
    for (const std::string& why : info->passed_over) EXPECT_TRUE(Says(why));
  }

  Engine other_engine_{{.memory_limit_bytes = int64_t{64} << 20, .threads = 1}};
};

TEST(CheckpointName, HasAStepAndAGenerationAndIsNoPath) {
  EXPECT_EQ(VersionName(7, 2), "step-7.2");
  EXPECT_EQ(VersionName(7, 2, 3), "step-7.2.3");
  for (const char* name : {"step-7.2", "step-0.1", "step-18446744073709551615.1.12"}) {
    EXPECT_TRUE(IsVersionName(name)) << name;
    EXPECT_TRUE(IsCheckpointName(std::string("gpt-2/") + name)) << name;
  }
  for (const char* name : {"", "step-", "step-7", "step-7.", "step-.2", "step-7.2.", "step-7.2.3.4",
                           "step-7.x", "step--7.2", "step-7.2.partial-00", "step-7.2/", "Step-7.2",
                           "step-999999999999999999999.1"}) {
    EXPECT_FALSE(IsVersionName(name)) << name;
  }
  EXPECT_TRUE(IsCheckpointName("gpt"));
  EXPECT_TRUE(IsCheckpointName("gpt/step-7"));
  EXPECT_EQ(StepNamed("step-7"), 7u);
  for (const char* name : {"", "step-", "step-7.2", "step-x", "step--7", "step-7 ", "step-+7",
                           "step-99999999999999999999"}) {
    EXPECT_EQ(StepNamed(name), std::nullopt) << name;
  }
  for (const char* name : {"", "/gpt", "gpt/", "gpt/..", "../step-7.2", "a/b/step-7.2", "gpt//x"}) {
    EXPECT_FALSE(IsCheckpointName(name)) << name;
  }
}

// A service that limits how many of a job that were asked for stay.
class LimitedFolderTest : public CheckpointFolderTest {
 protected:
  const std::unique_ptr<CheckpointDirectory> directory_ =
      CheckpointDirectory::Open(PosixFileSystem(), root_.string(), {.keep_asked = 3}).value();
  Engine limited_{
      {.memory_limit_bytes = int64_t{64} << 20, .threads = 1, .checkpoints = directory_.get()}};
};

TEST_F(LimitedFolderTest, TheNewestStayOfThoseThatWereAskedForAndOfOthersApart) {
  const auto driver = NewJob(limited_);
  for (int step = 1; step <= 5; ++step) {
    driver->Step(step);
    EXPECT_EQ(NameOf(driver->job().Save(Path("gpt"))), VersionName(step, 1));
    if (step == 2) EXPECT_EQ(NameOf(SaveByItself(*driver, Path("gpt"))), "step-2.1.2");
  }
  EXPECT_EQ(Names("gpt"),
            (std::set<std::string>{"step-2.1.2", "step-3.1", "step-4.1", "step-5.1", "latest"}));
  EXPECT_EQ(Names("gpt/step-5.1").count("lock"), 0u);
  // The same step again: it takes the place of the one before in the count, and nothing else's.
  EXPECT_EQ(NameOf(driver->job().Save(Path("gpt"))), "step-5.1.2");
  EXPECT_EQ(Names("gpt"),
            (std::set<std::string>{"step-2.1.2", "step-3.1", "step-4.1", "step-5.1.2", "latest"}));
  std::ifstream hint(Path("gpt/latest"));
  std::string latest;
  hint >> latest;
  EXPECT_EQ(latest, "step-5.1.2");
}

TEST_F(CheckpointFolderTest, AfterAnEarlierOneIsLoadedTheGenerationTellsThemApart) {
  const auto driver = NewJob(engine_, 2);
  ASSERT_TRUE(driver->job().Save(Path("gpt")).ok());
  driver->Step(3);
  ASSERT_TRUE(driver->job().Save(Path("gpt")).ok());
  EXPECT_EQ(driver->job().Load(Path("gpt/step-2.1"))->step, 2u);
  driver->AttachAll();
  driver->Step(3);
  const std::string hash = driver->job().StateHash();
  EXPECT_EQ(NameOf(driver->job().Save(Path("gpt"))), "step-3.2");
  ASSERT_EQ(driver->job().Load(Path("gpt/step-2.1"))->step, 2u);
  // A lower step of a higher generation is newer.
  EXPECT_EQ(NameOf(driver->job().Save(Path("gpt"))), "step-2.3");
  EXPECT_EQ(NameOf(driver->job().Load(Path("gpt"))), "step-2.3");
  EXPECT_EQ(NameOf(driver->job().Load(Path("gpt/step-3.2"))), "step-3.2");
  EXPECT_EQ(driver->job().StateHash(), hash);
}

TEST_F(LimitedFolderTest, AnotherJobsAreNeverTouchedWhateverTheyAreCalled) {
  const auto first = NewJob(engine_, 3);
  ASSERT_TRUE(first->job().Save(Path("gpt")).ok());
  const std::string hash = first->job().StateHash();
  const auto second = NewJob(limited_, 3);
  EXPECT_EQ(NameOf(second->job().Save(Path("gpt"))), "step-3.1.2");
  for (int step = 4; step <= 8; ++step) {
    second->Step(step);
    ASSERT_TRUE(second->job().Save(Path("gpt")).ok());
  }
  EXPECT_EQ(Names("gpt"),
            (std::set<std::string>{"step-3.1", "step-6.1", "step-7.1", "step-8.1", "latest"}));
  const auto all = ListCheckpoints(PosixFileSystem(), Path("gpt")).value();
  ASSERT_EQ(all.size(), 4u);
  EXPECT_EQ(all[0].facts.step, 8u);
  EXPECT_EQ(all[0].facts.uid, second->job().uid());
  EXPECT_EQ(all[3].facts.uid, first->job().uid());
  EXPECT_TRUE(all[0].facts.asked_for);
  EXPECT_GT(all[0].facts.size_bytes, 4 * 4024 * 3);
  EXPECT_EQ(NameOf(first->job().Load(Path("gpt/step-3.1"))), "step-3.1");
  EXPECT_EQ(first->job().StateHash(), hash);
}

TEST_F(CheckpointFolderTest, OfAStepThatIsNamedTheNewestIsTakenOrNone) {
  const auto driver = NewJob(engine_);
  std::vector<std::string> hashes = {""};
  for (int step = 1; step <= 12; ++step) {
    driver->Step(step);
    hashes.push_back(driver->job().StateHash());
    if (step == 1 || step >= 11) {
      ASSERT_TRUE(driver->job().Save(Path("gpt")).ok());
    }
  }
  EXPECT_EQ(NameOf(driver->job().Load(Path("gpt/step-1"))), "step-1.1");  // And none of 11 or 12.
  EXPECT_EQ(driver->job().StateHash(), hashes[1]);
  EXPECT_EQ(NameOf(driver->job().Load(Path("gpt/step-11"))), "step-11.1");
  EXPECT_EQ(driver->job().StateHash(), hashes[11]);
  EXPECT_TRUE(Refused(driver->job().Load(Path("gpt/step-2")), absl::StatusCode::kNotFound));
  Flip(Path("gpt/step-1.1/exp_avg.safetensors"));  // The one that is named, or nothing.
  EXPECT_FALSE(driver->job().Load(Path("gpt/step-1")).ok());
}

TEST_F(CheckpointFolderTest, TwoServicesMaySaveToOneFolderAtOnce) {
  const auto first = NewJob(engine_, 1);
  const auto second = NewJob(other_engine_, 1);
  std::vector<std::thread> threads;
  for (JobDriver* driver : {first.get(), second.get()}) {
    threads.emplace_back([&, driver] {
      for (int i = 0; i < 20; ++i) {
        const auto saved = SaveByItself(*driver, Path("gpt"));
        EXPECT_TRUE(saved.ok()) << saved.status();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  const auto all = ListCheckpoints(PosixFileSystem(), Path("gpt")).value();
  ASSERT_EQ(all.size(), 2u);  // Of each its newest.
  for (const FoundCheckpoint& found : all) {
    EXPECT_TRUE(found.problem.ok());
    EXPECT_TRUE(Checkpoint::Open(PosixFileSystem(), found.facts.directory, 1 << 20).ok());
  }
  EXPECT_NE(all[0].facts.uid, all[1].facts.uid);
}

TEST_F(CheckpointFolderTest, ADamagedOneIsPassedOverAndSaidToBe) {
  std::vector<std::string> warned;
  Engine engine({.memory_limit_bytes = int64_t{64} << 20,
                 .threads = 1,
                 .warn = [&](const std::string& line) { warned.push_back(line); }});
  const auto driver = NewJob(engine);
  std::vector<std::string> hashes = {""};
  for (int step = 1; step <= 3; ++step) {
    driver->Step(step);
    ASSERT_TRUE(driver->job().Save(Path("gpt")).ok());
    hashes.push_back(driver->job().StateHash());
  }
  warned.clear();
  Flip(Path("gpt/step-3.1/exp_avg.safetensors"));
  ExpectLoaded(driver->job().Load(Path("gpt")), 2);
  EXPECT_EQ(driver->job().StateHash(), hashes[2]);
  ASSERT_EQ(warned.size(), 1u);
  EXPECT_TRUE(Says(warned[0]));
  // The one that is named, or nothing.
  EXPECT_EQ(driver->job().Load(Path("gpt/step-3.1")).status().code(), absl::StatusCode::kDataLoss);

  fs::resize_file(Path("gpt/step-2.1/master.safetensors"), 5000);  // Cut short.
  fs::remove(Path("gpt/step-3.1/index.json"));
  ExpectLoaded(driver->job().Load(Path("gpt")), 1);
  EXPECT_EQ(driver->job().StateHash(), hashes[1]);
  EXPECT_EQ(driver->job().Load(Path("gpt/step-3.1")).status().code(), absl::StatusCode::kDataLoss);
  fs::remove(Path("gpt/step-1.1/exp_avg_sq.safetensors"));
  EXPECT_TRUE(Refused(driver->job().Load(Path("gpt")), absl::StatusCode::kDataLoss));
  EXPECT_EQ(driver->job().StateHash(), hashes[1]);
}

// No open of it waits, and the one before is taken.
TEST_F(CheckpointFolderTest, OneThatIsNoRegularFileIsPassedOverAndSaidToBe) {
  const auto driver = NewJob(engine_, 1);
  ASSERT_TRUE(driver->job().Save(Path("gpt")).ok());
  driver->Step(2);
  ASSERT_TRUE(driver->job().Save(Path("gpt")).ok());
  const std::string newest = Path("gpt/step-2.1");
  const auto expect_passed_over = [&](absl::StatusCode code) {
    ExpectLoaded(driver->job().Load(Path("gpt")), 1);
    // The one that is named, or nothing.
    EXPECT_TRUE(Refused(driver->job().Load(newest), code));
  };
  fs::create_directories(Path("away"));
  for (const char* name : {"index.json", "exp_avg.safetensors"}) {
    const std::string file = newest + "/" + name;
    const std::string away = Path("away/") + name;
    fs::rename(file, away);
    ASSERT_EQ(mkfifo(file.c_str(), 0600), 0);
    expect_passed_over(absl::StatusCode::kInvalidArgument);
    fs::remove(file);
    fs::create_symlink(away, file);
    expect_passed_over(absl::StatusCode::kInvalidArgument);
    fs::remove(file);
    fs::create_directory(file);
    expect_passed_over(absl::StatusCode::kInvalidArgument);
    fs::remove(file);
    const int listening = socket(AF_UNIX, SOCK_STREAM, 0);
    sockaddr_un address = {.sun_family = AF_UNIX, .sun_path = {}};
    ASSERT_LT(file.size(), sizeof(address.sun_path));
    file.copy(address.sun_path, file.size());
    ASSERT_EQ(bind(listening, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
    expect_passed_over(absl::StatusCode::kUnknown);
    close(listening);
    fs::remove(file);
    fs::rename(away, file);
  }
  fs::rename(newest, Path("away/step-2.1"));
  fs::create_directory_symlink(Path("away/step-2.1"), newest);
  expect_passed_over(absl::StatusCode::kDataLoss);
  fs::remove(newest);
  std::ofstream(newest) << "a file";
  expect_passed_over(absl::StatusCode::kUnknown);
}

TEST_F(CheckpointFolderTest, OneWithoutMemoryToReadItIsNotPassedOver) {
  class Exhausted : public FillingFileSystem {
   public:
    absl::StatusOr<std::unique_ptr<ReadableFile>> Open(const std::string& path) override {
      if (out && path.ends_with("/exp_avg.safetensors")) return FileError(EMFILE, "open", path);
      return FillingFileSystem::Open(path);
    }
    bool out = false;
  };
  Exhausted files;
  files.bytes_left = int64_t{1} << 30;
  Engine engine({.memory_limit_bytes = int64_t{64} << 20, .threads = 1, .file_system = &files});
  const auto driver = NewJob(engine, 1);
  ASSERT_TRUE(driver->job().Save(Path("gpt")).ok());
  driver->Step(2);
  ASSERT_TRUE(driver->job().Save(Path("gpt")).ok());
  files.out = true;
  EXPECT_EQ(driver->job().Load(Path("gpt")).status().code(), absl::StatusCode::kResourceExhausted);
  files.out = false;
  EXPECT_EQ(driver->job().Load(Path("gpt"))->step, 2u);
}

TEST_F(LimitedFolderTest, OneThatWasRenamedIsNoneAndDeletesNone) {
  const auto driver = NewJob(limited_, 1);
  ASSERT_TRUE(driver->job().Save(Path("gpt")).ok());
  driver->Step(2);
  ASSERT_TRUE(driver->job().Save(Path("gpt")).ok());
  const std::string hash = driver->job().StateHash();
  driver->Step(3);
  ASSERT_TRUE(driver->job().Save(Path("gpt")).ok());
  for (const char* other : {"step-9.1", "step-3.2", "step-03.1", "step-3.1.01.1"}) {
    SCOPED_TRACE(other);
    const std::string renamed = Path(std::string("gpt/") + other);
    fs::rename(Path("gpt/step-3.1"), renamed);
    if (other == std::string("step-3.1.01.1")) {  // Not even a checkpoint's name.
      EXPECT_EQ(driver->job().Load(Path("gpt"))->step, 2u);
    } else {
      ExpectLoaded(driver->job().Load(Path("gpt")), 2);
      EXPECT_EQ(driver->job().StateHash(), hash);
      EXPECT_TRUE(Refused(driver->job().Load(renamed), absl::StatusCode::kDataLoss));
      EXPECT_TRUE(Refused(driver->job().Load(Path("gpt/step-9")),
                          other == std::string("step-9.1") ? absl::StatusCode::kDataLoss
                                                           : absl::StatusCode::kNotFound));
      const auto directory = CheckpointDirectory::Open(PosixFileSystem(), root_.string()).value();
      EXPECT_EQ(directory->Find("gpt")->step, 2u);
    }
    fs::rename(renamed, Path("gpt/step-3.1"));
  }
  // Of a name that a second job of these numbers would have had.
  fs::rename(Path("gpt/step-3.1"), Path("gpt/step-3.1.2"));
  EXPECT_EQ(driver->job().Load(Path("gpt"))->step, 3u);

  // An old one that passes for the newest takes no place among those that are kept.
  fs::rename(Path("gpt/step-1.1"), Path("gpt/step-99.1"));
  driver->AttachAll();
  for (int step = 4; step <= 6; ++step) {
    driver->Step(step);
    ASSERT_TRUE(driver->job().Save(Path("gpt")).ok());
  }
  const auto names = Names("gpt");
  EXPECT_EQ(names, (std::set<std::string>{"step-99.1", VersionName(4, 6), VersionName(5, 6),
                                          VersionName(6, 6), "latest"}));
}

TEST_F(CheckpointFolderTest, OneOfAnUnknownFormatIsNotPassedOverAndStays) {
  const auto driver = NewJob(engine_, 1);
  ASSERT_TRUE(driver->job().Save(Path("gpt")).ok());
  driver->Step(2);
  ASSERT_TRUE(driver->job().Save(Path("gpt")).ok());
  const std::string newest = Path("gpt/step-2.1/index.json");
  nlohmann::json index = ReadJson(newest);
  ASSERT_EQ(index["version"], 1);
  for (const nlohmann::json& version : {nlohmann::json(0), nlohmann::json(2), nlohmann::json()}) {
    SCOPED_TRACE(version.dump());
    index["version"] = version;
    Sign(index);
    std::ofstream(newest) << index;
    EXPECT_TRUE(Refused(driver->job().Load(Path("gpt")), absl::StatusCode::kFailedPrecondition));
    EXPECT_EQ(ReadJson(newest), index);
    EXPECT_EQ(Names("gpt"), (std::set<std::string>{"step-1.1", "step-2.1", "latest"}));
  }
  EXPECT_EQ(driver->job().Load(Path("gpt/step-1.1"))->step, 1u);
}

TEST_F(CheckpointFolderTest, OneThatWasMovedLoadsByItsNameAndIsNoneBesideOthers) {
  const auto driver = NewJob(engine_, 1);
  SaveAt(*driver, "best");
  EXPECT_EQ(driver->job().Load(Path("best"))->step, 1u);
  driver->AttachAll();
  driver->Step(2);
  ASSERT_TRUE(driver->job().Save(Path("best")).ok());
  EXPECT_EQ(driver->job().Load(Path("best"))->step, 2u);
}

TEST_F(CheckpointFolderTest, AFullDiskLeavesNothingAndTheOlderOnesStand) {
  FillingFileSystem disk;
  Engine engine({.memory_limit_bytes = int64_t{64} << 20, .threads = 1, .file_system = &disk});
  const auto driver = NewJob(engine);
  disk.bytes_left = 1 << 30;
  ASSERT_TRUE(driver->job().Save(Path("gpt")).ok());
  const std::string saved = driver->job().StateHash();
  driver->Step(1);
  for (const int64_t bytes : {0, 100, 10000, 40000, 50000}) {
    disk.bytes_left = bytes;
    EXPECT_EQ(driver->job().Save(Path("gpt")).status().code(),
              absl::StatusCode::kResourceExhausted);
  }
  EXPECT_EQ(Names("gpt"), (std::set<std::string>{"step-0.1", "latest"}));
  ASSERT_TRUE(driver->job().Load(Path("gpt")).ok());
  EXPECT_EQ(driver->job().StateHash(), saved);
}

TEST_F(CheckpointFolderTest, ASaveRemovesWhatKilledOnesLeftAndNothingThatIsInUse) {
  const auto driver = NewJob(engine_);
  for (const char* name :
       {"step-7.1.partial-dead", "step-7.1.partial-live", "notes.partial-dead"}) {
    fs::create_directories(Path("gpt/") + name);
    std::ofstream(Path("gpt/") + name + "/master.safetensors") << "half";
  }
  const auto lock = PosixFileSystem().TryLock(Path("gpt/step-7.1.partial-live"));
  ASSERT_NE(lock, nullptr);
  EXPECT_EQ(NameOf(driver->job().Save(Path("gpt"))), "step-0.1");
  EXPECT_EQ(Names("gpt"), (std::set<std::string>{"step-0.1", "latest", "step-7.1.partial-live",
                                                 "notes.partial-dead"}));
  EXPECT_EQ(ListCheckpoints(PosixFileSystem(), Path("gpt"))->size(), 1u);
}

TEST_F(CheckpointFolderTest, AFolderWhoseParentIsGoneIsNotMadeAnew) {
  const auto driver = NewJob(engine_);
  EXPECT_TRUE(Refused(driver->job().Save(Path("mount/gpt")), absl::StatusCode::kNotFound));
  EXPECT_FALSE(fs::exists(Path("mount")));
  for (const char* bad : {"", "/", "gpt/", "gpt/..", "gpt/step-1.1"}) {
    EXPECT_EQ(driver->job().Save(*bad == 0 ? "" : Path(bad)).status().code(),
              absl::StatusCode::kInvalidArgument)
        << bad;
  }
  std::ofstream(Path("file")) << "in the way";
  EXPECT_FALSE(driver->job().Save(Path("file")).ok());
  EXPECT_FALSE(driver->job().Load(Path("file")).ok());
}

TEST_F(CheckpointFolderTest, IsWrittenInSeveralFilesOfWholeTensors) {
  const auto driver = NewJob(engine_, 2);
  const std::string hash = driver->job().StateHash();
  SaveAt(*driver, "one");
  const Checkpoint one = Checkpoint::Open(PosixFileSystem(), Path("one"), 1 << 20).value();
  CheckpointIndex index = one.index();
  index.files.clear();
  CheckpointWriter writer(PosixFileSystem(), {.folder = Path("gpt"), .part_bytes = 2000}, index);
  ASSERT_TRUE(writer.Begin().ok());
  EXPECT_EQ(writer.parts(), 3 * 2 + 1);  // p0; the others. The last plane has p3 alone.
  for (int part = 0; part < writer.parts(); ++part) {
    const absl::Status written = writer.WritePart(
        part, [&](int parameter, Plane stored, int64_t first, absl::Span<std::byte> out) {
          EXPECT_TRUE(one.ReadStored(index.parameters[parameter].name, stored, first, out).ok());
        });
    ASSERT_TRUE(written.ok()) << written;
  }
  ASSERT_TRUE(writer.Finish(absl::OkStatus()).ok());
  EXPECT_TRUE(fs::exists(Path("gpt/step-2.1/exp_avg_sq-00002-of-00002.safetensors")));
  driver->Step(3);
  EXPECT_EQ(driver->job().Load(Path("gpt"))->step, 2u);
  EXPECT_EQ(driver->job().StateHash(), hash);
  fs::rename(Path("gpt/step-2.1/master-00001-of-00002.safetensors"),
             Path("gpt/step-2.1/master-00002-of-00002.safetensors"));
  EXPECT_EQ(driver->job().Load(Path("gpt")).status().code(), absl::StatusCode::kDataLoss);
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

TEST_F(CheckpointFolderTest, ALoadWhoseCheckpointIsDeletedReadsTheNewerOneOrSaysWhatHappened) {
  InterruptedFileSystem files;
  Engine engine({.memory_limit_bytes = int64_t{64} << 20, .threads = 2, .file_system = &files});
  const auto driver = NewJob(engine);
  ASSERT_TRUE(driver->job().Save(Path("gpt")).ok());
  driver->Step(1);
  const std::string hash = driver->job().StateHash();
  int interrupts = 0;
  const auto save_and_delete = [&] {
    ++interrupts;
    const auto before = Names("gpt");
    EXPECT_TRUE(driver->job().Save(Path("gpt")).ok());
    for (const std::string& name : before) fs::remove_all(Path("gpt/" + name));
  };
  files.interrupt = [&] {
    if (interrupts == 0) save_and_delete();
  };
  EXPECT_EQ(driver->job().Load(Path("gpt")).value().step, 1u);
  EXPECT_EQ(driver->job().StateHash(), hash);

  files.interrupt = save_and_delete;
  EXPECT_TRUE(Refused(driver->job().Load(Path("gpt")), absl::StatusCode::kUnavailable));
  EXPECT_EQ(driver->job().StateHash(), hash);
}

TEST(CheckpointPolicy, SavesAtMultiplesOfStepsAndAfterTimes) {
  EXPECT_FALSE(CheckpointPolicy().saves());
  EXPECT_FALSE(CheckpointPolicy().IsDue(1000, 0, 1e9));
  const CheckpointPolicy steps = {.every_steps = 100};
  EXPECT_FALSE(steps.IsDue(99, 0, 1e9));
  EXPECT_TRUE(steps.IsDue(100, 0, 0));
  EXPECT_FALSE(steps.IsDue(199, 100, 0));
  EXPECT_TRUE(steps.IsDue(203, 100, 0));  // The one before took long.
  EXPECT_TRUE(steps.IsDue(300, 203, 0));
  EXPECT_TRUE(steps.IsDue(200, 150, 0));  // Resumed at 150.
  const CheckpointPolicy time = {.every_seconds = 60};
  EXPECT_FALSE(time.IsDue(5, 4, 59.9));
  EXPECT_TRUE(time.IsDue(5, 4, 60));
  EXPECT_FALSE(time.IsDue(4, 4, 60));  // Nothing is new.
}

TEST_F(CheckpointFolderTest, AServiceSavesItsJobsByItself) {
  const auto directory =
      CheckpointDirectory::Open(PosixFileSystem(), Path("dir"), {.every_steps = 2, .keep = 2})
          .value();
  std::vector<std::string> warned;
  std::atomic<int> warnings = 0;  // Once they are there to be read.
  Engine engine({.memory_limit_bytes = int64_t{64} << 20,
                 .threads = 1,
                 .warn =
                     [&](const std::string& line) {
                       warned.push_back(line);
                       ++warnings;
                     },
                 .checkpoints = directory.get()});
  const auto driver = NewJob(engine);
  const auto await = [&] {
    while (!driver->job().Status().saves.empty()) std::this_thread::yield();
  };
  std::string hash;
  for (int step = 1; step <= 7; ++step) {
    driver->Step(step);
    await();
    if (step == 6) hash = driver->job().StateHash();
  }
  EXPECT_EQ(Names("dir/job"), (std::set<std::string>{"step-4.1", "step-6.1", "latest"}));
  EXPECT_EQ(directory->Find("job")->step, 6u);
  EXPECT_FALSE(directory->Find("job")->asked_for);
  ASSERT_TRUE(driver->job().Load(Path("dir/job")).ok());
  EXPECT_EQ(driver->job().StateHash(), hash);
  EXPECT_EQ(warnings, 0);

  // Gone, and back.
  driver->AttachAll();
  fs::rename(Path("dir"), Path("away"));
  driver->Step(7);
  driver->Step(8);
  while (warnings == 0) std::this_thread::yield();
  ASSERT_EQ(warned.size(), 1u);
  EXPECT_TRUE(Says(warned[0]));
  fs::rename(Path("away"), Path("dir"));
  driver->Step(9);
  driver->Step(10);
  await();
  EXPECT_EQ(Names("dir/job"), (std::set<std::string>{"step-6.1", "step-10.2", "latest"}));
}

TEST_F(CheckpointFolderTest, ADirectoryIsTriedAtOnceAndKnowsWhatItHas) {
  {
    const auto directory = CheckpointDirectory::Open(PosixFileSystem(), Path("new/one"));
    ASSERT_TRUE(directory.ok()) << directory.status();
    EXPECT_TRUE(fs::is_empty(Path("new/one")));
    EXPECT_TRUE((*directory)->All().empty());
  }
  std::ofstream(Path("file")) << "in the way";
  EXPECT_TRUE(Refused(CheckpointDirectory::Open(PosixFileSystem(), Path("file")),
                      absl::StatusCode::kUnknown));
  FillingFileSystem full;
  EXPECT_EQ(CheckpointDirectory::Open(full, Path("full")).status().code(),
            absl::StatusCode::kResourceExhausted);
  // For jobs that live already.
  absl::Status problem;
  for (const auto& [name, code] : {std::pair{"full", absl::StatusCode::kResourceExhausted},
                                   std::pair{"file", absl::StatusCode::kUnknown}}) {
    const auto opened = CheckpointDirectory::Open(full, Path(name), {}, &problem);
    ASSERT_TRUE(opened.ok()) << opened.status();
    EXPECT_TRUE(Refused(problem, code));
    EXPECT_EQ((*opened)->path(), Path(name));
  }
  EXPECT_TRUE(CheckpointDirectory::Open(PosixFileSystem(), Path("full"), {}, &problem).ok());
  EXPECT_TRUE(problem.ok()) << problem;

  auto directory = CheckpointDirectory::Open(PosixFileSystem(), root_.string()).value();
  Engine engine(
      {.memory_limit_bytes = int64_t{64} << 20, .threads = 2, .checkpoints = directory.get()});
  // Which may be a mistyped name.
  EXPECT_TRUE(Refused(engine.FindJob("job"), absl::StatusCode::kNotFound, reason::kNoSuchJob));
  {
    const auto driver = NewJob(engine, 1);
    ASSERT_TRUE(driver->job().Save(directory->PathOf("job")).ok());
    fs::create_directories(Path("deep"));
    ASSERT_TRUE(driver->job().Save(Path("deep/elsewhere")).ok());
  }
  ASSERT_TRUE(engine.CloseJob("job").ok());
  fs::create_directories(Path("nothing"));
  fs::create_directories(Path("job/step-2.1.partial-dead"));
  for (const auto& found :
       {directory->All(),
        CheckpointDirectory::Open(PosixFileSystem(), root_.string()).value()->All()}) {
    ASSERT_EQ(found.size(), 1u);
    EXPECT_EQ(ToString(found[0]), "job job at step 1 in " + Path("job/step-1.1"));
    EXPECT_EQ(directory->NameOf(found[0].directory), "job/step-1.1");
  }
  EXPECT_EQ(directory->NameOf("/else/where"), "/else/where");
  EXPECT_TRUE(Refused(engine.FindJob("job"), absl::StatusCode::kNotFound, reason::kNoSuchJob));
}

// ------------------------------------------------------------------ weights of others

// A file of safetensors with these values of each parameter.
struct Tensor {
  std::string name;
  std::string dtype;
  std::vector<int64_t> shape;
  std::string bytes;
};
void WriteTensors(const std::string& path, const std::vector<Tensor>& tensors) {
  nlohmann::ordered_json header;
  std::string data;
  for (const Tensor& tensor : tensors) {
    const size_t begin = data.size();
    data += tensor.bytes;
    header[tensor.name] = {
        {"dtype", tensor.dtype}, {"shape", tensor.shape}, {"data_offsets", {begin, data.size()}}};
  }
  const std::string text = header.dump();
  const uint64_t size = text.size();
  std::ofstream file(path, std::ios::binary);
  file.write(reinterpret_cast<const char*>(&size), sizeof(size));
  file << text << data;
}

TEST_F(CheckpointFolderTest, WeightsOfOthersBeginAJobWithMomentsOfZero) {
  const auto driver = NewJob(engine_, 3);
  // 1.5 in each format; an odd byte before them; one that the job has not.
  const auto repeat = [](const std::string& bytes, int times) {
    std::string all;
    for (int i = 0; i < times; ++i) all += bytes;
    return all;
  };
  const std::string fp32("\0\0\xc0\x3f", 4), bf16("\xc0\x3f", 2), fp16("\0\x3e", 2);
  fs::create_directories(Path("hf"));
  const std::vector<Tensor> first = {
      {"mask", "U8", {1}, "x"}, {"p0", "F16", {1000}, repeat(fp16, 1000)}, {"p1", "F32", {0}, ""}};
  const std::vector<Tensor> second = {{"p2", "F32", {24}, repeat(fp32, 24)},
                                      {"p3", "BF16", {3000}, repeat(bf16, 3000)},
                                      {"extra", "F32", {1}, fp32}};
  WriteTensors(Path("hf/a.safetensors"), first);
  WriteTensors(Path("hf/b.safetensors"), second);
  std::ofstream(Path("hf/model.safetensors.index.json"))
      << R"({"weight_map": {"p0": "a.safetensors", "p2": "b.safetensors", "p3": "b.safetensors"}})";
  const auto loaded = driver->job().Load(Path("hf"), /*weights_only=*/true);
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  EXPECT_EQ(loaded->step, 0u);
  const JobStatus status = driver->job().Status();
  EXPECT_EQ(status.committed_step, 0u);
  EXPECT_EQ(status.update_counts, std::vector<int64_t>(4));
  EXPECT_EQ(status.resumed_uid, "");
  const Snapshot snapshot = driver->job().TakeSnapshot({0, 2, 3}).value();
  for (const auto& [parameter, elements] :
       {std::pair(0, 1000), std::pair(2, 24), std::pair(3, 3000)}) {
    std::vector<float> values(elements);
    snapshot.Read(parameter, Plane::kMaster, 0, absl::MakeSpan(values));
    EXPECT_THAT(values, testing::Each(1.5f)) << parameter;
    snapshot.Read(parameter, Plane::kExpAvgSq, 0, absl::MakeSpan(values));
    EXPECT_THAT(values, testing::Each(0.0f)) << parameter;
  }
  driver->AttachAll();
  driver->Step(1);

  const auto import = [&](const std::string& name) {
    return driver->job().Load(Path(name), /*weights_only=*/true).status();
  };
  const std::string hash = driver->job().StateHash();
  EXPECT_EQ(import("nowhere").code(), absl::StatusCode::kNotFound);
  std::vector<Tensor> all = second;
  all.insert(all.begin(), first.begin(), first.end());
  const auto with = [&](int tensor, Tensor changed) {
    std::vector<Tensor> tensors = all;
    tensors[tensor] = std::move(changed);
    WriteTensors(Path("one.safetensors"), tensors);
    return import("one.safetensors");
  };
  EXPECT_TRUE(Refused(with(1, {"q0", "F16", {1000}, repeat(fp16, 1000)}),
                      absl::StatusCode::kFailedPrecondition));
  EXPECT_TRUE(Refused(with(1, {"p0", "F16", {10, 100}, repeat(fp16, 1000)}),
                      absl::StatusCode::kFailedPrecondition));
  EXPECT_TRUE(Refused(with(1, {"p0", "F16", {1000}, repeat(fp16, 999) + std::string("\0\x7c", 2)}),
                      absl::StatusCode::kDataLoss));
  EXPECT_EQ(driver->job().StateHash(), hash);
  EXPECT_EQ(with(0, all[0]), absl::OkStatus());  // And this is what it takes.
}

}  // namespace
}  // namespace ballast
