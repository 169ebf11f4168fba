// Memory that ranks share with the service: gradients read and weights written in place, and for
// how long.
#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "tests/cpu_optimizer_service/job/job_driver.h"
#include "tests/support/eventually.h"
#include "tests/support/messages.h"

namespace ballast {
namespace {

class RankMemoryTest : public JobDriverTest {
 protected:
  // Two ranks with two chunks each; what the job is compared with has none in common with them.
  RankMemoryTest() : driver_(Start("shared", Sending::kInPlace)), plain_(Start("plain", {})) {}

  JobDriver Start(const std::string& name, Sending sending, UpdateMode mode = UpdateMode::kWait) {
    JobSpec spec = MakeJobSpec({.group_sizes = {{1024, 1024, 2048}},
                                .world_size = 2,
                                .bucket_elements = 2048,
                                .chunk_elements = 1024},
                               name);
    spec.update_mode = mode;
    JobDriver driver(engine_, spec);
    driver.UploadWeights();
    driver.SetSending(sending);
    driver.AttachAll();
    return driver;
  }
  static std::vector<std::byte> Read(JobDriver& driver, int chunk) {
    const JobStatus status = driver.job().Status();
    std::vector<std::byte> bytes(driver.layout().chunks()[chunk].elements * 2);
    const auto out = absl::MakeSpan(bytes);
    EXPECT_TRUE(driver.job().ReadShard(status.generation, status.committed_step, chunk, out).ok());
    return bytes;
  }
  // Every rank's memory has the committed weights of its chunks.
  static void ExpectWeightsInPlace(JobDriver& driver) {
    for (int chunk = 0; chunk < static_cast<int>(driver.layout().chunks().size()); ++chunk) {
      const auto place = driver.memory(driver.layout().chunks()[chunk].rank).weights(chunk);
      EXPECT_EQ(std::vector<std::byte>(place.begin(), place.end()), Read(driver, chunk)) << chunk;
    }
  }
  void FinishBoth() {
    for (JobDriver* driver : {&driver_, &plain_}) {
      driver->EndMicroStepAll(0);
      driver->SealAll(1);
    }
    EXPECT_EQ(driver_.job().StateHash(), plain_.job().StateHash());
  }

  JobDriver driver_;
  JobDriver plain_;
};

TEST_F(RankMemoryTest, AFinalFirstContributionIsReadWhereItLies) {
  for (JobDriver* driver : {&driver_, &plain_}) {
    driver->BeginAll();
    for (int chunk = 0; chunk < 4; ++chunk) {
      ASSERT_TRUE(driver->Send(chunk, driver->Values(chunk, 7), 0, /*final=*/true).ok());
    }
  }
  // Against the rule, and only to see what is read. What a copy was made of would not change.
  const std::vector<std::byte> others = driver_.Encode(0, driver_.Values(0, 8));
  ASSERT_TRUE(Eventually([&] { return driver_.job().Status().ranks[0].chunks_complete == 2; }));
  driver_.memory(0).ScribbleGradient(0, others);
  for (JobDriver* driver : {&driver_, &plain_}) {
    driver->EndMicroStepAll(0);
    driver->SealAll(1);
  }
  EXPECT_NE(Read(driver_, 0), Read(plain_, 0));
  for (const int chunk : {1, 2, 3}) EXPECT_EQ(Read(driver_, chunk), Read(plain_, chunk));
}

TEST_F(RankMemoryTest, ContributionsThatCannotBeAreRefused) {
  driver_.BeginAll();
  plain_.BeginAll();
  const std::vector<std::byte> payload(2048);
  const absl::Span<const std::byte> piece(payload);
  Contribution given = {.step = 1, .chunk = 0, .final = true, .in_place = true};
  EXPECT_EQ(plain_.stream(0).Contribute(given).status().code(),
            absl::StatusCode::kFailedPrecondition);
  given.payload = {&piece, 1};
  EXPECT_EQ(driver_.stream(0).Contribute(given).status().code(),
            absl::StatusCode::kInvalidArgument);
  given.payload = {};
  given.empty = true;
  EXPECT_EQ(driver_.stream(0).Contribute(given).status().code(),
            absl::StatusCode::kInvalidArgument);
  given.empty = false;
  given.chunk = driver_.layout().chunks_of_rank(1).front();
  EXPECT_EQ(driver_.stream(0).Contribute(given).status().code(),
            absl::StatusCode::kInvalidArgument);
  // None of it has been counted.
  EXPECT_EQ(driver_.job().Status().ranks[0].furthest_micro_step, 0u);
  driver_.SendAll(1, 0, true);
  plain_.SendAll(1, 0, true);
  FinishBoth();
}

TEST_F(RankMemoryTest, AStreamForWeightsInPlaceNeedsMemoryAndDisturbsNothingWithout) {
  const auto open = [&](JobDriver& driver) {
    return driver.job()
        .OpenStream({.uid = driver.job().uid(),
                     .rank = 0,
                     .process_id = "process0",
                     .generation = driver.job().Status().generation,
                     .weights_in_place = true},
                    std::make_shared<RecordingListener>())
        .status();
  };
  EXPECT_EQ(open(plain_).code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_TRUE(plain_.listener(0).detached().ok());
  EXPECT_TRUE(open(driver_).ok());
}

TEST_F(RankMemoryTest, OnlyTheHolderIsGivenMemoryAndNotInMidStep) {
  EXPECT_EQ(driver_.GiveMemory(0, "another", 1).code(), absl::StatusCode::kAborted);
  EXPECT_EQ(driver_.GiveMemory(0, "process0", 2).code(), absl::StatusCode::kAborted);
  driver_.BeginAll();
  EXPECT_EQ(driver_.GiveMemory(0, "process0", 1).code(), absl::StatusCode::kFailedPrecondition);
  driver_.SendAll(1, 0, true);
  plain_.BeginAll();
  plain_.SendAll(1, 0, true);
  FinishBoth();
  const auto before = driver_.TakeMemory(0);
  EXPECT_FALSE(before.expired());
  EXPECT_TRUE(driver_.GiveMemory(0, "process0", 1).ok());
  EXPECT_TRUE(Eventually([&] { return before.expired(); }));
  driver_.Step(2);
  plain_.Step(2);
  EXPECT_EQ(driver_.job().StateHash(), plain_.job().StateHash());
}

TEST_F(RankMemoryTest, WhatAnotherStreamWasToldElsewhereIsInPlaceAfterTheDecision) {
  JobDriver speculating = Start("speculating", Sending::kPayload, UpdateMode::kSpeculate);
  for (const int rank : {0, 1}) {
    ASSERT_TRUE(speculating.GiveMemory(rank, "process" + std::to_string(rank), 1).ok());
  }
  speculating.BeginAll();
  speculating.SendAll(5, 0, /*final=*/true);
  for (const int rank : {0, 1}) speculating.listener(rank).WaitForProvisional(2);
  speculating.SetSending(Sending::kInPlace);
  for (const int rank : {0, 1}) speculating.Reopen(rank);
  speculating.EndMicroStepAll(0);
  speculating.SealAll(1);
  EXPECT_EQ(speculating.job().Status().speculation.published, 4);
  for (const int rank : {0, 1}) EXPECT_EQ(speculating.listener(rank).in_place(), 2);
  ExpectWeightsInPlace(speculating);
}

TEST_F(RankMemoryTest, ClosingTheJobLetsGoOfIt) {
  driver_.BeginAll();
  driver_.SendAll(3, 0, /*final=*/true);
  const auto memory = driver_.TakeMemory(0);
  ASSERT_TRUE(engine_.CloseJob("shared").ok());
  EXPECT_TRUE(memory.expired());
}

TEST_F(RankMemoryTest, IsAdmittedAndTold) {
  const int64_t used = engine_.memory().used_bytes();
  {
    auto reservation = driver_.job().ReserveRankMemory(0);
    ASSERT_TRUE(reservation.ok());
    // Two chunks of 1024 elements, gradients and weights: 4096 bytes each.
    EXPECT_EQ(reservation->bytes(), 8192);
    EXPECT_EQ(engine_.memory().used_bytes(), used + 8192);
    EXPECT_EQ(driver_.job().Status().rank_memory_bytes, 2 * 8192);
    EXPECT_EQ(plain_.job().Status().rank_memory_bytes, 0);
  }
  EXPECT_EQ(engine_.memory().used_bytes(), used);
  Engine small({.memory_limit_bytes = 400 << 10, .threads = 1});
  JobSpec spec = driver_.job().spec();
  spec.name = "small";
  const auto job = small.CreateJob(spec).value();
  std::vector<MemoryBudget::Reservation> all;
  absl::Status status;
  while (status.ok() && all.size() < 100) {
    auto reservation = job->ReserveRankMemory(0);
    status = reservation.status();
    if (status.ok()) all.push_back(*std::move(reservation));
  }
  EXPECT_TRUE(Refused(status, absl::StatusCode::kResourceExhausted));
}

TEST_F(RankMemoryTest, WhatARankWritesMeanwhileSpoilsOnlyItsOwnJob) {
  driver_.Step(1);
  plain_.Step(1);
  driver_.BeginAll();
  driver_.SendAll(2, 0, /*final=*/true);
  for (int chunk = 0; chunk < 4; ++chunk) {  // Before, while or after the sums are taken.
    driver_.memory(driver_.layout().chunks()[chunk].rank)
        .ScribbleGradient(chunk, std::vector<std::byte>(2048, std::byte{0xff}));
  }
  plain_.Step(2);
  driver_.EndMicroStepAll(0);
  driver_.SealAll(1);
  driver_.Step(3);
  JobDriver alone = Start("alone", Sending::kPayload);
  alone.Step(1);
  alone.Step(2);
  EXPECT_EQ(plain_.job().StateHash(), alone.job().StateHash());
}

// Whether sums are queued, running or done: after the abort nobody reads what was shared.
TEST_F(RankMemoryTest, StepsAreAbortedWhileTheirSumsAreTaken) {
  Engine engine({.memory_limit_bytes = int64_t{64} << 20, .threads = 2});
  JobSpec spec = MakeJobSpec({.group_sizes = {{64 * 4096}},
                              .world_size = 1,
                              .bucket_elements = 1 << 20,
                              .chunk_elements = 4096},
                             "aborted");
  spec.update_mode = UpdateMode::kSpeculate;
  JobDriver driver(engine, spec);
  driver.UploadWeights();
  driver.SetSending(Sending::kInPlace);
  driver.Attach(0);
  for (int turn = 0; turn < 30; ++turn) {
    driver.BeginAll();
    driver.SendAll(turn, 0, /*final=*/true);
    const auto memory = driver.TakeMemory(0);
    ASSERT_TRUE(driver.job().AbortStep().ok());
    driver.Attach(0);
    if (turn % 3 == 0) driver.Step(turn);
  }
  spec.name = "plain";
  JobDriver plain(engine, spec);
  plain.UploadWeights();
  plain.Attach(0);
  for (int turn = 0; turn < 30; turn += 3) plain.Step(turn);
  EXPECT_EQ(driver.job().StateHash(), plain.job().StateHash());
  EXPECT_EQ(driver.job().Status().applied_steps, 10u);
}

TEST_F(RankMemoryTest, TwoJobsShareOneThread) {
  for (const UpdateMode mode : {UpdateMode::kWait, UpdateMode::kSpeculate}) {
    Engine engine({.memory_limit_bytes = int64_t{64} << 20, .threads = 1});
    JobSpec spec = driver_.job().spec();
    spec.update_mode = mode;
    std::vector<std::unique_ptr<JobDriver>> drivers;
    for (const char* name : {"first", "second"}) {
      spec.name = name;
      drivers.push_back(std::make_unique<JobDriver>(engine, spec));
      drivers.back()->UploadWeights();
      drivers.back()->SetSending(Sending::kInPlace);
      drivers.back()->AttachAll();
    }
    for (uint64_t step = 1; step < 4; ++step) {
      // Not final, so that the decisions compute the sums, or final, so that tasks do.
      const bool final = step % 2 == 0;
      for (const auto& driver : drivers) driver->BeginAll();
      for (const auto& driver : drivers) driver->SendAll(step, 0, final);
      for (const auto& driver : drivers) driver->EndMicroStepAll(0);
      for (const auto& driver : drivers) {
        for (const int rank : {0, 1}) EXPECT_FALSE(driver->stream(rank).Seal(step, 1)->has_value());
      }
      for (const auto& driver : drivers) driver->listener(0).WaitForCommit(step);
    }
    EXPECT_EQ(drivers[0]->job().StateHash(), drivers[1]->job().StateHash());
  }
}

}  // namespace
}  // namespace ballast
