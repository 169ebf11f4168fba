// Processes of the service that die, and others that take over their memory: at each of their
// stores that a later process could see, and at random instants in the middle of an update.
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <filesystem>
#include <functional>
#include <future>
#include <iterator>
#include <memory>
#include <new>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "cpu_optimizer_service/engine.h"
#include "cpu_optimizer_service/host/named_memory.h"
#include "cpu_optimizer_service/host/state_directory.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/cpu_optimizer_service/host/directory_in_memory.h"
#include "tests/cpu_optimizer_service/job/death/dying_jobs.h"
#include "tests/cpu_optimizer_service/job/job_driver.h"
#include "tests/support/messages.h"
#include "tests/support/sanitizers.h"

namespace ballast {
namespace {

TEST_F(JobDeathTest, AtAnyStoreIsNotSeenInTheState) {
  const std::set<std::string> kinds = DieAtEachStore(Small());
  ExpectAmong(kinds, {"a part of a record", "a record's half", "a record's flip", "a ledger's word",
                      "an entry of the log", "the log's end", "a chunk's word", "a lane is taken",
                      "a lane is free", "a chunk's first weights"});
}

TEST_F(JobDeathTest, OfTheProcessThatTakesOverIsNotSeenEither) {
  for (const uint64_t second : {1, 3, 6}) DieAtEachStore(Small(), second, /*stride=*/3);
}

TEST_F(JobDeathTest, InAStepOfSeveralMicroStepsIsNotSeen) {
  Training training = Small();
  training.micro_steps = 4;
  const std::set<std::string> kinds = DieAtEachStore(training, 0, /*stride=*/2);
  ExpectAmong(kinds, {"a sum's lane is taken", "a turn of a sum", "a sum's lane is free"});
}

TEST_F(JobDeathTest, WhileUpdatesAreProvisionalIsNotSeen) {
  Training training = Small();
  training.spec.update_mode = UpdateMode::kSpeculate;
  training.max_norm = 20;
  DieAtEachStore(training, 0, /*stride=*/2);
}

TEST_F(JobDeathTest, AtAnyStoreIsNotSeenInPackedState) {
  for (const StateFormat format : {StateFormat::kBFloat16, StateFormat::k8Bit}) {
    Training training = Packed(format);
    ExpectAmong(DieAtEachStore(training),
                {"a chunk's word", "a lane is taken", "a lane is free", "a chunk's first weights"});
    DieAtEachStore(training, /*second=*/2, /*stride=*/31);
    training.spec.update_mode = UpdateMode::kSpeculate;
    training.max_norm = 20;
    training.writes = 1;
    ExpectAmong(DieAtEachStore(training, 0, /*stride=*/2),
                {"a provisional version of a chunk", "a written chunk"});
  }
}

TEST_F(JobDeathTest, WhileAReaderHoldsTheStateIsNotSeen) {
  Training training = Small();
  training.steps = 3;
  training.pins = true;
  ExpectAmong(DieAtEachStore(training), {"a new version of a chunk", "a lane is taken"});
}

TEST_F(JobDeathTest, WithoutRoomToTakeAJobOverItIsLeftToTheNextProcess) {
  if (kSanitized) GTEST_SKIP() << "a sanitizer ends where memory does";
  const Training training = Small();
  const std::string expected = Undisturbed(training);
  int left = 0;
  for (const int64_t room : {0, 150 << 10, 300 << 10, 500 << 10, 700 << 10, 1 << 20}) {
    for (const bool in_directory : {false, true}) {
      const DirectoryInMemory directory;
      Kept kept;
      if (in_directory) kept.directory = directory.path();
      EXPECT_TRUE(Live(training, kept, {.at_store = 60}).died);
      kept.room_bytes = room;
      const Life without = Live(kept, {}, [](Engine&) { return "there was room"; });
      if (without.result == "there was room") continue;
      // Without room for anything small the process ends.
      if (!without.died) EXPECT_THAT(without.result, testing::StartsWith("left: "));
      ++left;
      kept.room_bytes = -1;
      const auto go_on = [&](Engine& engine) -> std::string {
        if (!engine.FindJob(training.spec.name).ok()) return "the job is lost";
        return Worker(engine, training).Train();
      };
      EXPECT_EQ(Live(kept, {}, go_on).result, expected) << room << " bytes: " << without.result;
    }
  }
  EXPECT_GE(left, 4);
}

// Where its log has to grow: the job is not given up, the process ends.
TEST_F(JobDeathTest, OfAProcessThatGetsNoMoreMemoryIsNotSeen) {
  if (kSanitized) GTEST_SKIP() << "a sanitizer ends where memory does";
  const JobSpec spec = MakeJobSpec({.group_sizes = {{512}}});
  Kept kept;
  const Life starves = Live(kept, {}, [&](Engine& engine) {
    JobDriver driver(engine, spec);
    driver.UploadWeights();
    driver.AttachAll();
    driver.BeginAll();
    std::set_new_handler([] { std::abort(); });  // As ballastd.
    const ScopedAddressLimit limit(0);
    for (uint32_t m = 0; m < 1 << 12; ++m) driver.EndMicroStepAll(m);
    return std::string("its log had room");
  });
  EXPECT_TRUE(starves.died) << starves.result;
  const auto look = [&](Engine& engine) {
    const auto job = engine.FindJob(spec.name);
    return job.ok() ? std::string("there") : job.status().ToString();
  };
  EXPECT_EQ(Live(kept, {}, look).result, "there");
}

// Before, in and after the undo: the step is undone once, and the state is as if it never had been.
TEST_F(JobDeathTest, AroundAnUndoIsNotSeen) {
  Training training = Small();
  training.spec.keep_previous = true;
  training.undoes = 2;
  ExpectAmong(DieAtEachStore(training, 0, /*stride=*/2),
              {"a previous version's word", "a new version of a chunk"});
}

// Before, in and after the write: all of it is the state, or nothing, and it comes again.
TEST_F(JobDeathTest, AroundAWriteOfStateIsNotSeen) {
  Training training = Small();
  training.writes = 1;
  training.pins = true;
  ExpectAmong(DieAtEachStore(training, 0, /*stride=*/2), {"a written chunk"});
  DieAtEachStore(training, /*second=*/2, /*stride=*/7, /*in_directory=*/true);
}

// The old job, or the new one: never both, never neither, and the new one is whole.
TEST_F(JobDeathTest, WhileAJobIsDerivedFromAnotherIsNotSeen) {
  Training training = Small();
  training.derives = 2;
  training.steps = 4;
  training.derived = training.spec;
  std::vector<ParameterSpec>& parameters = training.derived.layout.parameters;
  parameters.erase(parameters.begin());
  parameters.push_back({.name = "new", .shape = {300}, .group = 0});
  training.derived.layout.partitions = PartitionsOf(
      MakeBuckets(FlatElements(training.derived.layout), training.derived.layout.world_size, 512),
      training.derived.layout.world_size);
  ExpectAmong(DieAtEachStore(training, 0, /*stride=*/2), {"a chunk's first weights"});
  DieAtEachStore(training, /*second=*/2, /*stride=*/7, /*in_directory=*/true);
}

TEST_F(JobDeathTest, WhileFirstWeightsComeWithMomentsIsNotSeen) {
  Training training = Small();
  training.begins = 3;
  training.steps = 4;
  ExpectAmong(DieAtEachStore(training, 0, /*stride=*/2), {"a chunk's first weights"});
}

// The next process does not know which moments lie where.
TEST_F(JobDeathTest, OfAnUploadOfMomentsLeavesNoneForWeightsAlone) {
  Training training = Small();
  training.begins = 3;
  training.steps = 3;
  const auto upload_again = [&](Engine& engine) {
    const absl::StatusOr<std::shared_ptr<Job>> found = engine.FindJob(training.spec.name);
    JobDriver driver(found.ok() ? *found : engine.CreateJob(training.spec).value());
    for (const int rank : {0, 1}) driver.Attach(rank, absl::StrCat("new", rank));
    for (const int rank : {0, 1}) {
      const absl::Status uploaded = driver.UploadState({}, rank, absl::StrCat("new", rank));
      if (!uploaded.ok()) return uploaded.ToString();
    }
    const JobStatus status = driver.job().Status();
    std::vector<std::byte> shard(driver.layout().chunks()[0].elements * sizeof(float));
    const absl::Status read =
        driver.job().ReadShard(status.generation, status.committed_step, 0, absl::MakeSpan(shard));
    return absl::StrCat(driver.job().StateHash(), ", read: ", read.ToString(), " at ",
                        status.committed_step);
  };
  Kept none;
  const std::string alone = Live(none, {}, upload_again).result;
  EXPECT_THAT(alone, testing::EndsWith(", read: OK at 0"));
  int tried = 0;
  for (uint64_t at = 1;; ++at) {
    Kept kept;
    const Life life = Live(training, kept, {.at_store = at});
    ASSERT_TRUE(life.died) << "the last chunk's arrival was not seen";
    if (life.last != "a chunk's first weights") continue;
    const std::string result = Live(kept, {}, upload_again).result;
    if (absl::EndsWith(result, " at 3")) break;  // All moments had come.
    ASSERT_EQ(result, alone) << "died at store " << at;
    // Another one, too, dies before, between and after its first weights.
    for (uint64_t second = 1;; second += kSanitized ? 5 : 1) {
      Kept left;
      Live(training, left, {.at_store = at});
      if (!Live(left, {.at_store = second}, upload_again).died) break;
      ASSERT_EQ(Live(left, {}, upload_again).result, alone)
          << "died at stores " << at << ", " << second;
      ++tried;
    }
  }
  EXPECT_GE(tried, kSanitized ? 8 : 40);
}

// A contribution that was half added when the process died.
class HalfAdded : public JobDeathTest {
 protected:
  // All ranks' contributions of the last of these are under way when it dies.
  static constexpr uint32_t kMicroSteps = 3;

  // Those of the first ranks, if not of all.
  Kept DieInAllSums(const JobSpec& spec, std::optional<int> of_ranks = std::nullopt,
                    const std::string& at = "a turn of a sum") {
    const int ranks = of_ranks.value_or(spec.layout.world_size);
    Kept kept;
    const Life life =
        Live(kept, {.at_store = static_cast<uint64_t>(ranks), .kind = at}, [&](Engine& engine) {
          JobDriver driver(engine, spec);
          driver.UploadWeights();
          driver.AttachAll();
          driver.BeginAll();
          const auto send = [&](int chunk, uint32_t m) {
            (void)driver.Send(chunk, driver.Values(chunk, m), m, m + 1 == kMicroSteps).value();
          };
          for (int chunk = 0; chunk < spec.layout.world_size; ++chunk) {
            for (uint32_t m = 0; m + 1 < kMicroSteps; ++m) send(chunk, m);
          }
          std::vector<std::thread> threads;
          for (int chunk = 0; chunk < ranks; ++chunk) {
            threads.emplace_back([&send, chunk] { send(chunk, kMicroSteps - 1); });
          }
          for (std::thread& thread : threads) thread.join();
          return std::string("it did not die");
        });
    EXPECT_TRUE(life.died) << life.result;
    return kept;
  }
  static JobSpec OneChunkForEach(int ranks) {
    return MakeJobSpec({.group_sizes = {{512 * ranks}},
                        .world_size = ranks,
                        .bucket_elements = 512 * ranks,
                        .chunk_elements = 512});
  }
};

TEST_F(HalfAdded, IsCompletedByTheSameContributionAlone) {
  const JobSpec spec = OneChunkForEach(1);
  Kept kept = DieInAllSums(spec);
  const Life life = Live(kept, {}, [&](Engine& engine) -> std::string {
    const std::shared_ptr<Job> job = engine.FindJob(spec.name).value();
    JobDriver driver(job);
    driver.Attach(0, "", spec.update_mode, nullptr, job->Status().generation);
    RankStream& stream = driver.stream(0);
    const std::vector<std::byte> bytes = driver.Encode(0, driver.Values(0, kMicroSteps - 1));
    const absl::Span<const std::byte> piece(bytes);
    const auto contribute = [&](uint32_t end, bool empty) {
      return stream
          .Contribute({.step = 1,
                       .chunk = 0,
                       .micro_step_begin = kMicroSteps - 1,
                       .micro_step_end = end,
                       .empty = empty,
                       .payload = {&piece, empty ? size_t{0} : size_t{1}}})
          .status();
    };
    for (uint32_t m = 0; m < kMicroSteps; ++m) {
      if (!stream.EndMicroStep({1, 0}, m, {}).ok()) return "a micro-step is not taken";
    }
    std::string told = absl::StrCat(contribute(kMicroSteps + 1, false).ToString(), "\n",
                                    contribute(kMicroSteps, true).ToString(), "\n");
    const auto refusal = stream.Seal({1, 0}, kMicroSteps - 1, StepVote{}).value();
    absl::StrAppend(&told, refusal.has_value() ? refusal->status.ToString() : "sealed", "\n");
    if (!contribute(kMicroSteps, false).ok()) return "the same contribution is not taken";
    if (stream.Seal({1, 0}, kMicroSteps, StepVote{}).value().has_value()) return "not sealed";
    driver.listener(0).WaitForCommit(1);
    return absl::StrCat(told, job->StateHash());
  });
  Kept none;
  const Life twin = Live(none, {}, [&](Engine& engine) {
    JobDriver driver(engine, spec);
    driver.UploadWeights();
    driver.AttachAll();
    driver.Step(0, kMicroSteps);
    return driver.job().StateHash();
  });
  const std::vector<std::string> told = absl::StrSplit(life.result, '\n');
  ASSERT_EQ(told.size(), 4) << life.result;
  for (int call = 0; call < 3; ++call) {
    EXPECT_THAT(told[call], testing::StartsWith("FAILED_PRECONDITION: "));
    EXPECT_TRUE(Says(told[call]));
  }
  EXPECT_EQ(told[3], twin.result);
}

TEST_F(HalfAdded, IsAddedOnceWhereItComesAgainWithMoreMicroSteps) {
  const JobSpec spec = OneChunkForEach(1);
  const auto go_on = [&](Engine& engine) {
    const std::shared_ptr<Job> job = engine.FindJob(spec.name).value();
    JobDriver driver(job);
    driver.Attach(0, "", spec.update_mode, nullptr, job->Status().generation);
    const std::vector<std::byte> bytes = driver.Encode(0, driver.Values(0, kMicroSteps));
    const absl::Span<const std::byte> piece(bytes);
    Must(driver.stream(0)
             .Contribute({.step = 1,
                          .chunk = 0,
                          .micro_step_begin = kMicroSteps - 1,
                          .micro_step_end = kMicroSteps + 1,
                          .final = true,
                          .payload = {&piece, 1}})
             .status());
    for (uint32_t m = 0; m <= kMicroSteps; ++m) driver.EndMicroStepAll(m);
    driver.SealAll(kMicroSteps + 1);
    return job->StateHash();
  };
  const std::string untouched = "a sum's lane is taken";
  Kept once = DieInAllSums(spec, std::nullopt, untouched);
  const std::string expected = Live(once, {}, go_on).result;
  Kept kept = DieInAllSums(spec, std::nullopt, untouched);
  ASSERT_TRUE(Live(kept, {.at_store = 1, .kind = "a turn of a sum"}, go_on).died);
  EXPECT_EQ(Live(kept, {}, go_on).result, expected);
}

// The process that skips its step dies, too, at each store.
TEST_F(HalfAdded, IsWholeOnceOrItsStepIsSkipped) {
  JobSpec spec = OneChunkForEach(1);
  spec.on_abort = OnAbort::kSkip;
  const auto whole = [&](Engine& engine) {
    JobDriver driver(engine, spec);
    driver.UploadWeights();
    driver.AttachAll();
    driver.Step(0, kMicroSteps);
    return absl::StrCat("step 1: ", driver.job().StateHash());
  };
  const auto nothing = [&](Engine& engine) {
    JobDriver driver(engine, spec);
    driver.UploadWeights();
    return absl::StrCat("skipped: ", driver.job().StateHash());
  };
  const auto skip = [&](Engine& engine) {
    (void)engine.FindJob(spec.name).value()->AbortStep().value();
    return std::string();
  };
  const auto go_on = [&](Engine& engine) {
    const std::shared_ptr<Job> job = engine.FindJob(spec.name).value();
    if (job->Status().skipped_steps > 0) return absl::StrCat("skipped: ", job->StateHash());
    JobDriver driver(job);
    driver.Attach(0, "", spec.update_mode, nullptr, job->Status().generation);
    (void)driver.Send(0, driver.Values(0, kMicroSteps - 1), kMicroSteps - 1, true).value();
    for (uint32_t m = 0; m < kMicroSteps; ++m) driver.EndMicroStepAll(m);
    driver.SealAll(kMicroSteps);
    return absl::StrCat("step 1: ", job->StateHash());
  };
  Kept none;
  const std::string done = Live(none, {}, whole).result;
  Kept none_again;
  const std::string skipped = Live(none_again, {}, nothing).result;
  std::set<std::string> results;
  for (uint64_t at = 1;; ++at) {
    Kept kept = DieInAllSums(spec);
    const bool died = Live(kept, {.at_store = at}, skip).died;
    const std::string result = Live(kept, {}, go_on).result;
    EXPECT_THAT(result, testing::AnyOf(done, skipped)) << "died at store " << at;
    results.insert(result);
    if (!died) break;
  }
  EXPECT_EQ(results.size(), 2);
}

constexpr int kLanes = 32;

TEST_F(HalfAdded, HoldsNoLaneOnceItsStepIsAborted) {
  const JobSpec spec = OneChunkForEach(kLanes);
  Kept kept = DieInAllSums(spec);
  const Life life = Live(kept, {}, [&](Engine& engine) {
    const std::shared_ptr<Job> job = engine.FindJob(spec.name).value();
    (void)job->AbortStep().value();
    std::atomic<int> taken = 0;
    std::function<void(const char*)> count = [&](absl::string_view stored) {
      if (stored == "a sum's lane is taken") ++taken;
    };
    store_seam = &count;
    JobDriver driver(job);
    driver.AttachAll();
    driver.Step(0, kMicroSteps);
    return absl::StrCat("step ", job->Status().committed_step, ", lanes taken ", taken.load());
  });
  EXPECT_EQ(life.result, absl::StrCat("step 1, lanes taken ", kLanes));
}

// Then nothing is waited for: it is added all the same, and would be lost with the next process.
TEST_F(HalfAdded, MayHoldAllLanesOfAnotherContribution) {
  const JobSpec spec = OneChunkForEach(kLanes + 1);
  const auto give_last = [&](JobDriver& driver, int chunk) {
    (void)driver.Send(chunk, driver.Values(chunk, kMicroSteps - 1), kMicroSteps - 1, true).value();
  };
  const auto go_on = [&](Engine& engine) {
    const std::shared_ptr<Job> job = engine.FindJob(spec.name).value();
    const JobStatus status = job->Status();
    if (status.generation != Generation(1)) {
      JobDriver driver(job);
      driver.AttachAll();
      driver.Step(0, kMicroSteps);
      return absl::StrCat("done again: ", job->StateHash());
    }
    JobDriver driver(job);
    for (int rank = 0; rank <= kLanes; ++rank) {
      driver.Attach(rank, "", spec.update_mode, nullptr, status.generation);
    }
    give_last(driver, kLanes);  // The first to come, though all lanes are others'.
    for (int chunk = 0; chunk < kLanes; ++chunk) give_last(driver, chunk);
    for (uint32_t m = 0; m < kMicroSteps; ++m) driver.EndMicroStepAll(m);
    driver.SealAll(kMicroSteps);
    return job->StateHash();
  };
  Kept none;
  const std::string expected = Live(none, {}, [&](Engine& engine) {
                                 JobDriver driver(engine, spec);
                                 driver.UploadWeights();
                                 driver.AttachAll();
                                 driver.Step(0, kMicroSteps);
                                 return driver.job().StateHash();
                               }).result;
  Kept kept = DieInAllSums(spec, kLanes);
  EXPECT_EQ(Live(kept, {}, go_on).result, expected);

  // Another one dies while it is adding it, which the ledger's word before says.
  kept = DieInAllSums(spec, kLanes);
  ASSERT_TRUE(Live(kept, {.at_store = 1, .kind = "a ledger's word"}, go_on).died);
  EXPECT_EQ(Live(kept, {}, go_on).result, absl::StrCat("done again: ", expected));
  // And when it has: then it is kept.
  kept = DieInAllSums(spec, kLanes);
  const auto give_one = [&](Engine& engine) {
    const std::shared_ptr<Job> job = engine.FindJob(spec.name).value();
    JobDriver driver(job);
    driver.Attach(kLanes, "", spec.update_mode, nullptr, job->Status().generation);
    give_last(driver, kLanes);
    kill(getpid(), SIGKILL);
    return std::string("it did not die");
  };
  ASSERT_TRUE(Live(kept, {}, give_one).died);
  EXPECT_EQ(Live(kept, {}, go_on).result, expected);
}

// Only of an attempt that another process left may a rank know the norm before this one tells it.
TEST_F(JobDeathTest, AVoteBeforeItsNormIsTakenOfTheAttemptThatWasLeftAndOfNoOther) {
  const JobSpec spec = Small().spec;
  const auto left = [&] {
    Kept kept;
    const Life life = Live(kept, {}, [&](Engine& engine) {
      JobDriver driver(engine, spec);
      driver.UploadWeights();
      driver.AttachAll();
      driver.BeginAll();
      kill(getpid(), SIGKILL);
      return std::string("it did not die");
    });
    EXPECT_TRUE(life.died) << life.result;
    return kept;
  };
  const auto vote_of = [](JobDriver& driver, uint32_t attempt, bool begins) {
    RankStream& stream = driver.stream(0);
    if (begins) Must(stream.BeginStep({1, attempt}, {}));
    for (const int chunk : driver.layout().chunks_of_rank(0)) {
      const std::vector<std::byte> bytes = driver.Encode(chunk, driver.Values(chunk, 1));
      const absl::Span<const std::byte> piece(bytes);
      Must(stream
               .Contribute({.step = 1,
                            .attempt = attempt,
                            .chunk = chunk,
                            .micro_step_end = 1,
                            .payload = {&piece, 1}})
               .status());
    }
    Must(stream.EndMicroStep({1, attempt}, 0, {}));
    const auto refusal = stream.Seal({1, attempt}, 1, std::nullopt).value();
    if (refusal.has_value()) Must(refusal->status);
    return stream.Vote({1, attempt}, StepVote{}).ToString();
  };
  Kept discarded = left();
  Life life = Live(discarded, {}, [&](Engine& engine) {
    JobDriver driver(engine.FindJob(spec.name).value());
    driver.Reopen(0);
    const std::string of_the_left = vote_of(driver, 0, /*begins=*/false);
    (void)driver.stream(0).Discard({1, 0}).value();
    return absl::StrCat(of_the_left, "; ", vote_of(driver, 1, /*begins=*/true));
  });
  EXPECT_THAT(life.result, testing::StartsWith("OK; FAILED_PRECONDITION: "));
  EXPECT_TRUE(Says(life.result));
  Kept aborted = left();
  life = Live(aborted, {}, [&](Engine& engine) {
    JobDriver driver(engine.FindJob(spec.name).value());
    (void)driver.job().AbortStep().value();
    driver.AttachAll();
    return vote_of(driver, 0, /*begins=*/true);
  });
  EXPECT_THAT(life.result, testing::StartsWith("FAILED_PRECONDITION: "));
  EXPECT_TRUE(Says(life.result));
}

// The last rank's seal and vote come together, and its norm takes time.
TEST_F(JobDeathTest, AVoteIsTakenWhileANormThatWasToldBeforeIsComputedAgain) {
  const JobSpec spec = MakeJobSpec({.group_sizes = {{700, 24}, {600}}, .chunk_elements = 512});
  Kept kept;
  ASSERT_TRUE(Live(kept, {}, [&](Engine& engine) {
                JobDriver driver(engine, spec);
                driver.UploadWeights();
                driver.AttachAll();
                driver.BeginAll();
                driver.SendAll(1, 0, /*final=*/true);
                driver.EndMicroStepAll(0);
                (void)driver.SealWith(0, 1, std::nullopt);
                driver.listener(0).WaitForNorm({1, 0});
                kill(getpid(), SIGKILL);
                return std::string("it did not die");
              }).died);
  const Life life = Live(kept, {}, [&](Engine& engine) {
    JobDriver driver(engine.FindJob(spec.name).value());
    driver.Reopen(0);
    // No norm is computed before the vote is there.
    auto& tasks = const_cast<TaskPool&>(engine.tasks());
    std::promise<void> may_go_on;
    const std::shared_future<void> held = may_go_on.get_future().share();
    std::atomic<int> holding = 0;
    for (int thread = 0; thread < tasks.threads(); ++thread) {
      tasks.Start([&holding, held] {
        ++holding;
        held.wait();
      });
    }
    while (holding < tasks.threads()) std::this_thread::yield();
    (void)driver.SealWith(0, 1, std::nullopt);
    const absl::Status voted = driver.stream(0).Vote({1, 0}, {.apply = false});
    may_go_on.set_value();
    if (!voted.ok()) return voted.ToString();
    driver.listener(0).WaitForCommit(1);
    return absl::StrCat("applied: ", driver.listener(0).outcomes().at(0).decision.apply);
  });
  EXPECT_EQ(life.result, "applied: 0");
}

// Only the directory knows anything of the process before.
TEST_F(JobDeathTest, WithAllThatIsNotInADirectoryIsNotSeen) {
  Training training = Small();
  training.micro_steps = 4;
  const std::set<std::string> kinds =
      DieAtEachStore(training, 0, /*stride=*/3, /*in_directory=*/true);
  ExpectAmong(kinds, {"memory that is not kept yet", "a record's flip", "a ledger's word",
                      "a turn of a sum"});
  DieAtEachStore(training, /*second=*/3, /*stride=*/7, /*in_directory=*/true);
}

// What it had acknowledged, and decided, is not in the memory that is gone.
TEST_F(JobDeathTest, WithTheMemoryThatRanksShareIsNotSeen) {
  Training training = Small();
  training.in_place = true;
  DieAtEachStore(training, 0, /*stride=*/2, /*in_directory=*/true);
}

// In a process of its own, whose threads go with it.
TEST_F(JobDeathTest, IsNotWhatAJobCostsForWhichThereIsNoRoom) {
  const DirectoryInMemory directory;
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  const pid_t child = fork();
  if (child == 0) {
    const auto keeper = StateDirectory::Open({.path = directory.path()}).value();
    keeper->Settle();
    NamedMemory memory(*keeper, [] { return 100'000; });
    Engine engine(
        {.memory_limit_bytes = int64_t{256} << 20, .threads = 2, .named_memory = &memory});
    const std::string refusal = engine.CreateJob(Small().spec).status().ToString();
    if (write(ends[1], refusal.data(), refusal.size()) < 0) abort();
    _exit(0);
  }
  close(ends[1]);
  std::string refusal(512, '\0');
  refusal.resize(std::max<ssize_t>(0, read(ends[0], refusal.data(), refusal.size())));
  close(ends[0]);
  int status = 0;
  waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  EXPECT_THAT(refusal, testing::StartsWith("RESOURCE_EXHAUSTED: "));
  EXPECT_TRUE(Says(refusal));
  const std::filesystem::directory_iterator left(directory.path());
  EXPECT_EQ(std::distance(begin(left), end(left)), 1);  // The superblock.
}

// In the middle of a turn: at the first write to a page, wherever that lies in the planes.
class InTheMiddle : public JobDeathTest, public testing::WithParamInterface<StateFormat> {};
INSTANTIATE_TEST_SUITE_P(Format, InTheMiddle, testing::ValuesIn(kStateFormats),
                         [](const auto& format) { return std::string(Name(format.param)); });

TEST_P(InTheMiddle, OfAnUpdateIsNotSeen) {
  Training training = {.spec = MakeJobSpec({.group_sizes = {{300'000, 30'000}, {100'000}}}),
                       .steps = 4};
  const StateFormat format = GetParam();
  if (format == StateFormat::kFloat32) {
    training.spec.groups[1].hyper_parameters.amsgrad = true;
  } else {
    training.spec.layout.states = {{.format = format}, {.format = format}};
    for (ParameterSpec& parameter : training.spec.layout.parameters) {
      parameter.shape = {parameter.shape[0] / 100, 100};
    }
    for (GroupSpec& group : training.spec.groups) group.hyper_parameters.beta2 = 0.97;
    ASSERT_TRUE(CutInBuckets(1024, training.spec.layout).ok());
  }
  Kept whole;
  const std::string expected = Live(training, whole, {}).result;
  const auto file_of = [](const Kept& kept, absl::string_view end) {
    const auto found = std::find_if(kept.begin(), kept.end(), [end](const auto& named) {
      return absl::EndsWith(named.first, end);
    });
    EXPECT_NE(found, kept.end()) << end;
    return found->second.number();
  };
  const auto lanes_in_use = [&](const Kept& kept) {
    std::vector<RedoLane> lanes(64);
    const ssize_t bytes =
        pread(file_of(kept, "/redo"), lanes.data(), lanes.size() * sizeof(RedoLane), 0);
    lanes.resize(bytes / sizeof(RedoLane));
    return absl::c_count_if(lanes, [](const RedoLane& lane) {
      return lane.word != 0 && RedoWord::Unpack(lane.word).done > 0;
    });
  };
  int in_an_update = 0;
  int in_a_redo = 0;
  constexpr int kPages = kSanitized ? 5 : 20;
  for (const std::string memory : {"/state", "/gradients"}) {
    struct stat facts = {};
    ASSERT_EQ(fstat(file_of(whole, memory), &facts), 0);
    const int64_t pages = facts.st_size / getpagesize();
    ASSERT_GT(pages, 100);
    for (int64_t page = 3; page < pages; page += pages / kPages) {
      SCOPED_TRACE(absl::StrCat("page ", page, " of ", pages, " of ", memory));
      Kept kept;
      const uint64_t lane = 1 + page % 5;
      Life life =
          Live(training, kept,
               {.at_store = lane, .kind = "a lane is taken", .at_page = page, .memory = memory});
      if (life.died) {
        in_an_update += lanes_in_use(kept) > 0 ? 1 : 0;
        // Again at the same page: where the turn is copied once more.
        life = Live(training, kept, {.at_store = 1, .at_page = page, .memory = memory});
        in_a_redo += life.died && lanes_in_use(kept) > 0 ? 1 : 0;
      }
      if (life.died) life = Live(training, kept, {});
      ASSERT_EQ(life.result, expected);
    }
  }
  EXPECT_GE(in_an_update, kPages * 3 / 4);
  EXPECT_GE(in_a_redo, kPages / 2);
}

}  // namespace
}  // namespace ballast
