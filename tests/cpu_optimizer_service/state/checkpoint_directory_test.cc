// What a directory of checkpoints knows, and what becomes of it where clocks go back and processes
// are killed; how long what is in it stays.
#include "cpu_optimizer_service/state/checkpoint_directory.h"

#include <cerrno>
#include <filesystem>
#include <fstream>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "cpu_optimizer_service/common/system/atomic_file.h"
#include "cpu_optimizer_service/state/checkpoint_folder.h"
#include "cpu_optimizer_service/state/checkpoint_uses.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/cpu_optimizer_service/state/checkpoint_for_tests.h"
#include "tests/support/messages.h"

namespace ballast {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using Code = absl::StatusCode;

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
    return Await<CheckpointInfo>([&](Done<CheckpointInfo> done) {
             of.job().Save({.folder = Path("job"), .asked_for = false}, std::move(done));
           })
        .value_or(CheckpointInfo{})
        .directory;
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
    EXPECT_TRUE(Says(directory->LastOf(uid)));
    EXPECT_TRUE(Says(directory->LastOf(other_uid)));
    EXPECT_TRUE(Says(directory->LastOf("none")));
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

// ------------------------------------------------------------------ how long checkpoints stay

// Does something whenever a file of exp_avg is to be read, or written.
class WatchedFileSystem : public FillingFileSystem {
 public:
  WatchedFileSystem() { bytes_left = int64_t{1} << 30; }
  absl::StatusOr<std::unique_ptr<ReadableFile>> Open(const std::string& path) override {
    if (at_read && path.ends_with("/exp_avg.safetensors")) at_read();
    return FillingFileSystem::Open(path);
  }
  absl::StatusOr<std::unique_ptr<WritableFile>> Create(const std::string& path) override {
    if (at_write && path.ends_with("/exp_avg.safetensors")) at_write();
    return FillingFileSystem::Create(path);
  }
  std::function<void()> at_read;
  std::function<void()> at_write;
};

class CheckpointDeletionTest : public CheckpointTest {
 protected:
  CheckpointDeletionTest() {
    driver_->UploadWeights();
    driver_->AttachAll();
  }

  void StepTo(uint64_t step) {
    for (uint64_t next = Committed() + 1; next <= step; ++next) driver_->Step(next);
  }
  uint64_t Committed() const { return driver_->job().Position().committed_step; }
  // Of the job, "step-1.1" and so on.
  void Save(bool asked_for = true) {
    const auto saved = Await<CheckpointInfo>([&](Done<CheckpointInfo> done) {
      driver_->job().Save({.folder = Path("job"), .asked_for = asked_for}, std::move(done));
    });
    ASSERT_TRUE(saved.ok()) << saved.status();
  }
  // The names of those that were deleted.
  absl::StatusOr<std::vector<std::string>> Delete(const std::string& name,
                                                  const std::string& uid = "") {
    const auto deleted =
        Await<std::vector<FoundCheckpoint>>([&](Done<std::vector<FoundCheckpoint>> done) {
          engine_.DeleteCheckpoints({.path = Path(name), .uid = uid}, std::move(done));
        });
    if (!deleted.ok()) return deleted.status();
    std::vector<std::string> names;
    for (const FoundCheckpoint& each : *deleted) {
      names.push_back(fs::path(each.facts.directory).filename().string());
    }
    return names;
  }
  std::vector<std::string> Told(const std::string& with) {
    std::vector<std::string> lines;
    MutexLock lock(mutex_);
    for (const JobEvent& event : told_) {
      if (event.text.find(with) != std::string::npos)
        lines.push_back(event.job + ": " + event.text);
    }
    return lines;
  }

  WatchedFileSystem files_;
  const std::unique_ptr<CheckpointDirectory> directory_ =
      CheckpointDirectory::Open(files_, root_.string(), {.keep = 2}).value();
  Mutex mutex_;
  std::vector<JobEvent> told_ ABSL_GUARDED_BY(mutex_);
  Engine engine_{{.memory_limit_bytes = int64_t{64} << 20,
                  .threads = 1,
                  .tell =
                      [this](const JobEvent& event) {
                        MutexLock lock(mutex_);
                        told_.push_back(event);
                      },
                  .file_system = &files_,
                  .checkpoints = directory_.get()}};
  const std::unique_ptr<JobDriver> driver_ = std::make_unique<JobDriver>(engine_, Spec(1));
};

TEST_F(CheckpointDeletionTest, WhatWasAskedForStaysAndOfOthersTheNewest) {
  for (uint64_t step = 1; step <= 5; ++step) {
    StepTo(step);
    Save();
    if (step <= 3) Save(/*asked_for=*/false);
  }
  EXPECT_EQ(Names("job"), (std::set<std::string>{"step-1.1", "step-2.1", "step-2.1.2", "step-3.1",
                                                 "step-3.1.2", "step-4.1", "step-5.1", "latest"}));
  EXPECT_THAT(Told("deleted"),
              ElementsAre(AllOf(HasSubstr("job: deleted step 1 in " + Path("job/step-1.1.2")),
                                HasSubstr("--checkpoint-keep=2"))));
}

TEST_F(CheckpointDeletionTest, TheDirectoryKnowsHowMuchThereIs) {
  StepTo(1);
  Save();
  StepTo(2);
  Save();
  const auto all = ListCheckpoints(files_, Path("job")).value();
  const int64_t bytes = all[0].facts.size_bytes;
  EXPECT_GT(bytes, 0);
  const auto expect = [&](const CheckpointDirectory& directory, int64_t checkpoints) {
    EXPECT_EQ(directory.TotalOf("job").checkpoints, checkpoints);
    EXPECT_EQ(directory.TotalOf("job").bytes, checkpoints * bytes);
  };
  expect(*directory_, 2);
  expect(*CheckpointDirectory::Open(files_, root_.string()).value(), 2);
  ASSERT_TRUE(Delete("job/step-2").ok());
  expect(*directory_, 1);
  EXPECT_EQ(directory_->Find("job")->step, 1u);
  fs::remove_all(Path("job/step-1.1"));  // By somebody else: seen with the next save.
  Save();
  expect(*directory_, 1);
  EXPECT_EQ(directory_->TotalOf("none").checkpoints, 0);
}

TEST_F(CheckpointDeletionTest, OfAStepThoseOfOneJobThatWereAskedForGo) {
  StepTo(1);
  Save();
  Save();
  Save(/*asked_for=*/false);
  StepTo(12);
  Save();
  EXPECT_TRUE(Refused(Delete("job/step-1", "another"), absl::StatusCode::kNotFound));
  EXPECT_EQ(Delete("job/step-1.1", "another").status().code(), Code::kNotFound);
  EXPECT_EQ(Names("job").size(), 5u);
  EXPECT_THAT(Delete("job/step-1", driver_->job().uid()).value(),
              testing::UnorderedElementsAre("step-1.1", "step-1.1.2"));
  EXPECT_EQ(Names("job"), (std::set<std::string>{"step-1.1.3", "step-12.1", "latest"}));
  EXPECT_THAT(Told("deleted"), testing::Contains("job: deleted step 1 in " + Path("job/step-1.1") +
                                                 ", as a call asked"));
  EXPECT_TRUE(Refused(Delete("job/step-1"), Code::kNotFound));
  EXPECT_THAT(Delete("job/step-1.1.3").value(), ElementsAre("step-1.1.3"));
  for (const char* name :
       {"job/step-1", "job/step-2", "job/step-1.1", "none/step-1", "none/step-1.1"}) {
    EXPECT_EQ(Delete(name).status().code(), Code::kNotFound) << name;
  }
  // No folder, whatever it is called.
  fs::rename(Path("job"), Path("step-7"));
  for (const char* name : {"step-7", "", "step-7/latest", "step-7/step-12.1/master.safetensors"}) {
    EXPECT_EQ(Delete(name).status().code(), Code::kInvalidArgument) << name;
  }
  EXPECT_TRUE(fs::exists(Path("step-7/step-12.1/index.json")));
  fs::remove(Path("step-7/step-12.1/index.json"));  // Nobody knows whose it is.
  EXPECT_EQ(Delete("step-7/step-12").status().code(), Code::kNotFound);
  EXPECT_TRUE(Delete("step-7/step-12.1").ok());
}

TEST_F(CheckpointDeletionTest, AStepOfTwoJobsIsDeletedByUidAlone) {
  StepTo(1);
  Save();
  const std::string first = driver_->job().uid();
  ASSERT_TRUE(engine_.CloseJob("job").ok());
  JobDriver second(engine_, Spec(1));
  second.UploadWeights();
  second.AttachAll();
  second.Step(1);
  ASSERT_TRUE(second.job().Save(Path("job")).ok());
  EXPECT_EQ(Delete("job/step-1").status().code(), Code::kFailedPrecondition);
  EXPECT_EQ(Names("job").size(), 3u);
  EXPECT_THAT(Delete("job/step-1", second.job().uid()).value(), ElementsAre("step-1.1.2"));
  EXPECT_THAT(Delete("job/step-1", first).value(), ElementsAre("step-1.1"));
}

TEST_F(CheckpointDeletionTest, OneThatIsUsedStays) {
  StepTo(1);
  Save();
  StepTo(2);
  Save();
  std::vector<absl::Status> said;
  const auto try_to_delete = [&] {
    said.push_back(Delete("job/step-2").status());
    said.push_back(Delete("job/step-2.1").status());
    said.push_back(Delete("job/./step-2.1").status());
  };
  files_.at_read = [&] {
    if (said.empty()) try_to_delete();
  };
  const auto expect_refusals = [&](Code last) {
    ASSERT_EQ(said.size(), 3u);
    EXPECT_TRUE(Refused(said[0], Code::kFailedPrecondition));
    EXPECT_EQ(said[1].code(), last) << said[1];
    EXPECT_EQ(said[2].code(), last) << said[2];
    said.clear();
  };
  ASSERT_TRUE(driver_->job().Load(Path("job/step-2")).ok());
  expect_refusals(Code::kFailedPrecondition);
  driver_->AttachAll();
  const auto verified =
      Await<std::vector<FoundCheckpoint>>([&](Done<std::vector<FoundCheckpoint>> done) {
        engine_.LookForCheckpoints({.path = Path("job"), .verified = true}, std::move(done));
      });
  expect_refusals(Code::kFailedPrecondition);
  EXPECT_EQ(verified->size(), 2u);
  EXPECT_THAT(Delete("job/step-2").value(), ElementsAre("step-2.1"));

  // One that is being saved has no name yet.
  files_.at_write = try_to_delete;
  Save();
  expect_refusals(Code::kNotFound);
  EXPECT_THAT(Delete("job/step-2").value(), ElementsAre("step-2.2"));
}

TEST_F(CheckpointDeletionTest, WhatIsDeletedWhileOthersAreVerifiedIsNotMissed) {
  StepTo(1);
  Save();
  StepTo(2);
  Save();
  files_.at_read = [&] {
    if (fs::exists(Path("job/step-1.1"))) EXPECT_TRUE(Delete("job/step-1").ok());
  };
  const auto verified =
      Await<std::vector<FoundCheckpoint>>([&](Done<std::vector<FoundCheckpoint>> done) {
        engine_.LookForCheckpoints({.path = Path("job"), .verified = true}, std::move(done));
      });
  ASSERT_EQ(verified->size(), 1u);
  EXPECT_EQ((*verified)[0].facts.step, 2u);
  EXPECT_TRUE((*verified)[0].problem.ok());
}

TEST_F(CheckpointDeletionTest, ASaveLeavesAnOlderOneThatIsBeingLoaded) {
  StepTo(1);
  Save(/*asked_for=*/false);
  files_.at_read = [&] {
    files_.at_read = nullptr;
    for (uint64_t step = 2; step <= 4; ++step) {
      StepTo(step);
      Save(/*asked_for=*/false);
    }
  };
  ASSERT_TRUE(driver_->job().Load(Path("job/step-1")).ok());
  EXPECT_EQ(Names("job"), (std::set<std::string>{"step-1.1", "step-3.1", "step-4.1", "latest"}));
}

TEST(CheckpointUses, AreOfManyReadersOrOfOneWhoDeletes) {
  CheckpointUses uses;
  {
    const auto one = uses.Read("/a/b");
    const auto two = uses.Read("/a//b");
    EXPECT_NE(one, nullptr);
    EXPECT_NE(two, nullptr);
    EXPECT_EQ(uses.Delete("/a/./b"), nullptr);
    EXPECT_NE(uses.Delete("/a/c"), nullptr);
  }
  {
    const auto deletes = uses.Delete("/a/b");
    EXPECT_NE(deletes, nullptr);
    EXPECT_EQ(uses.Read("/a/b"), nullptr);
    EXPECT_EQ(uses.Delete("/a/b"), nullptr);
  }
  EXPECT_NE(uses.Read("/a/b"), nullptr);
}

}  // namespace
}  // namespace ballast
