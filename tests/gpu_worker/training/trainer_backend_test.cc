// The trainer over a backend that calls its sink from a thread of its own while the trainer goes
// on, and an optimizer that takes steps back: neither does any arithmetic.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gpu_worker/collective/single_collective.h"
#include "gpu_worker/training/trainer.h"
#include "tests/gpu_worker/pipeline/one_shot_event.h"
#include "tests/support/messages.h"

namespace ballast::worker {
namespace {

using testing::ElementsAre;

constexpr int kChunks = 8;
constexpr int kContext = 8;

// Hands over a micro-step's chunks on a thread that a step's FinishStep waits for; what is out is
// released by the next FinishStep but one, as a ring of slots would wait for it.
class ThreadedBackend final : public TrainingBackend {
 public:
  ~ThreadedBackend() override { Join(); }

  void Start(GradientSink& sink) override { sink_ = &sink; }
  absl::Status UseGradientMemory(
      const std::function<absl::Span<std::byte>(int chunk)>& memory) override {
    EXPECT_EQ(out_, 0) << "a payload is out";
    memory_ = memory(0);
    return absl::OkStatus();
  }
  absl::Status PrepareBatch(const Batch& batch) override {
    // This step's passes are given, and not waited for.
    prepared_.push_back(batch.inputs);
    micro_steps_when_prepared_.push_back(micro_steps_);
    return absl::OkStatus();
  }
  absl::Status MicroStep(const MicroStepInput& input) override {
    if (input.micro_step == 0) first_batches_.push_back(input.batch.inputs);
    Join();
    if (fail_at_step_ == input.step) return absl::UnavailableError("the GPU is lost");
    ++micro_steps_;
    thread_ = std::thread([this, m = input.micro_step, of = input.micro_steps] {
      for (int chunk = 0; chunk < kChunks && status_.ok(); ++chunk) {
        ++out_;
        status_ = sink_->Push({.chunk = chunk,
                               .micro_step_begin = m,
                               .micro_step_end = m + 1,
                               .final = m + 1 == of,
                               .payload = {},
                               .released = [this] { --out_; }});
      }
      if (status_.ok()) status_ = sink_->EndMicroStep(m, {});
    });
    return absl::OkStatus();
  }
  absl::StatusOr<FinishedStep> FinishStep() override {
    Join();
    ++finished_;
    const absl::Status status = std::exchange(status_, absl::OkStatus());
    if (!status.ok()) return status;
    return FinishedStep{.loss_sum = 4.0 * std::exchange(micro_steps_, 0),
                        .compute_seconds = 3,
                        .reduce_seconds = 2,
                        .send_seconds = 1,
                        .weights_seconds = weights_seconds_,
                        .idle_seconds = idle_seconds_};
  }
  absl::Span<std::byte> weights(int chunk) override { return {}; }
  absl::Status GatherWeights() override {
    ++gathers_;
    Note("gather");
    return absl::OkStatus();
  }
  absl::Status ReadWeights(int group, absl::Span<std::byte> to) override {
    return absl::UnimplementedError("not read here");
  }

  // Where it gathers ahead: what was asked of it, as "expect", "forward 2", "abandon", "gather".
  bool gathers_ahead() const override { return ahead_; }
  absl::Status ExpectWeights() override {
    Note("expect");
    return absl::OkStatus();
  }
  absl::Status StartForward(const MicroStepInput& input) override {
    EXPECT_EQ(input.micro_step, 0u);
    EXPECT_EQ(input.batch.sequences, 2);
    Note(absl::StrCat("forward ", input.step));
    if (under_forward_) under_forward_();
    return absl::OkStatus();
  }
  void AbandonWeights() override { Note("abandon"); }

  void GatherAhead(std::function<void()> under_forward = nullptr) {
    ahead_ = true;
    under_forward_ = std::move(under_forward);
  }
  std::vector<std::string> TakeAsked() {
    const std::lock_guard lock(mutex_);
    return std::exchange(asked_, {});
  }
  void FailAt(uint64_t step) { fail_at_step_ = step; }
  void Idle(double seconds) { idle_seconds_ = seconds; }
  void WaitForWeights(double seconds) { weights_seconds_ = seconds; }
  // Inputs of the first batch of each step that began, and of those prepared.
  const std::vector<std::vector<int32_t>>& first_batches() const { return first_batches_; }
  const std::vector<std::vector<int32_t>>& prepared() const { return prepared_; }
  const std::vector<int>& micro_steps_when_prepared() const { return micro_steps_when_prepared_; }
  int out() const { return out_; }
  absl::Span<std::byte> memory() const { return memory_; }
  int finished() const { return finished_; }
  int gathers() const { return gathers_; }

 private:
  void Join() {
    if (thread_.joinable()) thread_.join();
  }
  void Note(std::string what) {
    const std::lock_guard lock(mutex_);
    if (ahead_) asked_.push_back(std::move(what));
  }

  bool ahead_ = false;
  std::function<void()> under_forward_;
  std::mutex mutex_;
  std::vector<std::string> asked_;

  GradientSink* sink_ = nullptr;
  std::thread thread_;
  absl::Status status_;  // The thread's while it runs.
  std::atomic<int> out_{0};
  double idle_seconds_ = 0;
  double weights_seconds_ = 0.5;
  std::vector<std::vector<int32_t>> first_batches_, prepared_;
  std::vector<int> micro_steps_when_prepared_;
  uint64_t fail_at_step_ = 0;
  int micro_steps_ = 0;
  absl::Span<std::byte> memory_;  // As given for chunk 0.
  int finished_ = 0;
  int gathers_ = 0;
};

// Commits what it is given, except for the pushes that a test answers otherwise, once each. Like a
// session, it returns its first error until it is joined again.
class ScriptedOptimizer final : public StepOptimizer {
 public:
  explicit ScriptedOptimizer(const ThreadedBackend& backend) : backend_(backend) {}
  ~ScriptedOptimizer() override { EXPECT_TRUE(backend_.memory().empty()) << "the memory goes"; }

  // `push`: of the step, from 0.
  void AnswerPush(uint64_t step, int push, absl::Status with) {
    answers_[{step, push}] = std::move(with);
  }
  void AnswerReceive(uint64_t step, absl::Status with) { AnswerPush(step, kReceive, with); }
  void SkipStep(uint64_t step) { skipped_ = step; }
  // Called before each ReceiveWeights returns.
  void AwaitInReceive(std::function<void()> await) { await_ = std::move(await); }
  const std::vector<int>& pushes_of_attempts() const { return pushes_; }
  int joins() const { return joins_; }
  int micro_steps_ended() const { return ended_; }

  absl::Status Join(const FillChunk& first_weights) override {
    EXPECT_TRUE(backend_.memory().empty()) << "the memory goes";
    memory_ = std::make_unique<std::byte>();
    ++joins_;
    failed_ = absl::OkStatus();
    return absl::OkStatus();
  }
  Generation generation() const override { return static_cast<uint64_t>(joins_); }
  uint64_t committed_step() const override { return committed_step_; }
  std::string trainer_state() const override { return ""; }
  bool last_step_applied() const override { return true; }
  absl::Span<std::byte> gradient_memory(int chunk) override { return {memory_.get(), 1}; }
  absl::Status BeginStep(const StepSettings& settings) override {
    EXPECT_EQ(backend_.memory().data(), memory_.get());
    pushes_.push_back(0);
    return failed_;
  }
  absl::Status Push(client::GradientPush push) override {
    push.released();
    const auto answer = answers_.find({committed_step_ + 1, pushes_.back()++});
    if (answer != answers_.end()) {
      failed_ = answer->second;
      answers_.erase(answer);
    }
    return failed_;
  }
  absl::Status EndMicroStep(uint32_t micro_step, const UsedParameters& used) override {
    ++ended_;
    return failed_;
  }
  absl::StatusOr<client::StepDecision> Seal(uint32_t micro_steps, const StepVote& vote) override {
    if (!failed_.ok()) return failed_;
    client::StepDecision decision;
    decision.step = committed_step_ + 1;
    decision.applied = decision.step != skipped_;
    return decision;
  }
  absl::Status ReceiveWeights() override {
    if (await_) await_();
    if (const auto answer = answers_.find({committed_step_ + 1, kReceive});
        answer != answers_.end()) {
      failed_ = answer->second;
      answers_.erase(answer);
      ++committed_step_;  // The service has committed it all the same.
      return failed_;
    }
    if (failed_.ok()) ++committed_step_;
    return failed_;
  }
  double update_seconds() const override { return 0.125; }
  absl::StatusOr<client::JobCounts> ReadCounts() override {
    return absl::UnimplementedError("not counted here");
  }
  absl::Status SaveCheckpoint(const std::string& directory) override {
    return absl::UnimplementedError("nothing to save");
  }

 private:
  static constexpr int kReceive = -1;

  const ThreadedBackend& backend_;
  std::unique_ptr<std::byte> memory_;  // For gradients, another with each Join.
  std::map<std::pair<uint64_t, int>, absl::Status> answers_;
  absl::Status failed_;
  uint64_t committed_step_ = 0;
  std::vector<int> pushes_;  // By attempt of a step.
  int joins_ = 0;
  int ended_ = 0;
  uint64_t skipped_ = 0;
  std::function<void()> await_;
};

class Training {
 public:
  Training()
      : data_(TokenData::FromText("a text to train on, of some length", "text", kContext).value()),
        job_(MakeTrainingJob(std::vector<ModelParameter>{{.name = "p", .shape = {256}}}, {})
                 .value()),
        trainer_({.steps = 3, .micro_steps = 2, .batch = 2, .context = kContext},
                 {.backend = backend,
                  .data = data_,
                  .job = job_,
                  .initial_values = [](int, int64_t, absl::Span<float>) {},
                  .collective = collective_,
                  .optimizer = optimizer}) {}

  absl::Status Train() {
    absl::Status status = trainer_.Join();
    if (!status.ok()) return status;
    return trainer_.Run([&](const StepReport& report) {
      reports.push_back(report);
      return absl::OkStatus();
    });
  }
  std::vector<uint64_t> steps() const {
    std::vector<uint64_t> steps;
    for (const StepReport& report : reports) steps.push_back(report.step);
    return steps;
  }

  ThreadedBackend backend;
  ScriptedOptimizer optimizer{backend};
  std::vector<StepReport> reports;

 private:
  SingleCollective collective_;
  const TokenData data_;
  const TrainingJob job_;
  Trainer trainer_;
};

TEST(TrainerOverABackend, GivesTheOptimizerWhatTheBackendHandsOver) {
  Training run;
  ASSERT_TRUE(run.Train().ok());
  EXPECT_THAT(run.steps(), ElementsAre(1, 2, 3));
  EXPECT_THAT(run.optimizer.pushes_of_attempts(), testing::Each(2 * kChunks));
  EXPECT_EQ(run.optimizer.micro_steps_ended(), 6);
  EXPECT_EQ(run.backend.gathers(), 4);  // The first weights, too.
  EXPECT_EQ(run.backend.out(), 0);
  const StepReport& report = run.reports[0];
  EXPECT_EQ(report.loss, 8.0 / (2 * 2 * kContext));
  EXPECT_EQ(report.times.compute, 3);
  EXPECT_GE(report.times.reduce, 2);
  EXPECT_GE(report.times.send, 1);
  EXPECT_GE(report.times.exposed(), 3);
}

// While the step before has its passes: at its end the device would wait for it.
TEST(TrainerOverABackend, PreparesTheNextStepsFirstBatchBeforeThisOneIsFinished) {
  Training run;
  ASSERT_TRUE(run.Train().ok());
  EXPECT_THAT(run.backend.micro_steps_when_prepared(), ElementsAre(2, 2));
  ASSERT_EQ(run.backend.first_batches().size(), 3);
  EXPECT_THAT(run.backend.prepared(),
              ElementsAre(run.backend.first_batches()[1], run.backend.first_batches()[2]));
  EXPECT_NE(run.backend.prepared()[0], run.backend.prepared()[1]);
}

TEST(TrainerOverABackend, WhatKeptADeviceFromItsFirstPassIsExposed) {
  Training run;
  run.backend.Idle(1000);
  ASSERT_TRUE(run.Train().ok());
  for (const StepReport& report : run.reports) {
    EXPECT_GT(report.times.receive, 500);  // Without what was told of the same time otherwise.
    EXPECT_LE(report.times.receive, 1001);
  }
}

// Heard of on the backend's thread, while the trainer's own goes on.
TEST(TrainerOverABackend, OfALostStepNothingMoreIsPushedAndAllIsReleased) {
  for (const int push : {0, 3, kChunks - 1, kChunks + 2, 2 * kChunks - 1}) {
    Training run;
    run.optimizer.AnswerPush(2, push, absl::AbortedError("an operator's abort"));
    ASSERT_TRUE(run.Train().ok());
    EXPECT_THAT(run.steps(), ElementsAre(1, 2, 3));
    EXPECT_THAT(run.optimizer.pushes_of_attempts(),
                ElementsAre(2 * kChunks, push + 1, 2 * kChunks, 2 * kChunks));
    EXPECT_EQ(run.optimizer.joins(), 2);
    EXPECT_EQ(run.backend.finished(), 4);
    EXPECT_EQ(run.backend.gathers(), 5);
    EXPECT_EQ(run.backend.out(), 0);
  }
}

TEST(TrainerOverABackend, AnErrorOfThePushEndsTheRun) {
  Training run;
  run.optimizer.AnswerPush(2, 3, absl::UnavailableError("the service is gone"));
  const absl::Status status = run.Train();
  EXPECT_TRUE(Refused(status, absl::StatusCode::kUnavailable));
  EXPECT_THAT(run.steps(), ElementsAre(1));
}

// Before it returns: what comes of the backend's threads would find no trainer.
TEST(TrainerOverABackend, AnErrorOfAPassEndsTheRunAndFinishesTheStep) {
  Training run;
  run.backend.FailAt(2);
  const absl::Status status = run.Train();
  EXPECT_TRUE(Refused(status, absl::StatusCode::kUnavailable));
  EXPECT_EQ(run.backend.finished(), 2);
}

// ---------------------------------------------------------------- a backend that gathers ahead

TEST(TrainerOverABackendAhead, BeginsTheNextForwardWhileWeightsAreReceived) {
  OneShotEvent begun;
  Training run;
  run.backend.GatherAhead([&] { begun.Open(); });
  run.optimizer.AwaitInReceive([&] {
    if (run.optimizer.committed_step() < 2) EXPECT_TRUE(begun.Wait()) << "nothing went on";
  });
  ASSERT_TRUE(run.Train().ok());
  EXPECT_THAT(run.steps(), ElementsAre(1, 2, 3));
  EXPECT_THAT(run.backend.TakeAsked(),
              ElementsAre("gather", "expect", "forward 2", "gather", "expect", "forward 3",
                          "gather", "expect", "gather"));
}

TEST(TrainerOverABackendAhead, TellsWaitsForWeightsInTheStepThatReadsThem) {
  Training run;
  run.backend.GatherAhead();
  run.backend.WaitForWeights(1000);  // Beside which what this machine takes is nothing.
  ASSERT_TRUE(run.Train().ok());
  // The only waits for the optimizer are those that the backend reports.
  EXPECT_EQ(run.reports[0].times.update, 0);
  EXPECT_EQ(run.reports[1].times.update, 0.125);
  EXPECT_GE(run.reports[1].times.receive, 1000 - 0.125);
  EXPECT_LT(run.reports[1].times.receive, 1500);
}

TEST(TrainerOverABackendAhead, TellsAllOfTheLastStepsWaitInIt) {
  constexpr std::chrono::milliseconds kWhile(30);
  Training run;
  run.backend.GatherAhead();
  run.optimizer.AwaitInReceive([&] {
    if (run.optimizer.committed_step() < 2) return;
    const auto end = std::chrono::steady_clock::now() + kWhile;
    while (std::chrono::steady_clock::now() < end) {
    }
  });
  ASSERT_TRUE(run.Train().ok());
  // Without what the backend reports of the weights of step 2: 0.5.
  EXPECT_GE(run.reports[2].times.update + run.reports[2].times.receive, 0.530);
}

TEST(TrainerOverABackendAhead, AfterASkippedStepNothingIsAhead) {
  Training run;
  run.backend.GatherAhead();
  run.optimizer.SkipStep(2);
  ASSERT_TRUE(run.Train().ok());
  EXPECT_FALSE(run.reports[1].applied);
  EXPECT_THAT(run.backend.TakeAsked(),
              ElementsAre("gather", "expect", "forward 2", "gather", "expect", "gather"));
}

// Committed, but this rank's weights did not come: it joins again, and reads them.
TEST(TrainerOverABackendAhead, AbandonsWeightsThatDoNotCome) {
  Training run;
  run.backend.GatherAhead();
  run.optimizer.AnswerReceive(2, absl::AbortedError("another process has the rank"));
  ASSERT_TRUE(run.Train().ok());
  EXPECT_THAT(run.steps(), ElementsAre(1, 2, 3));
  EXPECT_EQ(run.optimizer.joins(), 2);
  std::vector<std::string> asked = run.backend.TakeAsked();
  // The two threads of step 2 may be heard in either order.
  ASSERT_EQ(asked.size(), 11);
  EXPECT_THAT(std::vector(asked.begin() + 5, asked.begin() + 7),
              testing::UnorderedElementsAre("forward 3", "abandon"));
  asked.erase(asked.begin() + 5, asked.begin() + 7);
  EXPECT_THAT(asked, ElementsAre("gather", "expect", "forward 2", "gather", "expect", "gather",
                                 "gather", "expect", "gather"));
}

TEST(TrainerOverABackendAhead, AnErrorOfReceivingEndsTheRun) {
  Training run;
  run.backend.GatherAhead();
  run.optimizer.AnswerReceive(2, absl::UnavailableError("the service is gone"));
  EXPECT_TRUE(Refused(run.Train(), absl::StatusCode::kUnavailable));
  EXPECT_THAT(run.steps(), ElementsAre(1));
}

}  // namespace
}  // namespace ballast::worker
