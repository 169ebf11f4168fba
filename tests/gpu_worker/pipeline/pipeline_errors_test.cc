#include "gpu_worker/pipeline/pipeline_errors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <string>
#include <thread>
#include <vector>

#include "tests/support/messages.h"

namespace ballast::worker {
namespace {

using testing::HasSubstr;

const absl::Status kGone = absl::AbortedError("chunk 3: the service took it back");
const absl::Status kLost = absl::UnavailableError("GPU 0 is lost");

TEST(PipelineErrors, AreNoneAtFirst) {
  PipelineErrors errors([] { FAIL() << "nothing has failed"; });
  EXPECT_TRUE(errors.current().ok());
  EXPECT_TRUE(errors.failure().ok());
  EXPECT_TRUE(errors.FinishStep().ok());
}

TEST(PipelineErrors, AStepsErrorIsTheFirstAndGoesWithTheStep) {
  PipelineErrors errors([] { FAIL() << "an error of the step is no failure"; });
  errors.FailStep(kGone);
  errors.FailStep(absl::UnavailableError("chunk 4: a later one"));
  EXPECT_EQ(errors.current(), kGone);
  EXPECT_TRUE(errors.failure().ok());
  EXPECT_EQ(errors.FinishStep(), kGone);
  EXPECT_TRUE(errors.current().ok());
  EXPECT_TRUE(errors.FinishStep().ok());
}

TEST(PipelineErrors, AFailureIsTheFirstAndStays) {
  int calls = 0;
  PipelineErrors errors([&] { ++calls; });
  errors.Fail(kLost);
  errors.Fail(absl::DeadlineExceededError("what followed"));
  for (int step = 0; step < 2; ++step) {
    errors.FailStep(kGone);
    EXPECT_EQ(errors.current(), kLost);
    EXPECT_EQ(errors.failure(), kLost);
    EXPECT_EQ(errors.FinishStep(), kLost);
  }
  EXPECT_EQ(calls, 1);
}

// In the same step: a backend whose device is lost must not report an error that the next step may
// survive.
TEST(PipelineErrors, AFailureOutranksAnErrorOfTheStepAndTellsIt) {
  PipelineErrors errors([] {});
  errors.FailStep(kGone);
  errors.Fail(kLost);
  for (const absl::Status& status : {errors.current(), errors.failure(), errors.FinishStep(),
                                     errors.current(), errors.FinishStep()}) {
    EXPECT_TRUE(Refused(status, kLost.code()));
  }
}

TEST(PipelineErrors, AnErrorOfAFinishedStepIsNoPartOfAFailure) {
  PipelineErrors errors([] {});
  errors.FailStep(kGone);
  EXPECT_EQ(errors.FinishStep(), kGone);
  errors.Fail(kLost);
  EXPECT_EQ(errors.FinishStep(), kLost);
}

TEST(PipelineErrors, WhoIsCalledFindsTheFailureAndNoLock) {
  PipelineErrors* self = nullptr;
  absl::Status found;
  PipelineErrors errors([&] {
    found = self->failure();
    self->FailStep(kGone);
    self->Fail(absl::InternalError("what followed the stop"));
  });
  self = &errors;
  errors.Fail(kLost);
  EXPECT_EQ(found, kLost);
  EXPECT_EQ(errors.current(), kLost);
}

// Threads that fail at once, and one that finishes step after step among them: one failure is
// reported, once, and from then on every call returns it.
TEST(PipelineErrors, ManyThreadsAgreeOnOneFailure) {
  constexpr int kThreads = 4;
  for (int round = 0; round < 50; ++round) {
    std::atomic<int> calls = 0;
    std::atomic<int> ready = 0;
    PipelineErrors errors([&] { ++calls; });
    const auto all_ready = [&] {
      ++ready;
      while (ready <= kThreads) std::this_thread::yield();
    };
    std::vector<std::thread> threads;
    std::vector<absl::Status> returned(kThreads);
    for (int i = 0; i < kThreads; ++i) {
      threads.emplace_back([&, i] {
        all_ready();
        errors.FailStep(absl::AbortedError("a step's"));
        errors.Fail(absl::UnavailableError("thread " + std::to_string(i)));
        returned[i] = errors.current();
      });
    }
    all_ready();
    absl::Status last;
    while (last.ok() || absl::IsAborted(last)) {
      const absl::Status failure = errors.failure();
      last = errors.FinishStep();
      if (!failure.ok()) EXPECT_EQ(last, failure);
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(calls, 1);
    EXPECT_THAT(last.message(), HasSubstr("thread "));
    for (const absl::Status& status : returned) EXPECT_EQ(status, last);
    EXPECT_EQ(errors.FinishStep(), last);
  }
}

}  // namespace
}  // namespace ballast::worker
