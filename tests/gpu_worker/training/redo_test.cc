// Steps that the service takes back in mid-run: all ranks do them again, and end with the bits of a
// undisturbed run.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <thread>
#include <utility>

#include "cpu_optimizer_service/common/reason.h"
#include "gpu_worker/run/loss_log.h"
#include "tests/gpu_worker/training/meddling_optimizer.h"
#include "tests/gpu_worker/training/training.h"
#include "tests/support/messages.h"

namespace ballast::worker {
namespace {

using testing::ElementsAre;

std::vector<uint64_t> StepsOf(const std::vector<StepReport>& reports) {
  std::vector<uint64_t> steps;
  for (const StepReport& report : reports) steps.push_back(report.step);
  return steps;
}

const Result& Undisturbed(Accumulation accumulation = Accumulation::kService) {
  static const auto train = [](Accumulation how) {
    return Train({.world_size = 2, .accumulation = how}, MakeLocalOptimizer);
  };
  static const Result in_service = train(Accumulation::kService);
  static const Result on_worker = train(Accumulation::kWorker);
  return accumulation == Accumulation::kService ? in_service : on_worker;
}

// An operator's `ballast abort-step`. Refused where no step is open, or it is decided.
absl::Status Abort(Service& service) {
  const absl::Status status = service.job()->AbortStep().status();
  EXPECT_TRUE(status.ok() || absl::IsFailedPrecondition(status)) << status;
  return absl::OkStatus();
}

// Raises the generation and changes nothing else, once what is decided is committed.
void RaiseGeneration(Service& service) {
  const TempPath checkpoint("checkpoint");
  EXPECT_TRUE(service.job()->Save(checkpoint.str()).ok());
  EXPECT_TRUE(service.job()->Load(checkpoint.str()).ok());
}

void AwaitSealed(Service& service, int rank) {
  while (!service.job()->Status().ranks[rank].sealed) std::this_thread::yield();
}
void AwaitBegun(Service& service, int rank) {
  while (!service.job()->Status().ranks[rank].begun) std::this_thread::yield();
}

class Redo : public testing::TestWithParam<Instant> {};

// Instants at which the step is open on both ranks: the abort takes.
INSTANTIATE_TEST_SUITE_P(
    Instants, Redo,
    testing::Values(Instant{.verb = Verb::kBegin, .when = When::kAfter, .rank = 1, .step = 1},
                    Instant{.verb = Verb::kPush, .when = When::kBefore, .rank = 0, .step = 2},
                    Instant{.verb = Verb::kPush, .when = When::kAfter, .rank = 1, .step = 2},
                    Instant{.verb = Verb::kPush, .rank = 0, .step = 3, .index = 5},
                    Instant{.verb = Verb::kEndMicroStep, .rank = 1, .step = 4},
                    Instant{.verb = Verb::kEndMicroStep, .rank = 0, .step = 4},
                    Instant{.verb = Verb::kSeal, .rank = 1, .step = 5},
                    Instant{.verb = Verb::kSeal, .rank = 0, .step = 6}),
    [](const auto& info) { return "Instant" + std::to_string(info.index); });

TEST_P(Redo, AnAbortedStepIsDoneAgainByAllRanks) {
  for (const Accumulation accumulation : {Accumulation::kService, Accumulation::kWorker}) {
    for (const client::SharedMemoryUse use :
         {client::SharedMemoryUse::kNever, client::SharedMemoryUse::kAuto}) {
      Service service(use);
      const auto abort = [&] {
        AwaitBegun(service, GetParam().rank);  // The verbs before have only been sent.
        return Abort(service);
      };
      const Result result = Train({.world_size = 2, .accumulation = accumulation},
                                  Meddling(service.Optimizer(), OnceAt(GetParam(), abort)));
      ExpectSame(result, Undisturbed(accumulation));
      EXPECT_EQ(service.job()->Status().generation, Generation(2));
      EXPECT_EQ(service.job()->Status().coverage_complete_steps, 6);
    }
  }
}

// The worker goes back to the step's begin, with its data and learning rate.
TEST(Undo, OfACommittedStepIsFollowedByTheSameStepAgain) {
  const Result undisturbed = Train({.world_size = 1}, MakeLocalOptimizer);
  for (const UpdateMode mode : {UpdateMode::kWait, UpdateMode::kSpeculate}) {
    Service service;
    bool undone = false;
    const Result result = Train({.world_size = 1, .update_mode = mode, .keep_previous = true},
                                service.Optimizer(), [&](const StepReport& report) {
                                  if (report.step != 3 || std::exchange(undone, true)) return;
                                  EXPECT_EQ(service.job()->UndoStep().value(), 3u);
                                });
    EXPECT_TRUE(result.weights == undisturbed.weights) << "the final weights differ";
    EXPECT_THAT(StepsOf(result.reports), ElementsAre(1, 2, 3, 3, 4, 5, 6));
    EXPECT_EQ(service.job()->Status().generation, Generation(2));
    EXPECT_EQ(service.job()->Status().committed_step, 6u);
  }
}

// The ranks meet in the service then, not in a collective.
TEST(FirstWeights, AreGivenAgainWhenTheGenerationRisesBeforeAllHaveCome) {
  Service service(client::SharedMemoryUse::kAuto);
  std::atomic<bool> rank_1_uploads = false;
  RunRanks(2, [&](Collective& collective) {
    WorkerOptions options = OptionsOf({.world_size = 2});
    options.job.world_size = 2;
    const TrainingJob job = MakeTrainingJob(GptParameters(options.model), options.job).value();
    const auto backend = MakeCpuBackend(options, job, collective).value();
    const auto optimizer = service.Optimizer()(job, *backend, collective).value();
    if (collective.rank() == 1) {
      EXPECT_TRUE(optimizer->Join([&](int, absl::Span<float>) { rank_1_uploads = true; }).ok());
      return;
    }
    // Two strangers take rank 0, one from the other, while rank 1 waits for its weights.
    const auto take = [&](const std::string& process_id) {
      return client::Session::Open(
          service.channel(), {.job = job.spec, .rank = 0, .process_id = process_id, .weights = {}});
    };
    const auto first = take("a");
    ASSERT_TRUE(first.ok()) << first.status();
    while (!rank_1_uploads) std::this_thread::yield();
    const auto second = take("b");
    ASSERT_TRUE(second.ok()) << second.status();
    EXPECT_TRUE(optimizer->Join([](int, absl::Span<float>) {}).ok());
  });
  EXPECT_GE(service.job()->Status().generation, Generation(2));
}

TEST(RedoneStep, GradientsOfARankThatJoinsAgainLieInItsNewMemory) {
  Service service(client::SharedMemoryUse::kAuto);
  const Result result = Train(
      {.world_size = 2},
      Meddling(service.Optimizer(),
               OnceAt({.verb = Verb::kSeal, .rank = 1, .step = 3}, [&] { return Abort(service); }),
               /*fresh_memory=*/true));
  ExpectSame(result, Undisturbed());
}

TEST(RedoneStep, ARankThatJoinsAgainSharesMemoryAgain) {
  Service service(client::SharedMemoryUse::kAuto);
  const Result result = Train(
      {.world_size = 2},
      Meddling(service.Optimizer(),
               OnceAt({.verb = Verb::kSeal, .rank = 1, .step = 3}, [&] { return Abort(service); })),
      [&](const StepReport& report) {
        for (const RankProgress& rank : service.job()->Status().ranks) {
          EXPECT_TRUE(rank.shared_memory) << "after step " << report.step;
        }
      });
  ExpectSame(result, Undisturbed());
}

TEST(RedoneStep, ARankThatWaitsInItsSealIsTold) {
  Service service;
  const Result result =
      Train({.world_size = 2},
            Meddling(service.Optimizer(), OnceAt({.verb = Verb::kSeal, .rank = 1, .step = 3}, [&] {
                       AwaitSealed(service, 0);
                       return Abort(service);
                     })));
  ExpectSame(result, Undisturbed());
}

TEST(RedoneStep, AbortsAtEveryStepAndBetweenStepsChangeNothing) {
  for (const client::SharedMemoryUse use :
       {client::SharedMemoryUse::kNever, client::SharedMemoryUse::kAuto}) {
    Service service(use);
    std::atomic<int> calls{0};
    const Result result =
        Train({.world_size = 2}, Meddling(service.Optimizer(), [&](const Instant& instant) {
                // Some of these hit the joining of a rank, some nothing at all.
                if (++calls % 301 == 0) return Abort(service);
                return absl::OkStatus();
              }));
    ExpectSame(result, Undisturbed());
    EXPECT_GT(service.job()->Status().generation, Generation(3));
  }
}

TEST(RedoneStep, AProcessWhoseRankWasTakenEndsAndSoDoItsPeers) {
  for (const int rank : {0, 1}) {
    Service service;
    const Result result = TrainUntilItEnds(
        {.world_size = 2},
        Meddling(service.Optimizer(),
                 OnceAt({.verb = Verb::kPush, .rank = 0, .step = 3, .index = 3}, [&] {
                   return service.job()->Attach({.rank = rank, .process_id = "another"}).status();
                 })));
    EXPECT_TRUE(Refused(result.statuses[rank], absl::StatusCode::kFailedPrecondition,
                        reason::kRankReplaced));
    EXPECT_FALSE(result.statuses[1 - rank].ok());
    EXPECT_EQ(service.job()->Status().committed_step, 2);
  }
}

// A rank may not be notified of a step's end although the step is committed.
TEST(RedoneStep, ACommittedStepIsNotDoneAgain) {
  for (const Verb verb : {Verb::kSeal, Verb::kReceive}) {
    for (const int rank : {0, 1}) {
      Service service;
      const Result result =
          Train({.world_size = 2},
                Meddling(service.Optimizer(),
                         OnceAt({.verb = verb, .when = When::kAfter, .rank = rank, .step = 3}, [&] {
                           RaiseGeneration(service);
                           return absl::AbortedError("the stream has ended");
                         })));
      ExpectSame(result, Undisturbed());
      EXPECT_EQ(service.job()->Status().applied_steps, 6);
    }
  }
}

TEST(RedoneStep, ACommittedStepThatNoRankHeardOfHasItsLossAndNoNorm) {
  Service service;
  const Result result =
      Train({.world_size = 2}, Meddling(service.Optimizer(), [&](const Instant& instant) {
              if (instant.verb != Verb::kSeal || instant.when == When::kBefore ||
                  instant.step != 3 || service.job()->Status().generation > Generation(1)) {
                return absl::OkStatus();
              }
              if (instant.rank == 0) {
                while (service.job()->Status().committed_step < 3) std::this_thread::yield();
              }
              return absl::Status(absl::AbortedError("the stream has ended"));
            }));
  EXPECT_TRUE(result.weights == Undisturbed().weights);
  EXPECT_THAT(StepsOf(result.reports), ElementsAre(1, 2, 3, 4, 5, 6));
  EXPECT_EQ(result.reports[2].loss, Undisturbed().reports[2].loss);
  EXPECT_TRUE(result.reports[2].applied);
  EXPECT_TRUE(std::isnan(result.reports[2].norm));
}

TEST(RedoneStep, ALoadedCheckpointIsGoneOnFrom) {
  Service first;
  const TempPath checkpoint("checkpoint"), out("out");
  Train({.world_size = 2, .steps = 3, .save = checkpoint.str()}, first.Optimizer());
  for (const Instant at :
       {Instant{.verb = Verb::kPush, .rank = 0, .step = 5, .index = 2},
        Instant{.verb = Verb::kSeal, .when = When::kBefore, .rank = 1, .step = 5},
        Instant{.verb = Verb::kReceive, .when = When::kAfter, .rank = 1, .step = 5}}) {
    Service service;
    const Result result = Train({.world_size = 2, .out = out.str()},
                                Meddling(service.Optimizer(), OnceAt(at, [&] {
                                           const auto loaded =
                                               service.job()->Load(checkpoint.str());
                                           EXPECT_TRUE(loaded.ok()) << loaded.status();
                                           return absl::OkStatus();
                                         })));
    EXPECT_TRUE(result.weights == Undisturbed().weights);
    const std::vector<uint64_t> steps = StepsOf(result.reports);
    ASSERT_GE(steps.size(), 7);
    EXPECT_THAT(std::vector(steps.end() - 3, steps.end()), ElementsAre(4, 5, 6));
    // The file has each step once.
    EXPECT_THAT(StepsOf(ParseLossesCsv(ReadAll(out.str() + "/losses.csv"))),
                ElementsAre(1, 2, 3, 4, 5, 6));
  }
}

// A checkpoint of the very step that is in progress.
TEST(RedoneStep, AStepThatALoadBroughtAndNobodySealedIsNotReported) {
  Service first, service;
  const TempPath checkpoint("checkpoint");
  Train({.world_size = 2, .steps = 3, .save = checkpoint.str()}, first.Optimizer());
  const auto load = [&] {
    EXPECT_TRUE(service.job()->Load(checkpoint.str()).ok());
    return absl::OkStatus();
  };
  const Result result = Train(
      {.world_size = 2},
      Meddling(service.Optimizer(), OnceAt({.verb = Verb::kPush, .rank = 0, .step = 3}, load)));
  EXPECT_TRUE(result.weights == Undisturbed().weights);
  EXPECT_THAT(StepsOf(result.reports), ElementsAre(1, 2, 4, 5, 6));
}

TEST(RedoneStep, ALoadBeyondTheLastStepEndsTheRun) {
  Service first, service;
  const TempPath checkpoint("checkpoint");
  Train({.world_size = 2, .steps = 3, .save = checkpoint.str()}, first.Optimizer());
  const auto load = [&] {
    EXPECT_TRUE(service.job()->Load(checkpoint.str()).ok());
    return absl::OkStatus();
  };
  const Result result = TrainUntilItEnds(
      {.world_size = 2, .steps = 2},
      Meddling(service.Optimizer(), OnceAt({.verb = Verb::kPush, .rank = 0, .step = 2}, load)));
  for (const absl::Status& status : result.statuses) {
    EXPECT_TRUE(Refused(status, absl::StatusCode::kFailedPrecondition));
  }
}

// Their steps differ in their number of micro-steps: ranks at different ones would not fit each
// other.
TEST(RedoneStep, RanksBetweenWhoseJoinsACheckpointIsLoadedJoinUntilTheyStandTogether) {
  const Training training{.world_size = 2,
                          .micro_steps_of_step = [](uint64_t step) { return 1 + step % 2; }};
  Service first, service;
  const TempPath checkpoint("checkpoint");
  Training saving = training;
  saving.steps = 3;
  saving.save = checkpoint.str();
  Train(saving, first.Optimizer());
  std::atomic<bool> aborted{false}, loaded{false};
  const Result result =
      Train(training, Meddling(service.Optimizer(), [&](const Instant& instant) {
              if (instant == Instant{.verb = Verb::kSeal, .rank = 1, .step = 3} &&
                  !aborted.exchange(true)) {
                return Abort(service);
              }
              if (instant.verb != Verb::kJoin || !aborted) return absl::OkStatus();
              if (instant.rank == 0 && instant.when == When::kAfter && !loaded) {
                EXPECT_TRUE(service.job()->Load(checkpoint.str()).ok());  // To step 3, not 2.
                loaded = true;
              }
              while (instant.rank == 1 && !loaded) std::this_thread::yield();
              return absl::OkStatus();
            }));
  EXPECT_TRUE(result.weights == Train(training, MakeLocalOptimizer).weights);
  EXPECT_TRUE(loaded);
}

TEST(RedoneStep, AStepThatIsAbortedEveryTimeEndsTheRun) {
  Service service;
  const Result result = TrainUntilItEnds(
      {.world_size = 2}, Meddling(service.Optimizer(), [&](const Instant& instant) {
        return instant == Instant{.verb = Verb::kSeal, .rank = 1, .step = 2} ? Abort(service)
                                                                             : absl::OkStatus();
      }));
  for (const absl::Status& status : result.statuses) {  // A rank may hear of it by the other one.
    EXPECT_EQ(status.code(), absl::StatusCode::kAborted);
    EXPECT_THAT(status.message(), testing::StartsWith("step 2 was aborted 100 times in a row"));
  }
}

TEST(RedoneStep, AJobThatWasClosedIsNotMadeAnew) {
  Service service;
  const Result result = TrainUntilItEnds(
      {.world_size = 2},
      Meddling(service.Optimizer(), OnceAt({.verb = Verb::kSeal, .rank = 1, .step = 2},
                                           [&] { return service.engine().CloseJob("gpt"); })));
  // One returns the reason; the other may only notice the loss of the first.
  EXPECT_TRUE(absl::IsFailedPrecondition(result.statuses[0]) ||
              absl::IsFailedPrecondition(result.statuses[1]));
  for (const absl::Status& status : result.statuses) {
    EXPECT_FALSE(status.ok());
  }
  EXPECT_FALSE(service.engine().FindJob("gpt").ok());
}

TEST(SealTimeout, EndsTheWorkerNamingWhoHasNotSealed) {
  for (absl::Duration limit = absl::Seconds(3);; limit *= 4) {
    Service service;
    std::atomic<bool> gave_up{false};
    const Result result = TrainUntilItEnds(
        {.world_size = 2}, Meddling(service.Optimizer("", limit), [&](const Instant& instant) {
          if (instant.step != 2 || instant.verb != Verb::kSeal) return absl::OkStatus();
          if (instant.rank == 0 && instant.when == When::kAfter) gave_up = true;
          while (instant.rank == 1 && !gave_up) std::this_thread::yield();
          return absl::OkStatus();
        }));
    // On a busy machine step 1 may take longer.
    if (!gave_up && limit < absl::Seconds(40)) continue;
    EXPECT_EQ(result.statuses[0].code(), absl::StatusCode::kDeadlineExceeded);
    EXPECT_THAT(result.statuses[0].message(), testing::HasSubstr("rank 1"));
    // Rank 1's late seal is good: the step is committed, and only then it finds itself alone.
    EXPECT_FALSE(result.statuses[1].ok());
    EXPECT_EQ(service.job()->Status().committed_step, 2);
    return;
  }
}

}  // namespace
}  // namespace ballast::worker
