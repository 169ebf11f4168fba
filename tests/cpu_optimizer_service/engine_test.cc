#include "cpu_optimizer_service/engine.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <latch>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/reason.h"
#include "cpu_optimizer_service/host/named_memory.h"
#include "tests/cpu_optimizer_service/host/keeper_for_two.h"
#include "tests/cpu_optimizer_service/job/job_driver.h"
#include "tests/support/messages.h"

namespace ballast {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

// Counts what is asked of it, to show that a refusal comes before any allocation.
class CountingArenas : public ArenaFactory {
 public:
  absl::StatusOr<std::unique_ptr<Arena>> Create(int64_t bytes, absl::string_view label,
                                                Touch touch) override {
    total_bytes += bytes;
    if (fail) return absl::ResourceExhaustedError("no memory");
    return arenas_->Create(bytes, label, touch);
  }
  int64_t total_bytes = 0;
  bool fail = false;

 private:
  std::unique_ptr<ArenaFactory> arenas_ = MakeAnonymousArenaFactory();
};

TEST(Engine, P9AJobThatDoesNotFitIsRefusedBeforeAnythingIsAllocated) {
  CountingArenas arenas;
  Engine engine({.memory_limit_bytes = 100000, .threads = 1, .arenas = &arenas});
  const JobSpec spec = MakeJobSpec({.group_sizes = {{10000}}});
  EXPECT_TRUE(Refused(engine.CreateJob(spec), absl::StatusCode::kResourceExhausted));
  EXPECT_EQ(arenas.total_bytes, 0);
  EXPECT_TRUE(engine.ListJobs().empty());
  EXPECT_TRUE(engine.CreateJob(MakeJobSpec({.group_sizes = {{1000}}})).ok());
}

TEST(Engine, TheNeedIsWhatIsAllocated) {
  CountingArenas arenas;
  Engine engine({.memory_limit_bytes = int64_t{64} << 20, .threads = 1, .arenas = &arenas});
  JobSpec spec = MakeJobSpec({.group_sizes = {{100000}, {5000}}});
  spec.groups[1].hyper_parameters.amsgrad = true;
  ASSERT_TRUE(engine.CreateJob(spec).ok());
  const MemoryNeed need = NeedOf(spec, Layout::Create(spec.layout).value());
  EXPECT_EQ(arenas.total_bytes, need.state_bytes + need.gradient_bytes + need.accumulator_bytes);
  EXPECT_EQ(engine.memory().used_bytes(), need.total_bytes());
  // 12 B of state, 2 B as it came, 4 B summed; 16 B of state with amsgrad. Padding apart.
  EXPECT_EQ(need.state_bytes, 100096 * 12 + 5120 * 16);
  EXPECT_EQ(need.gradient_bytes, (100096 + 5120) * 2);
  EXPECT_EQ(need.accumulator_bytes, (100096 + 5120) * 4);
}

TEST(Engine, MemoryThatTheSystemRefusesLeavesNoJob) {
  CountingArenas arenas;
  arenas.fail = true;
  Engine engine({.memory_limit_bytes = int64_t{64} << 20, .threads = 1, .arenas = &arenas});
  EXPECT_EQ(engine.CreateJob(MakeJobSpec({})).status().code(),
            absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(engine.memory().used_bytes(), 0);
  arenas.fail = false;
  EXPECT_TRUE(engine.CreateJob(MakeJobSpec({})).ok());
}

TEST(Engine, P9ManyParametersWithoutElementsAreCountedToo) {
  Engine engine({.memory_limit_bytes = 1 << 20, .threads = 1});
  JobSpec spec = MakeJobSpec({.group_sizes = {std::vector<int64_t>(10000, 0)}});
  EXPECT_EQ(engine.CreateJob(spec).status().code(), absl::StatusCode::kResourceExhausted);
}

TEST(Engine, NamesAreUniqueAndJobsAreListedByName) {
  Engine engine({.memory_limit_bytes = int64_t{64} << 20, .threads = 1});
  ASSERT_TRUE(engine.CreateJob(MakeJobSpec({}, "b")).ok());
  ASSERT_TRUE(engine.CreateJob(MakeJobSpec({}, "a")).ok());
  EXPECT_EQ(engine.CreateJob(MakeJobSpec({}, "a")).status().code(),
            absl::StatusCode::kAlreadyExists);
  ASSERT_EQ(engine.ListJobs().size(), 2u);
  EXPECT_EQ(engine.ListJobs()[0]->spec().name, "a");
  EXPECT_NE(engine.ListJobs()[0]->uid(), engine.ListJobs()[1]->uid());
  EXPECT_EQ(engine.CloseJob("c").code(), absl::StatusCode::kNotFound);
}

// Who has found it by its uid closes no other one, though that has its name by then.
TEST(Engine, ClosesTheJobThatItIsGivenAndNoLaterOneOfItsName) {
  Engine engine({.memory_limit_bytes = int64_t{64} << 20, .threads = 1});
  const std::shared_ptr<Job> first = engine.CreateJob(MakeJobSpec({}, "a")).value();
  const auto close = [&](const std::shared_ptr<Job>& job) {
    return Await<bool>([&](Done<bool> done) { engine.CloseJob(job, std::move(done)); }).status();
  };
  EXPECT_EQ(close(first), absl::OkStatus());
  EXPECT_EQ(engine.FindJob("a").status().code(), absl::StatusCode::kNotFound);
  const std::shared_ptr<Job> second = engine.CreateJob(MakeJobSpec({}, "a")).value();
  EXPECT_EQ(close(first), absl::OkStatus());
  ASSERT_TRUE(engine.FindJob("a").ok());
  EXPECT_EQ(*engine.FindJob("a"), second);
  EXPECT_EQ(close(second), absl::OkStatus());
  EXPECT_TRUE(engine.ListJobs().empty());
}

TEST(Engine, SaysThatStateIsLostOnlyWhereAnEarlierProcessHadIt) {
  const auto expect_none = [](const Engine& engine, const std::string& uid) {
    EXPECT_TRUE(Refused(engine.FindJob("a", uid), absl::StatusCode::kNotFound, reason::kNoSuchJob));
  };
  Engine engine({.memory_limit_bytes = int64_t{64} << 20, .threads = 1});
  expect_none(engine, "");  // Any mistyped name.
  expect_none(engine, "uid-of-another-process");
  const std::string uid = engine.CreateJob(MakeJobSpec({}, "a")).value()->uid();
  ASSERT_TRUE(engine.CloseJob("a").ok());
  expect_none(engine, uid);
  // Of what it goes on from all jobs are here.
  Engine next({.memory_limit_bytes = int64_t{64} << 20, .threads = 1, .goes_on = true});
  expect_none(next, uid);
}

// Holds up the touching of a job's memory until the test lets it go on.
class SlowArenas : public CountingArenas {
 public:
  absl::StatusOr<std::unique_ptr<Arena>> Create(int64_t bytes, absl::string_view label,
                                                Touch touch) override {
    asked.count_down();
    goes_on.wait();
    return CountingArenas::Create(bytes, label, touch);
  }
  std::latch asked{1};
  std::latch goes_on{1};
};

// A caller whose time was too short for the touching asks again.
TEST(Engine, AJobThatIsBeingCreatedIsWaitedForByWhoWantsTheSame) {
  SlowArenas arenas;
  Engine engine({.memory_limit_bytes = int64_t{64} << 20, .threads = 1, .arenas = &arenas});
  absl::StatusOr<std::shared_ptr<Job>> first;
  std::thread creates([&] { first = engine.CreateJob(MakeJobSpec({}, "a")); });
  std::vector<absl::StatusOr<std::shared_ptr<Job>>> again;
  const auto ask_again = [&](JobSpec spec) {
    engine.CreateJob(std::move(spec), [&](auto result) { again.push_back(std::move(result)); });
  };
  while (!arenas.asked.try_wait()) std::this_thread::yield();
  EXPECT_EQ(engine.FindJob("a").status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(ReasonOf(engine.FindJob("a").status()), reason::kJobBeingCreated);
  EXPECT_TRUE(engine.ListJobs().empty());
  ASSERT_EQ(engine.JobsBeingCreated().size(), 1u);
  EXPECT_EQ(engine.JobsBeingCreated()[0]->spec().name, "a");
  ask_again(MakeJobSpec({}, "a"));
  EXPECT_TRUE(again.empty());
  ask_again(MakeJobSpec({.chunk_elements = 512}, "a"));
  ASSERT_EQ(again.size(), 1u);
  EXPECT_EQ(again[0].status().code(), absl::StatusCode::kAlreadyExists);
  arenas.goes_on.count_down();
  creates.join();
  ASSERT_EQ(again.size(), 2u);
  ASSERT_TRUE(first.ok() && again[1].ok());
  EXPECT_EQ(*first, *again[1]);
  EXPECT_EQ(engine.CreateJob(MakeJobSpec({}, "a")).status().code(),
            absl::StatusCode::kAlreadyExists);
}

// Looks at the engine between the arenas of a job.
class WatchedArenas : public CountingArenas {
 public:
  absl::StatusOr<std::unique_ptr<Arena>> Create(int64_t bytes, absl::string_view label,
                                                Touch touch) override {
    for (Activity& activity : engine->ListActivities()) seen.push_back(std::move(activity));
    return CountingArenas::Create(bytes, label, touch);
  }
  Engine* engine = nullptr;
  std::vector<Activity> seen;
};

TEST(Engine, ShowsHowFarItIsWithTheMemoryOfAJob) {
  WatchedArenas arenas;
  Engine engine({.memory_limit_bytes = int64_t{64} << 20, .threads = 1, .arenas = &arenas});
  arenas.engine = &engine;
  const JobSpec spec = MakeJobSpec({.group_sizes = {{100000}}}, "a");
  ASSERT_TRUE(engine.CreateJob(spec).ok());
  const MemoryNeed need = NeedOf(spec, Layout::Create(spec.layout).value());
  // The state comes first, and then the gradients.
  ASSERT_GE(arenas.seen.size(), 2u);
  EXPECT_EQ(arenas.seen[0].kind, ActivityKind::kMakingMemory);
  EXPECT_EQ(arenas.seen[0].job, "a");
  EXPECT_EQ(arenas.seen[0].done_bytes, 0);
  EXPECT_EQ(arenas.seen[0].total_bytes, need.total_bytes());
  EXPECT_EQ(arenas.seen[1].done_bytes, need.state_bytes);
  EXPECT_TRUE(engine.ListActivities().empty());
}

TEST(Engine, TellsTheLifeOfAJobOnceEach) {
  std::vector<std::string> told;
  Engine engine(
      {.memory_limit_bytes = int64_t{64} << 20, .threads = 1, .tell = [&](const JobEvent& event) {
         told.push_back(absl::StrCat(event.job, " ", event.rank, " ", event.text));
       }});
  {
    JobDriver driver(engine, MakeJobSpec({.group_sizes = {{1000}}, .chunk_elements = 512}, "a"));
    driver.UploadWeights();
    driver.AttachAll();
    driver.Step(1);
    driver.Step(2);
  }
  ASSERT_TRUE(engine.CloseJob("a").ok());
  EXPECT_THAT(told,
              ElementsAre(HasSubstr("a -1 created for 1 rank: 1 parameter"),
                          HasSubstr("a -1 has all first weights"),
                          HasSubstr("a 0 rank 0 attached: process "),
                          HasSubstr("a -1 step 1 is decided (uid "),
                          HasSubstr("a -1 step 2 is decided (uid "),
                          HasSubstr("a 0 rank 0 is gone: "), HasSubstr("a -1 closed at step 2")));
}

TEST(Engine, WhoWaitsForAJobThatCannotBeCreatedIsToldWhy) {
  SlowArenas arenas;
  arenas.fail = true;
  Engine engine({.memory_limit_bytes = int64_t{64} << 20, .threads = 1, .arenas = &arenas});
  std::thread creates([&] { EXPECT_FALSE(engine.CreateJob(MakeJobSpec({}, "a")).ok()); });
  while (!arenas.asked.try_wait()) std::this_thread::yield();
  absl::Status told;
  engine.CreateJob(MakeJobSpec({}, "a"), [&](auto result) { told = result.status(); });
  arenas.goes_on.count_down();
  creates.join();
  EXPECT_EQ(told.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(engine.FindJob("a").status().code(), absl::StatusCode::kNotFound);
}

TEST(Engine, HasABoundedNumberOfJobs) {
  Engine engine({.memory_limit_bytes = int64_t{64} << 20, .threads = 1});
  JobSpec spec = MakeJobSpec({.group_sizes = {{0}}});
  for (size_t i = 0; i < kMaxJobs; ++i) {
    spec.name = absl::StrCat("job", i);
    ASSERT_TRUE(engine.CreateJob(spec).ok()) << i;
  }
  spec.name = "another";
  EXPECT_TRUE(Refused(engine.CreateJob(spec), absl::StatusCode::kResourceExhausted));
  ASSERT_TRUE(engine.CloseJob("job7").ok());
  EXPECT_TRUE(engine.CreateJob(spec).ok());
}

// A few bytes, and the tables of each of these chunks.
TEST(Engine, AMillionChunksAreRefusedBeforeTheyAreLaidOut) {
  Engine engine({.memory_limit_bytes = int64_t{64} << 20, .threads = 1});
  JobSpec spec = MakeJobSpec({.group_sizes = {{0}}, .chunk_elements = 256});
  spec.layout.parameters[0].shape = {1 << 14, 1 << 14};
  spec.layout.partitions = {{.rank = 0, .group = 0, .begin = 0, .end = 1 << 28}};
  EXPECT_TRUE(Refused(engine.CreateJob(spec), absl::StatusCode::kResourceExhausted));
  EXPECT_EQ(engine.memory().used_bytes(), 0);
}

// As under ulimit -v, where the budget has room and the system has none.
TEST(Engine, AJobWaitsIfTheSystemHasNoMemoryForSecondVersions) {
  class NoSecondVersions : public CountingArenas {
   public:
    absl::StatusOr<std::unique_ptr<Arena>> Create(int64_t bytes, absl::string_view label,
                                                  Touch touch) override {
      if (absl::StrContains(label, "second versions")) {
        return absl::ResourceExhaustedError("cannot map");
      }
      return CountingArenas::Create(bytes, label, touch);
    }
  };
  NoSecondVersions arenas;
  Engine engine({.memory_limit_bytes = int64_t{64} << 20, .threads = 1, .arenas = &arenas});
  JobSpec spec = MakeJobSpec({});
  spec.update_mode = UpdateMode::kSpeculate;
  const auto job = engine.CreateJob(spec);
  ASSERT_TRUE(job.ok()) << job.status();
  const JobStatus status = (*job)->Status();
  EXPECT_EQ(status.speculation_refused, "cannot map");
  EXPECT_EQ(status.memory.speculation_bytes, 0);
  EXPECT_EQ(engine.memory().used_bytes(), status.memory.total_bytes());
}

TEST(Engine, DrainingLetsTheStepInProgressEndAndBeginsNoOther) {
  Engine engine({.memory_limit_bytes = int64_t{64} << 20, .threads = 1});
  JobDriver driver(engine, MakeJobSpec({.world_size = 2}));
  driver.UploadWeights();
  driver.AttachAll();
  ASSERT_TRUE(driver.stream(0).BeginStep(1, {}).ok());
  EXPECT_FALSE(engine.Drain(0));
  EXPECT_EQ(engine.CreateJob(MakeJobSpec({}, "late")).status().code(),
            absl::StatusCode::kUnavailable);
  ASSERT_TRUE(driver.stream(1).BeginStep(1, {}).ok());
  driver.SendAll(1, 0);
  driver.EndMicroStepAll(0);
  driver.SealAll(1);
  EXPECT_TRUE(engine.Drain(0));
  EXPECT_EQ(driver.stream(0).BeginStep(2, {}).code(), absl::StatusCode::kUnavailable);
}

// As two engines that share a keeper by mistake may leave them.
TEST(Engine, OfTwoJobsOfOneNameTakesOverOneAndSaysThatTheOtherIsLost) {
  KeeperForTwo keeper;
  NamedMemory first(keeper), second(keeper);
  Engine engine({.memory_limit_bytes = int64_t{64} << 20, .threads = 1, .named_memory = &first});
  Engine other({.memory_limit_bytes = int64_t{64} << 20, .threads = 1, .named_memory = &second});
  std::set<std::string> uids = {engine.CreateJob(MakeJobSpec({})).value()->uid(),
                                other.CreateJob(MakeJobSpec({})).value()->uid()};
  NamedMemory left(keeper);
  Engine next({.memory_limit_bytes = int64_t{64} << 20, .threads = 1, .named_memory = &left});
  const Engine::TakenOver taken = next.TakeOverJobs();
  EXPECT_EQ(taken.back.size(), 1u);
  ASSERT_EQ(taken.lost.size(), 1u);
  const std::string kept = next.FindJob("job").value()->uid();
  EXPECT_EQ(uids.erase(kept), 1u);
  EXPECT_THAT(taken.lost[0], HasSubstr(*uids.begin()));
  EXPECT_TRUE(Says(taken.lost[0]));
  for (const auto& [name, file] : keeper.kept()) EXPECT_THAT(name, testing::StartsWith(kept));
}

TEST(Engine, ThatHasEndedIsNotAskedToMakeNamedMemoryReady) {
  KeeperForTwo keeper;
  NamedMemory memory(keeper);
  {
    const Engine engine(
        {.memory_limit_bytes = int64_t{64} << 20, .threads = 1, .named_memory = &memory});
  }
  // As much as several tasks would make huge.
  const auto arena = memory.Create("after the engine", 64 << 20, ArenaFactory::Touch::kNow);
  ASSERT_TRUE(arena.ok()) << arena.status();
  EXPECT_EQ((*arena)->data()[(64 << 20) - 1], std::byte{0});
}

}  // namespace
}  // namespace ballast
