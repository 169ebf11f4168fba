// What a directory of checkpoints knows, and what becomes of it where clocks go back and processes
// are killed.
#include "cpu_optimizer_service/state/checkpoint_directory.h"

#include <cerrno>
#include <filesystem>
#include <fstream>
#include <limits>
#include <memory>
#include <string>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/system/atomic_file.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/cpu_optimizer_service/state/checkpoint_for_tests.h"

namespace ballast {
namespace {

using testing::HasSubstr;

class CheckpointDirectoryTest : public CheckpointTest {
 protected:
  static std::unique_ptr<JobDriver> NewJob(Engine& engine, int steps) {
    auto driver = std::make_unique<JobDriver>(engine, Spec(1));
    driver->UploadWeights();
    driver->AttachAll();
    for (int step = 1; step <= steps; ++step) driver->Step(step);
    return driver;
  }
  // As if the clock had said so.
  static void SetSaved(const std::string& checkpoint, int64_t unix_ms) {
    const std::string path = checkpoint + "/index.json";
    nlohmann::json index = ReadJson(path);
    index["saved_unix_ms"] = unix_ms;
    Sign(index);
    std::ofstream(path) << index.dump();
  }

  Engine other_engine_{{.memory_limit_bytes = int64_t{64} << 20, .threads = 1}};
};

TEST_F(CheckpointDirectoryTest, ASaveIsTheNewestThoughTheClockHasGoneBack) {
  const auto driver = NewJob(engine_, 1);
  const auto other = NewJob(other_engine_, 1);
  const auto save = [&](JobDriver& of) {
    return of.job().Save(Path("job")).value_or(CheckpointInfo{}).directory;
  };
  const std::string before = save(*driver);
  constexpr int64_t kAhead = int64_t{1} << 50;
  SetSaved(before, kAhead);
  // The same step and generation, of which only the newest stays.
  const std::string saved = save(*driver);
  EXPECT_TRUE(fs::exists(saved)) << saved;
  EXPECT_FALSE(fs::exists(before));
  // Another job's, too, comes after it.
  const std::string others = save(*other);
  const auto directory = CheckpointDirectory::Open(PosixFileSystem(), root_.string()).value();
  EXPECT_EQ(directory->Find("job")->directory, others);
  EXPECT_EQ(directory->Find("job")->saved_unix_ms, kAhead + 2);
  SetSaved(others, std::numeric_limits<int64_t>::max());
  EXPECT_TRUE(fs::exists(save(*driver)));
}

TEST_F(CheckpointDirectoryTest, KnowsOfEachJobItsNewestThoughAnotherOneSavedLater) {
  const auto driver = NewJob(engine_, 3);
  ASSERT_TRUE(driver->job().Save(Path("job")).ok());
  const auto other = NewJob(other_engine_, 2);
  const std::string uid = driver->job().uid();
  const std::string other_uid = other->job().uid();
  const auto at_once = CheckpointDirectory::Open(PosixFileSystem(), root_.string()).value();
  const auto saved = other->job().Save(Path("job"));
  ASSERT_TRUE(saved.ok());
  CheckpointFacts facts = {.job = "job", .uid = other_uid, .step = 2};
  facts.directory = saved->directory;
  at_once->Saved(Path("job"), facts);
  const auto later = CheckpointDirectory::Open(PosixFileSystem(), root_.string()).value();
  for (const auto* directory : {at_once.get(), later.get()}) {
    EXPECT_EQ(directory->Find("job")->uid, other_uid);
    EXPECT_EQ(directory->All().size(), 1u);
    EXPECT_EQ(directory->NewestOf(uid)->step, 3u);
    EXPECT_THAT(directory->LastOf(uid), HasSubstr("job job at step 3 in " + Path("job/step-3.1")));
    EXPECT_THAT(directory->LastOf(other_uid), HasSubstr("job job at step 2 in "));
    EXPECT_THAT(directory->LastOf("none"), HasSubstr("has no checkpoint of it"));
  }
}

// As where two services begin at once, and each takes what the other tries for leftovers.
TEST_F(CheckpointDirectoryTest, IsGoodWhereAnotherProcessIsAboutToRemoveWhatItTried) {
  class Contended : public FillingFileSystem {
   public:
    absl::Status RemoveAll(const std::string& path) override {
      ++removals;
      // Which the other process has made in there to lock it.
      return FileError(ENOTEMPTY, "remove", path);
    }
    int removals = 0;
  };
  Contended files;
  files.bytes_left = int64_t{1} << 20;
  const auto opened = CheckpointDirectory::Open(files, root_.string());
  EXPECT_TRUE(opened.ok()) << opened.status();
  EXPECT_GT(files.removals, 0);
}

TEST_F(CheckpointDirectoryTest, RemovesWhatKilledStartsLeftAndNothingThatIsInUse) {
  fs::create_directories(Path(".try.partial-dead/first"));
  std::ofstream(Path(".try.partial-dead/first/file")) << "x";
  fs::create_directories(Path(".try.partial-alive"));
  fs::create_directories(Path("another.partial-one"));
  const auto lock = PosixFileSystem().TryLock(Path(".try.partial-alive"));
  ASSERT_NE(lock, nullptr);
  ASSERT_TRUE(CheckpointDirectory::Open(PosixFileSystem(), root_.string()).ok());
  EXPECT_EQ(Names(""), (std::set<std::string>{".try.partial-alive", "another.partial-one"}));
}

}  // namespace
}  // namespace ballast
