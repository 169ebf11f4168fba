// Deaths around what happens to a job beside its steps: a load, an abort, a rank that is replaced, a
// save by the service itself; and a step that cannot be kept.
#include <signal.h>
#include <unistd.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/cpu_optimizer_service/job/death/dying_jobs.h"
#include "tests/cpu_optimizer_service/job/job_driver.h"
#include "tests/cpu_optimizer_service/state/checkpoint_for_tests.h"

namespace ballast {
namespace {

using testing::HasSubstr;

class JobDeathEventsTest : public JobDeathTest {
 protected:
  JobDeathEventsTest()
      : root_(fs::path(testing::TempDir()) / absl::StrCat("job-death-", getpid())) {
    fs::remove_all(root_);
    fs::create_directories(root_);
  }
  ~JobDeathEventsTest() override { fs::remove_all(root_); }

  Training Loading() const {
    Training training = Small();
    training.loads = 2;
    training.saved = root_ / "job";
    return training;
  }
  std::set<std::string> Saved() const {
    std::set<std::string> names;
    for (const auto& entry : fs::directory_iterator(root_ / "job")) {
      names.insert(entry.path().filename());
    }
    names.erase("latest");
    return names;
  }

  const fs::path root_;
};

TEST_F(JobDeathEventsTest, AroundALoadIsNotSeen) {
  const Training training = Loading();
  DieAtEachStore(training, 0, /*stride=*/2);
}

TEST_F(JobDeathEventsTest, AroundAnAbortIsNotSeen) {
  Training training = Small();
  training.aborts = 2;
  training.steps = 3;
  DieAtEachStore(training, 0, /*stride=*/3);
  training.spec.on_abort = OnAbort::kSkip;
  DieAtEachStore(training, 0, /*stride=*/3);
}

TEST_F(JobDeathEventsTest, AroundARankThatIsReplacedIsNotSeen) {
  Training training = Small();
  training.replaces = 2;
  training.steps = 3;
  DieAtEachStore(training, 0, /*stride=*/3);
  training.spec.on_abort = OnAbort::kSkip;
  DieAtEachStore(training, 0, /*stride=*/3);
}

// Which it is decides when the load begins, and not who saves until the next process does it again.
TEST_F(JobDeathEventsTest, DuringALoadHasTheSameCheckpointLoadedThoughANewerOneCame) {
  Training training = Loading();
  (void)Undisturbed(training);
  ASSERT_EQ(Saved(), (std::set<std::string>{"step-1.1"}));
  Training later = Small();
  later.steps = 1;
  Kept others;
  const Life saved = Live(others, {}, [&](Engine& engine) {
    (void)Worker(engine, later).Train();
    const std::string newer = root_ / "newer";
    return engine.FindJob(later.spec.name).value()->Save(newer).value().directory;
  });
  // It is another job's, which saved last, and of another step, as its name says.
  const fs::path newer = root_ / "job" / "step-1.1.9";
  int loaded_again = 0;
  for (uint64_t at = 1;; ++at) {
    Kept kept;
    if (!Live(training, kept, {.at_store = at}).died) break;
    fs::copy(saved.result, newer);
    const Life life = Live(kept, {}, [&](Engine& engine) {
      const auto job = engine.FindJob(training.spec.name);
      if (!job.ok()) return std::string();
      (void)(*job)->TakeSnapshot({});
      return absl::StrCat(told_at_the_start.at(0), ", from ", (*job)->Status().resumed_uid);
    });
    fs::remove_all(newer);
    if (!absl::StrContains(life.result, " again")) continue;
    ++loaded_again;
    const std::string uid = ReadJson(root_ / "job" / "step-1.1" / "index.json")["uid"];
    ASSERT_THAT(life.result,
                testing::AllOf(HasSubstr("loads " + (root_ / "job/step-1.1 again").string()),
                               testing::EndsWith(", from " + uid)));
  }
  EXPECT_GE(loaded_again, 3);
}

TEST_F(JobDeathEventsTest, DoesNotBringTheNextSaveForwardOrPutItOff) {
  const Training training = Small();
  Kept kept;
  kept.checkpoint_directory = root_;
  kept.policy = {.every_steps = 4};
  const auto go_to = [&](uint64_t step, bool dies) {
    return [=](Engine& engine) {
      Training until = training;
      until.steps = step;
      (void)Worker(engine, until).Train();
      const auto job = engine.FindJob(training.spec.name).value();
      while (!job->Status().saves.empty()) std::this_thread::yield();
      if (dies) kill(getpid(), SIGKILL);
      return std::string();
    };
  };
  ASSERT_TRUE(Live(kept, {}, go_to(5, true)).died);
  EXPECT_EQ(Saved(), (std::set<std::string>{"step-4.1"}));
  ASSERT_TRUE(Live(kept, {}, go_to(7, true)).died);
  EXPECT_EQ(Saved(), (std::set<std::string>{"step-4.1"}));
  ASSERT_TRUE(Live(kept, {}, go_to(8, true)).died);
  EXPECT_EQ(Saved(), (std::set<std::string>{"step-4.1", "step-8.1"}));

  // By time: what was saved long ago is due however young the process is, and what was just saved
  // is not.
  kept.policy = {.every_seconds = 1e6};
  ASSERT_TRUE(Live(kept, {}, go_to(9, true)).died);
  EXPECT_EQ(Saved(), (std::set<std::string>{"step-4.1", "step-8.1"}));
  for (const std::string& name : Saved()) {
    const std::string path = root_ / "job" / name / "index.json";
    nlohmann::json index = ReadJson(path);
    index["saved_unix_ms"] = index["saved_unix_ms"].get<int64_t>() - 2'000'000'000;
    Sign(index);
    std::ofstream(path) << index.dump();
  }
  ASSERT_TRUE(Live(kept, {}, go_to(10, true)).died);
  EXPECT_EQ(Saved(), (std::set<std::string>{"step-4.1", "step-8.1", "step-10.1"}));
}

// Memory that ranks shared, and which died with the process: no keeper had it.
TEST_F(JobDeathEventsTest, WithAGradientThatIsGoneSkipsTheStepWhereItsRanksCannotDoItAgain) {
  Training training = Small();
  training.in_place = true;
  training.steps = 1;
  int skipped = 0;
  for (const OnAbort on_abort : {OnAbort::kRedo, OnAbort::kSkip}) {
    training.spec.on_abort = on_abort;
    for (uint64_t at = 1;; ++at) {
      Kept kept;
      const Life life = Live(training, kept, {.at_store = at});
      if (!life.died) break;
      if (life.last != "a ledger's word") continue;
      const Life next = Live(kept, {}, [&](Engine& engine) {
        Training rest = training;
        rest.in_place = false;
        (void)Worker(engine, rest).Train();
        const JobStatus status = engine.FindJob(training.spec.name).value()->Status();
        return absl::StrCat(told_at_the_start.size(), " told; skipped ", status.skipped_steps,
                            ", not kept ", status.statistics.not_kept_steps(), "; generation ",
                            ToString(status.generation), "; at ", status.committed_step);
      });
      // The last rank has begun with its first gradient.
      const bool all_had_begun =
          next.result == "1 told; skipped 1, not kept 1; generation 1.1; at 1";
      skipped += all_had_begun ? 1 : 0;
      if (!all_had_begun) {
        EXPECT_EQ(next.result, "1 told; skipped 0, not kept 0; generation 1.2; at 1");
      }
      if (HasFailure()) return;
    }
    EXPECT_EQ(skipped > 0, on_abort == OnAbort::kSkip);
  }
}

// A rank that had sealed does not know of the skip, and says so again to whichever process is there.
TEST_F(JobDeathEventsTest, AfterAStepWasSkippedLeavesWhatComesLateForItWithoutAnError) {
  JobSpec spec = Small().spec;
  spec.on_abort = OnAbort::kSkip;
  Kept kept;
  const Life first = Live(kept, {}, [&](Engine& engine) {
    JobDriver driver(engine, spec);
    driver.UploadWeights();
    driver.AttachAll();
    driver.BeginAll();
    driver.SendOf(0, 1, 0, /*final=*/true);
    driver.EndMicroStep(0, 0);
    (void)driver.Seal(0, 1);
    (void)driver.job().AbortStep().value();
    kill(getpid(), SIGKILL);
    return std::string();
  });
  ASSERT_TRUE(first.died);
  const Life second = Live(kept, {}, [&](Engine& engine) {
    JobDriver driver(engine.FindJob(spec.name).value());
    driver.Reopen(0);
    RankStream& stream = driver.stream(0);
    const auto sealed = stream.Seal({1, 0}, 2, StepVote{});
    const absl::Status voted = stream.Vote({1, 0}, StepVote{.apply = false});
    return absl::StrCat(sealed.ok() && !sealed->has_value() ? "OK" : sealed.status().ToString(),
                        ", ", voted.ToString(), ", at ", driver.job().Status().committed_step);
  });
  EXPECT_EQ(second.result, "OK, OK, at 1");
}

}  // namespace
}  // namespace ballast
