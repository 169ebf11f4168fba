// A session whose stream breaks.
#include "client/session/stream_keeper.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <thread>

#include "cpu_optimizer_service/common/reason.h"
#include "tests/client/session/scripted_session.h"
#include "tests/support/messages.h"

namespace ballast::client {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;

class StreamKeeperTest : public ScriptedSession {
 protected:
  StreamKeeperTest() {
    options_.window_bytes = 1 << 20;
    fake_->attachment.set_instance_id("first run");
    fake_->read_step = 5;
    for (int chunk = 0; chunk < 5; ++chunk) {
      fake_->stored_weights.emplace_back(chunk, WeightsOf(chunk));
    }
  }

  void SetUp() override { testing::internal::CaptureStderr(); }
  void TearDown() override {
    session_.reset();
    // A test that read the log has ended the capture.
    if (!log_was_read_) testing::internal::GetCapturedStderr();
  }
  std::string Log() {
    log_was_read_ = true;
    return testing::internal::GetCapturedStderr();
  }

  // From the next attachment on, the service has committed step 5.
  void CommitStep5Unheard(bool applied) {
    fake_->attachment.set_committed_step(5);
    for (uint64_t step : {4, 5}) {
      v1::StepRecord& record = *fake_->attachment.mutable_job()->add_recent_steps();
      record.set_step(step);
      record.set_applied(step == 4 || applied);
      record.set_norm(step == 4 ? -1 : 7.5);
      record.set_clip_coefficient(0.5);
      record.set_skip_reason(applied ? "" : "wte is not finite");
      record.add_unused_parameters("h.0.b");
    }
  }
  static v1::Opened Delivered(uint32_t micro_steps_ended,
                              std::vector<std::pair<uint32_t, uint32_t>> chunks) {
    v1::Opened opened;
    opened.set_committed_step(4);
    opened.set_open_step(5);
    opened.set_micro_steps_ended(micro_steps_ended);
    for (const auto& [chunk, next] : chunks) {
      v1::ChunkCount& count = *opened.add_delivered();
      count.set_chunk(chunk);
      count.set_next_micro_step(next);
    }
    return opened;
  }
  // Seals, and calls `service` when the seal has been sent.
  absl::StatusOr<StepDecision> Seal(const std::function<void()>& service) {
    std::thread answer([&] {
      while (fake_->names(1).back() != "seal 5 of 1") std::this_thread::yield();
      service();
    });
    absl::StatusOr<StepDecision> decision = session_->Seal(1, SmallVote());
    answer.join();
    return decision;
  }
  void BreakIt() { fake_->Break(absl::UnavailableError("connection lost")); }
  // The error that every call finally returns.
  absl::Status AwaitFailure() { return session_->Seal(1, SmallVote()).status(); }
  void ExpectStep5InPlace() {
    for (int chunk = 0; chunk < 5; ++chunk) EXPECT_EQ(memory_[chunk], WeightsOf(chunk)) << chunk;
    EXPECT_EQ(session_->committed_step(), 5u);
  }

  bool log_was_read_ = false;
};

TEST_F(StreamKeeperTest, SendsWhatWasNotAcknowledgedOnAnotherStream) {
  OpenAndBegin();
  std::map<int, int> released;
  ASSERT_TRUE(PushChunk(0, [&] { ++released[0]; }).ok());
  ASSERT_TRUE(PushChunk(1, [&] { ++released[1]; }).ok());
  Acknowledge(3);  // Open, begin and chunk 0.
  const v1::OpenTrain first_open = fake_->sent().at(0).open();
  BreakIt();
  ASSERT_TRUE(fake_->AwaitStream(2, 2));
  EXPECT_THAT(fake_->names(2), ElementsAre("open", "gradient 5 chunk 1 [0, 1)"));
  EXPECT_EQ(fake_->attaches, 2);
  EXPECT_EQ(fake_->last_attach.uid(), "u");
  EXPECT_EQ(fake_->last_attach.generation().count(), 3u);
  EXPECT_TRUE(fake_->last_attach.rejoin());
  EXPECT_EQ(fake_->last_attach.process_id(), first_open.process_id());
  EXPECT_EQ(fake_->sent().at(2).open().SerializeAsString(), first_open.SerializeAsString());
  // The trainer goes on as if nothing had happened.
  ASSERT_TRUE(PushChunk(2, [&] { ++released[2]; }).ok());
  EXPECT_THAT(fake_->names(2),
              ElementsAre("open", "gradient 5 chunk 1 [0, 1)", "gradient 5 chunk 2 [0, 1)"));
  fake_->LetGo();
  EXPECT_EQ(released, (std::map<int, int>{{0, 1}}));
  Acknowledge(3);  // The new stream's numbers.
  EXPECT_EQ(released, (std::map<int, int>{{0, 1}, {1, 1}, {2, 1}}));
  session_.reset();
  EXPECT_THAT(Log(), AllOf(HasSubstr("[warning] job gpt rank 0 step 5: the stream broke, and is "
                                     "reopened: UNAVAILABLE: connection lost"),
                           HasSubstr("[info] job gpt rank 0 step 5: the stream is back: 1 messages "
                                     "sent again, 0 had arrived")));
}

TEST_F(StreamKeeperTest, TellsAPlannedRestartFromADeath) {
  OpenAndBegin();
  fake_->attachment.set_instance_id("the next one");
  fake_->Break(WithReason(absl::UnavailableError("is replaced"), reason::kRestarting));
  ASSERT_TRUE(fake_->AwaitStream(2, 2));
  fake_->attachment.set_instance_id("one more");
  fake_->Break(absl::UnavailableError("connection lost"));
  ASSERT_TRUE(fake_->AwaitStream(3, 2));
  session_.reset();
  EXPECT_THAT(Log(),
              AllOf(HasSubstr("[info] job gpt rank 0 step 5: the service has restarted as planned"),
                    HasSubstr("[warning] job gpt rank 0 step 5: another process of the service has "
                              "taken over the job")));
}

TEST_F(StreamKeeperTest, OnlyTheServiceSWordEndsASessionAtOnce) {
  OpenAndBegin();
  size_t stream = 1;
  for (const absl::Status& status :
       {absl::UnavailableError("x"), absl::CancelledError("x"), absl::UnknownError("x"),
        absl::InternalError("x"), absl::DeadlineExceededError("x"), absl::OkStatus()}) {
    fake_->Break(status);
    ASSERT_TRUE(fake_->AwaitStream(++stream, 2)) << status;  // Open and begin.
  }
  EXPECT_TRUE(PushChunk(0).ok());
  for (const absl::Status& status :
       {absl::InvalidArgumentError("x"), absl::FailedPreconditionError("x"),
        absl::NotFoundError("x"), absl::AbortedError("x"), absl::DataLossError("x"),
        absl::ResourceExhaustedError("x")}) {
    session_.reset();
    auto transport = std::make_unique<FakeTransport>();
    fake_ = transport.get();
    transport_ = std::move(transport);
    ASSERT_TRUE(Open().ok());
    ASSERT_TRUE(session_->BeginStep({}).ok());
    fake_->Break(status);
    EXPECT_TRUE(Refused(PushChunk(0), status.code()));
    EXPECT_EQ(fake_->attaches, 1);
    EXPECT_EQ(fake_->streams(), 1u);
  }
}

TEST_F(StreamKeeperTest, WhatTheSessionFindsWrongItselfEndsItAtOnce) {
  std::atomic<int> streams = 0;
  fake_->on_stream = [&] { ++streams; };
  OpenAndBegin();
  Acknowledge(9);
  EXPECT_TRUE(Refused(PushChunk(0), absl::StatusCode::kInternal));
  fake_->Break(absl::UnavailableError("gone"));
  session_.reset();
  EXPECT_EQ(streams, 1);
}

// The step is that of whichever state ranks are about to give.
TEST_F(StreamKeeperTest, ReopensWhileFirstWeightsAreAwaitedAtWhicheverStep) {
  fake_->attachment.set_awaiting_weights(true);
  fake_->attachment.set_committed_step(0);
  ASSERT_TRUE(Open().ok());
  fake_->AwaitAnswers();
  fake_->attachment.set_committed_step(3);  // Another rank's.
  BreakIt();
  ASSERT_TRUE(fake_->AwaitStream(2, 1));
  const std::vector<int64_t> counts(options_.job.layout.parameters.size(), 7);
  ASSERT_TRUE(
      session_->UploadState({.step = 7, .update_counts = counts}, [](int, absl::Span<float>) {})
          .ok());
  BreakIt();
  ASSERT_TRUE(fake_->AwaitStream(3, 1));
  fake_->AwaitAnswers();
  fake_->attachment.set_awaiting_weights(false);
  fake_->attachment.set_committed_step(7);
  BreakIt();
  ASSERT_TRUE(fake_->AwaitStream(4, 1));
  ASSERT_TRUE(session_->BeginStep({}).ok());
  ASSERT_TRUE(fake_->AwaitStream(4, 2));
  EXPECT_THAT(fake_->names(4), ElementsAre("open", "begin 8"));
}

TEST_F(StreamKeeperTest, APushIntoAFullWindowWaitsForTheStreamToBeBack) {
  options_.window_bytes = 512;
  OpenAndBegin();
  ASSERT_TRUE(PushChunk(0).ok());
  fake_->attach_hangs = true;
  BreakIt();
  ASSERT_TRUE(fake_->AwaitAttaches(2));
  std::thread pusher([&] { EXPECT_TRUE(PushChunk(1).ok()); });
  EXPECT_FALSE(fake_->AwaitStream(2, 1, std::chrono::milliseconds(50)));
  fake_->opened = {Delivered(0, {{0, 1}})};
  fake_->LetAttach();
  pusher.join();
  ASSERT_TRUE(fake_->AwaitStream(2, 2));
  EXPECT_THAT(fake_->names(2), ElementsAre("open", "gradient 5 chunk 1 [0, 1)"));
}

// ---------------------------------------------------------------- seals and decisions

TEST_F(StreamKeeperTest, ADecisionThatWasLostIsTakenFromTheRecordAndItsWeightsAreRead) {
  std::map<int, int> on_weights;
  options_.on_weights = [&](int chunk) { ++on_weights[chunk]; };
  OpenAndBegin();
  int released = 0;
  ASSERT_TRUE(PushChunk(0, [&] { ++released; }).ok());
  const absl::StatusOr<StepDecision> decision = Seal([&] {
    CommitStep5Unheard(/*applied=*/true);
    BreakIt();
  });
  ASSERT_TRUE(decision.ok()) << decision.status();
  EXPECT_EQ(decision->step, 5u);
  EXPECT_TRUE(decision->applied);
  EXPECT_EQ(decision->norm, 7.5);
  EXPECT_EQ(decision->clip_coefficient, 0.5);
  EXPECT_EQ(decision->unused_parameters, std::vector<std::string>{"h.0.b"});
  ASSERT_TRUE(session_->ReceiveWeights().ok());
  ExpectStep5InPlace();
  EXPECT_EQ(on_weights, (std::map<int, int>{{0, 1}, {1, 1}, {2, 1}, {3, 1}, {4, 1}}));
  ASSERT_EQ(fake_->reads.size(), 1u);
  EXPECT_EQ(fake_->reads[0].step(), 5u);
  EXPECT_EQ(fake_->reads[0].uid(), "u");
  EXPECT_EQ(released, 1);
  // The next step, and nothing of the previous one.
  ASSERT_TRUE(session_->BeginStep({}).ok());
  ASSERT_TRUE(fake_->AwaitStream(2, 2));
  EXPECT_THAT(fake_->names(2), ElementsAre("open", "begin 6"));
}

TEST_F(StreamKeeperTest, ALostDecisionToSkipReadsNothing) {
  OpenAndBegin();
  const absl::StatusOr<StepDecision> decision = Seal([&] {
    CommitStep5Unheard(/*applied=*/false);
    BreakIt();
  });
  ASSERT_TRUE(decision.ok()) << decision.status();
  EXPECT_FALSE(decision->applied);
  EXPECT_EQ(decision->skip_reason, "wte is not finite");
  ASSERT_TRUE(session_->ReceiveWeights().ok());
  EXPECT_EQ(session_->committed_step(), 5u);
  EXPECT_TRUE(fake_->reads.empty());
  EXPECT_TRUE(memory_.empty());
}

TEST_F(StreamKeeperTest, AStepCommittedBetweenAttachingAndOpeningIsFoundByAttachingAgain) {
  OpenAndBegin();
  const absl::StatusOr<StepDecision> decision = Seal([&] {
    v1::Opened opened;
    opened.set_committed_step(5);
    fake_->opened = {opened, opened};
    fake_->on_stream = [&] { CommitStep5Unheard(/*applied=*/true); };
    BreakIt();
  });
  ASSERT_TRUE(decision.ok()) << decision.status();
  ASSERT_TRUE(session_->ReceiveWeights().ok());
  ExpectStep5InPlace();
  EXPECT_EQ(fake_->attaches, 3);
  EXPECT_THAT(fake_->names(2), ElementsAre("open"));
}

TEST_F(StreamKeeperTest, ACommittedStepWithoutARecordIsAnError) {
  OpenAndBegin();
  fake_->attachment.set_committed_step(5);
  BreakIt();
  EXPECT_TRUE(Refused(AwaitFailure(), absl::StatusCode::kDataLoss));
}

TEST_F(StreamKeeperTest, AServiceAtAnotherStepIsAnError) {
  for (uint64_t step : {uint64_t{3}, uint64_t{6}}) {
    session_.reset();
    auto transport = std::make_unique<FakeTransport>();
    fake_ = transport.get();
    transport_ = std::move(transport);
    fake_->attachment.set_committed_step(4);
    OpenAndBegin();
    fake_->attachment.set_committed_step(step);
    BreakIt();
    EXPECT_TRUE(Refused(AwaitFailure(), absl::StatusCode::kFailedPrecondition));
  }
}

TEST_F(StreamKeeperTest, AServiceThatTookItsDecisionBackIsAnError) {
  OpenAndBegin();
  const absl::StatusOr<StepDecision> decision = Seal([&] {
    Decide(5, true);
    BreakIt();
  });
  ASSERT_TRUE(decision.ok()) << decision.status();
  EXPECT_TRUE(Refused(session_->ReceiveWeights(), absl::StatusCode::kFailedPrecondition));
}

// ---------------------------------------------------------------- the end

TEST_F(StreamKeeperTest, GivesUpAfterTheReconnectTimeout) {
  options_.reconnect_timeout = absl::Seconds(10);
  OpenAndBegin();
  int released = 0;
  ASSERT_TRUE(PushChunk(0, [&] { ++released; }).ok());
  fake_->attach_results.assign(1000, absl::UnavailableError("connection refused"));
  const absl::Time start = clock_.Now();
  BreakIt();
  const absl::Status failure = AwaitFailure();
  EXPECT_TRUE(Refused(failure, absl::StatusCode::kUnavailable));
  EXPECT_EQ(PushChunk(1), failure);
  EXPECT_EQ(clock_.Now() - start, absl::Seconds(10));
  // 20 ms, doubled up to 1 s: 6 waits of 1.26 s together, then 8 of a second and the rest.
  EXPECT_EQ(clock_.sleeps.size(), 15u);
  EXPECT_EQ(clock_.sleeps[0], absl::Milliseconds(20));
  EXPECT_EQ(clock_.sleeps[1], absl::Milliseconds(40));
  EXPECT_EQ(fake_->attaches, 1 + 15);
  session_.reset();
  EXPECT_EQ(released, 1);
  EXPECT_THAT(Log(), Not(HasSubstr("is back")));
}

TEST_F(StreamKeeperTest, AStreamThatIsBackAfterSomeAttemptsHasTheWholeTimeoutAgain) {
  options_.reconnect_timeout = absl::Seconds(2);
  OpenAndBegin();
  for (size_t stream = 2; stream < 6; ++stream) {
    fake_->attach_results.assign(5, absl::UnavailableError("connection refused"));
    BreakIt();
    ASSERT_TRUE(fake_->AwaitStream(stream, 2)) << stream;
    Acknowledge(1);  // The open message, which does not end the outage.
    Acknowledge(2);  // A message that was sent again, which does.
    ASSERT_TRUE(session_->EndMicroStep(static_cast<uint32_t>(stream), {}).ok());
  }
  EXPECT_GT(clock_.Now() - absl::FromUnixSeconds(1000), absl::Seconds(2));
  EXPECT_TRUE(PushChunk(0).ok());
}

TEST_F(StreamKeeperTest, AMessageThatBreaksEveryStreamIsNotSentForEver) {
  options_.reconnect_timeout = absl::Seconds(5);
  OpenAndBegin();
  // Every stream can be opened, and ends at its first message.
  const auto is_sound = [&] { return absl::IsFailedPrecondition(session_->ReadWeights()); };
  for (size_t stream = 1; is_sound();) {
    if (!fake_->AwaitStream(stream, 2, std::chrono::milliseconds(20))) continue;
    ASSERT_LT(stream, 100u);
    Acknowledge(1);
    fake_->Break(absl::InternalError("a bug"));
    ++stream;
  }
  EXPECT_TRUE(Refused(AwaitFailure(), absl::StatusCode::kUnavailable));
}

TEST_F(StreamKeeperTest, StreamsThatBreakAtOnceAreNotReopenedForEver) {
  options_.reconnect_timeout = absl::Seconds(5);
  ASSERT_TRUE(Open().ok());
  // There is nothing to send again, so nothing is acknowledged.
  const auto is_sound = [&] {
    return absl::IsFailedPrecondition(session_->EndMicroStep(0, {}));  // No step is open.
  };
  for (size_t stream = 1; is_sound();) {
    if (!fake_->AwaitStream(stream, 1, std::chrono::milliseconds(20))) continue;
    ASSERT_LT(++stream, 100u);
    fake_->Break(absl::UnavailableError("flap"));
  }
  EXPECT_TRUE(Refused(session_->BeginStep({}), absl::StatusCode::kUnavailable));
  EXPECT_EQ(clock_.Now(), absl::FromUnixSeconds(1005));
  // 20 ms, doubled up to 1 s: 6 waits of 1.26 s together, then 3 of a second and the rest.
  EXPECT_EQ(clock_.sleeps.size(), 10u);
}

TEST_F(StreamKeeperTest, AStreamThatStoodForAWhileHasTheWholeTimeoutAgain) {
  options_.reconnect_timeout = absl::Seconds(2);
  ASSERT_TRUE(Open().ok());
  for (size_t stream = 2; stream < 6; ++stream) {
    fake_->attach_results.assign(5, absl::UnavailableError("connection refused"));
    BreakIt();
    ASSERT_TRUE(fake_->AwaitStream(stream, 1)) << stream;
    if (stream == 2) ASSERT_TRUE(session_->BeginStep({}).ok());
    ASSERT_TRUE(fake_->AwaitStream(stream, 2)) << stream;
    clock_.SleepFor(absl::Seconds(1));
  }
  EXPECT_TRUE(PushChunk(0).ok());
}

TEST_F(StreamKeeperTest, ARankThatAnotherProcessHasTakenIsLeftToIt) {
  OpenAndBegin();
  fake_->attach_results = {absl::UnavailableError("not yet"),
                           absl::AbortedError("another process has taken rank 0")};
  BreakIt();
  EXPECT_TRUE(Refused(AwaitFailure(), absl::StatusCode::kAborted));
  EXPECT_EQ(fake_->streams(), 1u);
}

TEST_F(StreamKeeperTest, ANewGenerationIsAnEndEvenIfTheServiceDoesNotCheckIt) {
  OpenAndBegin();
  fake_->attachment.mutable_generation()->set_count(4);
  BreakIt();
  EXPECT_TRUE(Refused(AwaitFailure(), absl::StatusCode::kAborted, reason::kOlderGeneration));
  EXPECT_EQ(fake_->streams(), 1u);
}

// It has taken over the memory of the one before: the uid was asked for.
TEST_F(StreamKeeperTest, AnotherInstanceOfTheServiceThatHasTheJobGoesOn) {
  OpenAndBegin();
  fake_->attachment.set_instance_id("second run");
  BreakIt();
  ASSERT_TRUE(fake_->AwaitStream(2, 1));
  EXPECT_EQ(fake_->last_attach.uid(), "u");
  EXPECT_TRUE(fake_->last_attach.rejoin());
}

TEST_F(StreamKeeperTest, AStreamRefusedOnOpeningAgainIsTheEnd) {
  OpenAndBegin();
  fake_->open_error = absl::NotFoundError("no such job");
  BreakIt();
  EXPECT_TRUE(Refused(AwaitFailure(), absl::StatusCode::kNotFound));
}

// The service may notice only then that the old stream ended, and detach the rank.
TEST_F(StreamKeeperTest, ARankSetFreeBetweenAttachingAndOpeningIsTakenAgain) {
  OpenAndBegin();
  fake_->open_error = absl::AbortedError("rank 0 is not held by this process");
  fake_->on_stream = [&] {
    if (fake_->streams() == 2) fake_->open_error = absl::OkStatus();
  };
  BreakIt();
  ASSERT_TRUE(fake_->AwaitStream(3, 2));
  EXPECT_EQ(fake_->attaches, 3);
  EXPECT_TRUE(PushChunk(0).ok());
  // Attaching shows whether it is lost.
  fake_->attach_results = {absl::AbortedError("another process has taken rank 0")};
  BreakIt();
  EXPECT_TRUE(Refused(AwaitFailure(), absl::StatusCode::kAborted));
}

// ---------------------------------------------------------------- destruction

TEST_F(StreamKeeperTest, DestructionWakesAWaitForTheNextAttempt) {
  OpenAndBegin();
  int released = 0;
  ASSERT_TRUE(PushChunk(0, [&] { ++released; }).ok());
  clock_.stands_still = true;
  BreakIt();
  clock_.AwaitWaiter();
  fake_->LetGo();
  session_.reset();
  EXPECT_EQ(released, 1);
}

TEST_F(StreamKeeperTest, DestructionEndsACallUnderWay) {
  OpenAndBegin();
  fake_->attach_hangs = true;
  BreakIt();
  ASSERT_TRUE(fake_->AwaitAttaches(2));
  session_.reset();
}

TEST_F(StreamKeeperTest, AStreamThatEndsAsSoonAsItIsOpenSaysWhy) {
  fake_->ends_at_once = absl::AbortedError("a new process has taken rank 0");
  const absl::Status status = Open();
  EXPECT_TRUE(Refused(status, absl::StatusCode::kAborted)) << status;
}

TEST_F(StreamKeeperTest, AnAttemptWhoseStreamEndsAtOnceLeavesNothingToTheNext) {
  fake_->ends_at_once = absl::AbortedError("rank 0 was detached");
  int streams = 0;
  fake_->on_stream = [&] {
    if (++streams == 2) fake_->ends_at_once = absl::OkStatus();
  };
  options_.rejoin = true;
  OpenAndBegin();
  EXPECT_EQ(streams, 2);
  ASSERT_TRUE(PushChunk(0, [] {}).ok());
  EXPECT_THAT(fake_->names(2), ElementsAre("open", "begin 5", "gradient 5 chunk 0 [0, 1)"));
}

TEST_F(StreamKeeperTest, DestructionEndsTheOpeningOfAStream) {
  OpenAndBegin();
  fake_->open_hangs = true;
  BreakIt();
  ASSERT_TRUE(fake_->AwaitStream(2, 1));
  session_.reset();
}

}  // namespace
}  // namespace ballast::client
