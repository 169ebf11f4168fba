#include "client/session/session_impl.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <fstream>
#include <iterator>
#include <map>
#include <string>
#include <thread>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/reason.h"
#include "tests/client/session/scripted_session.h"
#include "tests/support/messages.h"

namespace ballast::client {
namespace {

using testing::HasSubstr;

class SessionImplTest : public ScriptedSession {
 protected:
  // Broken streams are tested in stream_keeper_test.cc.
  SessionImplTest() { options_.reconnect_timeout = absl::ZeroDuration(); }
};

TEST_F(SessionImplTest, OpensWithTheAttachment) {
  ASSERT_TRUE(Open().ok());
  EXPECT_EQ(session_->job_uid(), "u");
  EXPECT_EQ(session_->generation(), Generation(3));
  EXPECT_EQ(session_->committed_step(), 4u);
  const v1::OpenTrain open = fake_->sent().at(0).open();
  EXPECT_EQ(open.name(), "jobs/gpt");
  EXPECT_EQ(open.uid(), "u");
  EXPECT_EQ(open.generation().count(), 3u);
  EXPECT_EQ(open.process_id(), fake_->last_attach.process_id());
}

TEST_F(SessionImplTest, ReportsWhyItCouldNotOpen) {
  fake_->open_error = absl::AbortedError("generation 3 is over");
  EXPECT_TRUE(Refused(Open(), absl::StatusCode::kAborted));
}

TEST_F(SessionImplTest, RefusesOptionsThatCannotWork) {
  options_.rank = 1;
  EXPECT_TRUE(Refused(Open(), absl::StatusCode::kInvalidArgument));
}

TEST_F(SessionImplTest, AWholeStepPutsWeightsInPlace) {
  OpenAndBegin();
  for (int chunk = 0; chunk < 5; ++chunk) {
    ASSERT_TRUE(PushChunk(chunk).ok());
    Acknowledge(static_cast<uint64_t>(chunk) + 3);  // Open, begin, and the gradients.
  }
  ASSERT_TRUE(session_->EndMicroStep(0, {.all = false, .parameters = {0, 2}}).ok());
  std::thread service([&] {
    ASSERT_TRUE(fake_->AwaitSent(9));  // Open, begin, five gradients, end and seal.
    Decide(5, true);
    for (int chunk = 4; chunk >= 0; --chunk) {
      const std::string whole = WeightsOf(chunk);
      SendWeights(5, chunk, {whole.substr(0, 3), whole.substr(3)});
    }
    Commit(5);
  });
  const absl::StatusOr<StepDecision> decision = session_->Seal(1, SmallVote());
  service.join();
  ASSERT_TRUE(decision.ok()) << decision.status();
  EXPECT_EQ(decision->step, 5u);
  EXPECT_TRUE(decision->applied);
  EXPECT_EQ(decision->norm, 2.5);
  EXPECT_EQ(session_->committed_step(), 4u);
  ASSERT_TRUE(session_->ReceiveWeights().ok());
  EXPECT_EQ(session_->committed_step(), 5u);
  EXPECT_EQ(session_->update_seconds(), 0.25);
  for (int chunk = 0; chunk < 5; ++chunk) {
    EXPECT_EQ(memory_[chunk], std::string(chunk == 4 ? 1024 : 512, static_cast<char>('a' + chunk)));
  }
  const std::vector<v1::TrainRequest> sent = fake_->sent();
  ASSERT_EQ(sent.size(), 4u);
  EXPECT_EQ(sent[1].begin_step().step(), 5u);
  EXPECT_EQ(sent[2].end_micro_step().used_parameters_size(), 2);
  EXPECT_EQ(sent[3].seal().micro_steps(), 1u);
  EXPECT_EQ(fake_->gradients().at(4).header.step(), 5u);
  // Not copied.
  EXPECT_EQ(fake_->gradients().at(4).payload.data(), gradient_.data());
}

TEST_F(SessionImplTest, AReportGoesWithTheSealAndWithTheVoteAndWithNoLaterStep) {
  OpenAndBegin();
  ASSERT_TRUE(session_->Report({.numbers = {{"loss", 2}, {"tokens", 3}}, .seconds = {}}).ok());
  ASSERT_TRUE(session_->EndMicroStep(0, {.all = false, .parameters = {}}).ok());
  std::thread service([&] {
    ASSERT_TRUE(fake_->AwaitSent(4));  // Open, begin, end and seal.
    v1::TrainResponse norm;
    norm.mutable_norm()->set_step(5);
    fake_->Deliver(norm);
    ASSERT_TRUE(fake_->AwaitSent(5));
    Decide(5, false);
    Commit(5);
  });
  ASSERT_TRUE(session_->Seal(1).ok());
  // A number of the same name takes the other one's place.
  ASSERT_TRUE(session_->Report({.numbers = {{"loss", 1}}, .seconds = {}}).ok());
  EXPECT_EQ(session_->Report({.numbers = {{"a b", 1}}, .seconds = {}}).code(),
            absl::StatusCode::kInvalidArgument);
  ASSERT_TRUE(session_->Vote(SmallVote()).ok());
  service.join();
  ASSERT_TRUE(session_->ReceiveWeights().ok());
  std::thread next([&] {
    ASSERT_TRUE(fake_->AwaitSent(8));  // Begin, end and seal.
    Decide(6, false);
    Commit(6);
  });
  ASSERT_TRUE(session_->BeginStep({}).ok());
  ASSERT_TRUE(session_->EndMicroStep(0, {.all = false, .parameters = {}}).ok());
  ASSERT_TRUE(session_->Seal(1, SmallVote()).ok());
  next.join();
  const std::vector<v1::TrainRequest> sent = fake_->sent();
  EXPECT_EQ(sent[3].seal().report().numbers().at("loss"), 2);
  EXPECT_EQ(sent[4].vote().report().numbers().at("loss"), 1);
  EXPECT_EQ(sent[4].vote().report().numbers_size(), 2);
  EXPECT_FALSE(sent[7].seal().has_report());
}

TEST_F(SessionImplTest, PushBlocksWhileTheWindowIsFull) {
  OpenAndBegin();
  ASSERT_TRUE(PushChunk(0).ok());
  ASSERT_TRUE(PushChunk(1).ok());
  std::thread pusher([&] { EXPECT_TRUE(PushChunk(2).ok()); });
  // Open, begin and two gradients; a push that does not block would be the fifth.
  EXPECT_FALSE(fake_->AwaitSent(5, std::chrono::milliseconds(50)));
  Acknowledge(3);
  EXPECT_TRUE(fake_->AwaitSent(5));
  pusher.join();
}

TEST_F(SessionImplTest, PushIntoAFullWindowNamesItsChunkWhenTheServiceIsSilent) {
  options_.seal_timeout = absl::Milliseconds(20);
  OpenAndBegin();
  ASSERT_TRUE(PushChunk(0).ok());
  ASSERT_TRUE(PushChunk(1).ok());
  int released = 0;
  EXPECT_TRUE(Refused(PushChunk(2, [&] { ++released; }), absl::StatusCode::kDeadlineExceeded));
  EXPECT_EQ(released, 1);
  // The session is sound, and the chunk may be pushed again.
  Acknowledge(3);
  EXPECT_TRUE(PushChunk(2).ok());
}

TEST_F(SessionImplTest, ReleasesEveryPayloadOnceWhateverHappens) {
  OpenAndBegin();
  std::map<int, int> released;
  ASSERT_TRUE(PushChunk(0, [&] { ++released[0]; }).ok());
  ASSERT_TRUE(PushChunk(1, [&] { ++released[1]; }).ok());
  EXPECT_FALSE(PushChunk(9, [&] { ++released[9]; }).ok());
  EXPECT_EQ(released, (std::map<int, int>{{9, 1}}));
  fake_->LetGo();
  Acknowledge(3);
  EXPECT_EQ(released, (std::map<int, int>{{0, 1}, {9, 1}}));
  ASSERT_TRUE(PushChunk(2, [&] { ++released[2]; }).ok());
  fake_->Break(absl::UnavailableError("connection lost"));
  // The transport no longer used 1, but still used 2.
  EXPECT_EQ(released, (std::map<int, int>{{0, 1}, {1, 1}, {9, 1}}));
  EXPECT_FALSE(PushChunk(3, [&] { ++released[3]; }).ok());
  session_.reset();
  EXPECT_EQ(released, (std::map<int, int>{{0, 1}, {1, 1}, {2, 1}, {3, 1}, {9, 1}}));
}

TEST_F(SessionImplTest, ChecksAPushBeforeSendingIt) {
  OpenAndBegin();
  EXPECT_TRUE(Refused(PushChunk(5), absl::StatusCode::kInvalidArgument));
  GradientPush push{.chunk = 4, .payload = absl::MakeConstSpan(gradient_).subspan(0, 512)};
  EXPECT_TRUE(Refused(session_->Push(push), absl::StatusCode::kInvalidArgument));
  push.empty = true;
  EXPECT_TRUE(Refused(session_->Push(push), absl::StatusCode::kInvalidArgument));
  push.payload = {};
  EXPECT_TRUE(session_->Push(push).ok());
  EXPECT_EQ(fake_->gradients().size(), 1u);
  EXPECT_TRUE(fake_->gradients()[0].header.empty());
}

TEST_F(SessionImplTest, ASealThatTimesOutNamesTheRanksAndMayBeAwaitedAgain) {
  options_.seal_timeout = absl::Milliseconds(20);
  OpenAndBegin();
  v1::TrainResponse waiting;
  waiting.mutable_waiting()->set_step(5);
  waiting.mutable_waiting()->add_ranks(2);
  fake_->Deliver(waiting);
  waiting.mutable_waiting()->add_ranks(7);
  fake_->Deliver(waiting);
  EXPECT_TRUE(Refused(session_->Seal(1, SmallVote()), absl::StatusCode::kDeadlineExceeded));
  Decide(5, false);
  const absl::StatusOr<StepDecision> decision = session_->Seal(1, SmallVote());
  ASSERT_TRUE(decision.ok()) << decision.status();
  EXPECT_EQ(decision->skip_reason, "wte is not finite");
  // Open, begin and one seal.
  EXPECT_EQ(fake_->sent().size(), 3u);
  Commit(5);
  EXPECT_TRUE(session_->ReceiveWeights().ok());
}

TEST_F(SessionImplTest, ASealThatTimesOutAsksForTheRanksIfItWasNotTold) {
  options_.seal_timeout = absl::Milliseconds(20);
  OpenAndBegin();
  v1::Job job;
  job.add_ranks()->set_sealed(true);
  job.add_ranks()->set_rank(1);
  fake_->jobs = {job};
  EXPECT_TRUE(Refused(session_->Seal(1, SmallVote()), absl::StatusCode::kDeadlineExceeded));
}

TEST_F(SessionImplTest, ASealThatTimesOutSaysThatASaveIsWhatItWaitsFor) {
  options_.seal_timeout = absl::Milliseconds(20);
  OpenAndBegin();
  v1::Job job;
  job.add_ranks()->set_sealed(true);
  job.add_saves()->set_directory("/saved/gpt");
  job.mutable_saves(0)->set_seconds_since_progress(61);
  job.mutable_saves(0)->set_holds_back_decisions(true);
  fake_->jobs = {job};
  EXPECT_TRUE(Refused(session_->Seal(1, SmallVote()), absl::StatusCode::kDeadlineExceeded));
  job.mutable_saves(0)->set_makes_memory(true);
  fake_->jobs = {job};
  EXPECT_TRUE(Refused(session_->Seal(1, SmallVote()), absl::StatusCode::kDeadlineExceeded));
}

TEST_F(SessionImplTest, TheFirstErrorStays) {
  OpenAndBegin();
  ASSERT_TRUE(PushChunk(0).ok());
  fake_->Break(absl::AbortedError("generation 4 has begun"));
  const absl::Status first = PushChunk(1);
  EXPECT_TRUE(Refused(first, absl::StatusCode::kAborted));
  EXPECT_EQ(session_->EndMicroStep(0, {}), first);
  EXPECT_EQ(session_->Seal(1, SmallVote()).status(), first);
  EXPECT_EQ(session_->ReceiveWeights(), first);
  EXPECT_EQ(session_->ReadWeights(), first);
  EXPECT_EQ(session_->SaveCheckpoint("/c"), first);
}

TEST_F(SessionImplTest, AnErrorWakesABlockedPushAndASeal) {
  OpenAndBegin();
  ASSERT_TRUE(PushChunk(0).ok());
  ASSERT_TRUE(PushChunk(1).ok());
  std::thread pusher([&] { EXPECT_EQ(PushChunk(2).code(), absl::StatusCode::kUnavailable); });
  std::thread breaker([&] {
    EXPECT_TRUE(fake_->AwaitSent(5));  // Open, begin, two gradients, seal.
    fake_->Break(absl::UnavailableError("gone"));
  });
  EXPECT_TRUE(Refused(session_->Seal(1, SmallVote()), absl::StatusCode::kUnavailable));
  pusher.join();
  breaker.join();
}

TEST_F(SessionImplTest, AStepThatWasCommittedBeforeTheStreamEndedIsReceived) {
  OpenAndBegin();
  Decide(5, false);
  ASSERT_TRUE(session_->Seal(1, SmallVote()).ok());
  Commit(5);
  fake_->Break(absl::UnavailableError("gone"));
  EXPECT_TRUE(session_->ReceiveWeights().ok());
  EXPECT_EQ(session_->committed_step(), 5u);
  EXPECT_TRUE(Refused(session_->BeginStep({}), absl::StatusCode::kUnavailable));
}

TEST_F(SessionImplTest, WeightsThatHaveComeNeedNotWaitForTheOthers) {
  options_.seal_timeout = absl::ZeroDuration();
  std::vector<int> told;
  options_.on_weights = [&](int chunk) { told.push_back(chunk); };
  OpenAndBegin();
  EXPECT_TRUE(Refused(session_->AwaitWeights({0}), absl::StatusCode::kFailedPrecondition));
  Decide(5, true);
  for (const int chunk : {3, 1}) SendWeights(5, chunk, {WeightsOf(chunk)});
  EXPECT_THAT(told, testing::ElementsAre(3, 1));
  EXPECT_TRUE(session_->AwaitWeights({1, 3}).ok());
  EXPECT_EQ(memory_[1], WeightsOf(1));
  EXPECT_TRUE(session_->AwaitWeights({}).ok());
  EXPECT_TRUE(Refused(session_->AwaitWeights({1, 2}), absl::StatusCode::kDeadlineExceeded));
  EXPECT_TRUE(Refused(session_->BeginStep({}), absl::StatusCode::kFailedPrecondition));
  for (const int chunk : {0, 2, 4}) SendWeights(5, chunk, {WeightsOf(chunk)});
  EXPECT_TRUE(session_->AwaitWeights({0, 1, 2, 3, 4}).ok());
  Commit(5);
  ASSERT_TRUE(session_->ReceiveWeights().ok());
  EXPECT_FALSE(session_->AwaitWeights({0}).ok());  // They were of the step that is over.
  ASSERT_TRUE(session_->BeginStep({}).ok());
  Decide(6, true);
  EXPECT_TRUE(Refused(session_->AwaitWeights({1}), absl::StatusCode::kDeadlineExceeded));
}

TEST_F(SessionImplTest, WhoAwaitsWeightsIsWokenByThemAndByAnError) {
  OpenAndBegin();
  Decide(5, true);
  std::thread service([&] { SendWeights(5, 2, {WeightsOf(2)}); });
  EXPECT_TRUE(session_->AwaitWeights({2}).ok());
  service.join();
  std::thread breaker([&] { fake_->Break(absl::UnavailableError("gone")); });
  EXPECT_TRUE(Refused(session_->AwaitWeights({1}), absl::StatusCode::kUnavailable));
  breaker.join();
}

TEST_F(SessionImplTest, NobodyAwaitsWeightsOfASkippedStep) {
  OpenAndBegin();
  Decide(5, false);
  EXPECT_TRUE(session_->AwaitWeights({0, 4}).ok());
}

TEST_F(SessionImplTest, AStepThatWasDecidedButNotCommittedIsNotReceived) {
  OpenAndBegin();
  Decide(5, false);
  ASSERT_TRUE(session_->Seal(1, SmallVote()).ok());
  fake_->Break(absl::UnavailableError("gone"));
  EXPECT_TRUE(Refused(session_->ReceiveWeights(), absl::StatusCode::kUnavailable));
  EXPECT_EQ(session_->committed_step(), 4u);
}

TEST_F(SessionImplTest, WarnsOnTheErrorOutputWhomTheServiceWaitsFor) {
  OpenAndBegin();
  v1::TrainResponse waiting;
  waiting.mutable_waiting()->set_step(5);
  waiting.mutable_waiting()->add_ranks(2);
  testing::internal::CaptureStdout();
  testing::internal::CaptureStderr();
  fake_->Deliver(waiting);
  EXPECT_EQ(testing::internal::GetCapturedStdout(), "");
  EXPECT_THAT(testing::internal::GetCapturedStderr(),
              HasSubstr("step 5: sealed; the service waits for rank 2"));
}

TEST_F(SessionImplTest, AnEndOfTheStreamWithoutErrorIsOne) {
  OpenAndBegin();
  fake_->Break(absl::OkStatus());
  EXPECT_TRUE(Refused(PushChunk(0), absl::StatusCode::kUnavailable));
}

TEST_F(SessionImplTest, WeightsThatWereNotDecidedAreRefused) {
  OpenAndBegin();
  SendWeights(5, 0, {std::string(512, 'x')});
  EXPECT_TRUE(memory_.empty());
  EXPECT_TRUE(Refused(PushChunk(0), absl::StatusCode::kInternal));
}

TEST_F(SessionImplTest, WeightsOfASkippedStepAreRefused) {
  OpenAndBegin();
  Decide(5, false);
  SendWeights(5, 0, {std::string(512, 'x')});
  EXPECT_TRUE(memory_.empty());
  EXPECT_TRUE(Refused(session_->ReceiveWeights(), absl::StatusCode::kInternal));
}

TEST_F(SessionImplTest, ACommittedStepWithoutAllWeightsIsDataLoss) {
  OpenAndBegin();
  Decide(5, true);
  SendWeights(5, 0, {std::string(512, 'x')});
  Commit(5);
  EXPECT_TRUE(Refused(session_->ReceiveWeights(), absl::StatusCode::kDataLoss));
}

TEST_F(SessionImplTest, AcknowledgementOfMoreThanWasSentIsAnError) {
  OpenAndBegin();
  Acknowledge(3);
  EXPECT_TRUE(Refused(PushChunk(0), absl::StatusCode::kInternal));
}

TEST_F(SessionImplTest, CallsOutOfOrderAreRefusedAndHarmless) {
  ASSERT_TRUE(Open().ok());
  EXPECT_TRUE(Refused(PushChunk(0), absl::StatusCode::kFailedPrecondition));
  EXPECT_FALSE(session_->Seal(1, SmallVote()).ok());
  EXPECT_FALSE(session_->ReceiveWeights().ok());
  ASSERT_TRUE(session_->BeginStep({}).ok());
  EXPECT_TRUE(Refused(session_->BeginStep({}), absl::StatusCode::kFailedPrecondition));
  EXPECT_TRUE(Refused(session_->ReceiveWeights(), absl::StatusCode::kFailedPrecondition));
  EXPECT_TRUE(PushChunk(0).ok());
}

TEST_F(SessionImplTest, ReadWeightsNeedsEveryChunk) {
  v1::Job ready;
  ready.set_phase(v1::READY);
  fake_->jobs = {ready};
  fake_->read_step = 6;
  for (uint32_t chunk = 0; chunk < 4; ++chunk) {
    fake_->stored_weights.emplace_back(chunk, std::string(512, static_cast<char>('a' + chunk)));
  }
  ASSERT_TRUE(Open().ok());
  EXPECT_TRUE(Refused(session_->ReadWeights(), absl::StatusCode::kDataLoss));
  fake_->stored_weights.emplace_back(4, std::string(1024, 'e'));
  ASSERT_TRUE(session_->ReadWeights().ok());
  EXPECT_EQ(session_->committed_step(), 6u);
  EXPECT_EQ(memory_[4], std::string(1024, 'e'));
}

TEST_F(SessionImplTest, ReadWeightsGoesOnWhereAnUnavailableServiceBrokeOff) {
  options_.reconnect_timeout = absl::Seconds(5);
  v1::Job ready;
  ready.set_phase(v1::READY);
  fake_->jobs = {ready};
  fake_->read_step = 6;
  std::map<int, int> calls;
  options_.on_weights = [&](int chunk) { ++calls[chunk]; };
  for (int chunk = 0; chunk < 5; ++chunk) {
    fake_->stored_weights.emplace_back(chunk, WeightsOf(chunk));
  }
  fake_->read_failures = {{0, absl::UnavailableError("not yet")},
                          {2, absl::UnavailableError("gone")}};
  ASSERT_TRUE(Open().ok());
  ASSERT_TRUE(session_->ReadWeights().ok());
  for (int chunk = 0; chunk < 5; ++chunk) EXPECT_EQ(memory_[chunk], WeightsOf(chunk));
  EXPECT_EQ(calls, (std::map<int, int>{{0, 1}, {1, 1}, {2, 1}, {3, 1}, {4, 1}}));
  ASSERT_EQ(fake_->reads.size(), 3u);
  EXPECT_FALSE(fake_->reads[1].has_step());
  // The rest must be of the same step as the first weights.
  EXPECT_EQ(fake_->reads[2].step(), 6u);
  EXPECT_EQ(fake_->reads[2].chunks_size(), 3);
}

TEST_F(SessionImplTest, ReadWeightsGivesUpAfterTheReconnectTimeoutAndAtOnceOtherwise) {
  options_.reconnect_timeout = absl::Seconds(5);
  v1::Job ready;
  ready.set_phase(v1::READY);
  fake_->jobs = {ready};
  ASSERT_TRUE(Open().ok());
  fake_->read_failures.assign(100, {0, absl::UnavailableError("gone")});
  const absl::Time start = clock_.Now();
  EXPECT_TRUE(Refused(session_->ReadWeights(), absl::StatusCode::kUnavailable));
  EXPECT_EQ(clock_.Now() - start, absl::Seconds(5));
  fake_->read_failures = {{0, absl::AbortedError("generation 4")}};
  EXPECT_TRUE(Refused(session_->ReadWeights(), absl::StatusCode::kAborted));
}

TEST_F(SessionImplTest, UploadsEveryChunkOfTheRank) {
  fake_->attachment.set_awaiting_weights(true);
  ASSERT_TRUE(Open().ok());
  EXPECT_TRUE(session_->awaiting_weights());
  ASSERT_TRUE(session_
                  ->UploadWeights([](int chunk, absl::Span<float> out) {
                    std::fill(out.begin(), out.end(), static_cast<float>(chunk));
                  })
                  .ok());
  ASSERT_EQ(fake_->uploaded.size(), 5u);
  EXPECT_EQ(fake_->uploaded[3].second, std::vector<float>(256, 3.0f));
}

TEST_F(SessionImplTest, UploadsMomentsBehindTheWeights) {
  fake_->attachment.set_awaiting_weights(true);
  fake_->attachment.set_committed_step(0);
  options_.job.groups[0].hyper_parameters.amsgrad = true;
  ASSERT_TRUE(Open().ok());
  const size_t parameters = options_.job.layout.parameters.size();
  FirstState state = {.step = 7, .update_counts = std::vector<int64_t>(parameters, 6)};
  const auto upload = [&] {
    return session_->UploadState(state, [](int chunk, absl::Span<float> out) {
      std::fill(out.begin(), out.end(), static_cast<float>(chunk));
    });
  };
  fake_->upload_results = {absl::InvalidArgumentError("refused")};
  EXPECT_TRUE(absl::IsInvalidArgument(upload()));
  EXPECT_EQ(session_->committed_step(), 0u) << "the job has no weights";
  ASSERT_TRUE(upload().ok());
  ASSERT_EQ(fake_->uploaded.size(), 5u);
  for (const auto& [chunk, values] : fake_->uploaded) {
    const Chunk& of = session_->layout().chunks()[chunk];
    EXPECT_EQ(values,
              std::vector<float>((of.group == 0 ? 4 : 3) * of.elements, static_cast<float>(chunk)));
  }
  EXPECT_EQ(fake_->uploaded_state.step(), 7u);
  EXPECT_EQ(fake_->uploaded_state.update_counts_size(), static_cast<int>(parameters));
  EXPECT_EQ(fake_->uploaded_state.update_counts(0), 6);
  EXPECT_EQ(session_->committed_step(), 7u);
  ASSERT_TRUE(session_->BeginStep({}).ok());
  ASSERT_TRUE(fake_->AwaitSent(2));
  EXPECT_EQ(fake_->sent().at(1).begin_step().step(), 8u);
}

// It gets no weights, which would tell it.
TEST_F(SessionImplTest, ARankWithoutChunksIsAtTheStepThatTheOthersGave) {
  options_.job.layout.world_size = 2;
  options_.rank = 1;
  fake_->attachment.set_awaiting_weights(true);
  fake_->attachment.set_committed_step(0);
  v1::Job job;
  job.set_phase(v1::READY);
  job.set_committed_step(7);
  fake_->jobs = {job};
  ASSERT_TRUE(Open().ok());
  ASSERT_TRUE(session_->layout().chunks_of_rank(1).empty());
  ASSERT_TRUE(session_->UploadWeights([](int, absl::Span<float>) {}).ok());
  ASSERT_TRUE(session_->ReadWeights().ok());
  EXPECT_EQ(session_->committed_step(), 7u);
  ASSERT_TRUE(session_->BeginStep({}).ok());
  ASSERT_TRUE(fake_->AwaitSent(2));
  EXPECT_EQ(fake_->sent().at(1).begin_step().step(), 8u);
}

TEST_F(SessionImplTest, AStateThatNoRunLeavesIsNotSent) {
  fake_->attachment.set_awaiting_weights(true);
  ASSERT_TRUE(Open().ok());
  const size_t parameters = options_.job.layout.parameters.size();
  const auto upload = [&](const FirstState& state) {
    return session_->UploadState(state, [](int, absl::Span<float>) {});
  };
  EXPECT_TRUE(Refused(upload({}), absl::StatusCode::kInvalidArgument));
  EXPECT_TRUE(
      Refused(upload({.step = 2, .update_counts = {2}}), absl::StatusCode::kInvalidArgument));
  EXPECT_TRUE(Refused(upload({.step = 2, .update_counts = std::vector<int64_t>(parameters, 3)}),
                      absl::StatusCode::kInvalidArgument));
  EXPECT_TRUE(fake_->uploaded.empty());
}

TEST_F(SessionImplTest, UploadIsRepeatedUntilTheServiceHasTheWeights) {
  options_.reconnect_timeout = absl::Seconds(5);
  fake_->attachment.set_awaiting_weights(true);
  v1::Job job;
  job.set_phase(v1::READY);
  fake_->jobs = {job};
  ASSERT_TRUE(Open().ok());
  const auto upload = [&] {
    fake_->uploaded.clear();
    return session_->UploadWeights([](int, absl::Span<float>) {});
  };
  fake_->upload_results = {absl::UnavailableError("socket closed"),
                           absl::AbortedError("rank 0 is not held by this process")};
  EXPECT_TRUE(upload().ok());
  EXPECT_EQ(fake_->uploaded.size(), 5u);
  // The answer was lost, and the job has its weights.
  fake_->upload_results = {absl::UnavailableError("socket closed"),
                           absl::FailedPreconditionError("job gpt has its weights")};
  EXPECT_TRUE(upload().ok());
  EXPECT_TRUE(fake_->uploaded.empty());
  // The job does not have its weights.
  job.set_phase(v1::AWAITING_WEIGHTS);
  fake_->jobs = {job};
  fake_->upload_results = {absl::UnavailableError("socket closed"),
                           absl::FailedPreconditionError("something else")};
  EXPECT_TRUE(Refused(upload(), absl::StatusCode::kFailedPrecondition));
  // The job had its weights before the first attempt.
  job.set_phase(v1::READY);
  fake_->jobs = {job};
  fake_->upload_results = {absl::FailedPreconditionError("job gpt has its weights")};
  EXPECT_EQ(upload().code(), absl::StatusCode::kFailedPrecondition);
}

TEST_F(SessionImplTest, CallsBetweenStepsAreRepeatedWhileTheServiceIsUnavailable) {
  options_.reconnect_timeout = absl::Seconds(5);
  v1::Job waiting;
  waiting.set_phase(v1::AWAITING_WEIGHTS);
  v1::Job ready;
  ready.set_phase(v1::READY);
  ready.set_applied_steps(7);
  fake_->jobs = {waiting, ready};
  for (int chunk = 0; chunk < 5; ++chunk) {
    fake_->stored_weights.emplace_back(chunk, WeightsOf(chunk));
  }
  ASSERT_TRUE(Open().ok());
  fake_->get_results = {absl::UnavailableError("gone"), absl::OkStatus(),
                        absl::UnavailableError("gone")};
  EXPECT_TRUE(session_->ReadWeights().ok());
  fake_->get_results = {absl::UnavailableError("gone")};
  EXPECT_EQ(session_->ReadCounts()->applied_steps, 7u);
  fake_->get_results.assign(1000, absl::UnavailableError("gone"));
  const absl::Time start = clock_.Now();
  EXPECT_TRUE(Refused(session_->ReadCounts(), absl::StatusCode::kUnavailable));
  EXPECT_EQ(clock_.Now() - start, options_.reconnect_timeout);
}

TEST_F(SessionImplTest, AnotherJobOfTheNameIsNotCounted) {
  ASSERT_TRUE(Open().ok());
  v1::Job other;
  other.set_uid("another");
  fake_->jobs = {other};
  EXPECT_TRUE(Refused(session_->ReadCounts(), absl::StatusCode::kNotFound));
}

TEST_F(SessionImplTest, ASessionThatEndedAsksNothing) {
  ASSERT_TRUE(Open().ok());
  fake_->jobs = {v1::Job()};
  EXPECT_TRUE(session_->ReadCounts().ok());
  fake_->Break(absl::AbortedError("generation 4 has begun"));
  EXPECT_TRUE(Refused(session_->ReadCounts(), absl::StatusCode::kAborted));
}

// Whether the thread waits for something: the system has it asleep.
bool IsAsleep(pid_t thread) {
  const std::string stat = absl::StrCat("/proc/self/task/", thread, "/stat");
  std::ifstream file(stat);
  std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  return text.find(") S ") != std::string::npos;
}

TEST_F(SessionImplTest, DestructionWaitsForAPushThatItWakes) {
  OpenAndBegin();
  ASSERT_TRUE(PushChunk(0).ok());
  ASSERT_TRUE(PushChunk(1).ok());
  std::atomic<pid_t> begun = 0;
  std::atomic<bool> returned = false;
  std::thread pusher([&, session = session_.get()] {
    GradientPush push;
    push.chunk = 2;
    push.payload = absl::MakeConstSpan(gradient_).subspan(0, 512);
    begun = gettid();
    const absl::Status status = session->Push(push);
    returned = true;
    EXPECT_EQ(status.code(), absl::StatusCode::kCancelled) << status;
  });
  // The full window is all that it waits for. The error that this test finds, a push that returns
  // into a destroyed session, needs a sanitizer to be seen.
  while (!returned && (begun == 0 || !IsAsleep(begun))) std::this_thread::yield();
  fake_->LetGo();
  session_.reset();
  pusher.join();
}

TEST_F(SessionImplTest, APushThatWaitsCanBeEnded) {
  OpenAndBegin();
  ASSERT_TRUE(PushChunk(0).ok());
  ASSERT_TRUE(PushChunk(1).ok());
  std::thread pusher([&] { EXPECT_EQ(PushChunk(2).code(), absl::StatusCode::kCancelled); });
  EXPECT_FALSE(fake_->AwaitSent(5, std::chrono::milliseconds(300)));
  session_->EndPushes();
  pusher.join();
  EXPECT_TRUE(Refused(PushChunk(2), absl::StatusCode::kCancelled));
  EXPECT_TRUE(Refused(session_->Seal(1), absl::StatusCode::kCancelled));
  fake_->LetGo();
}

TEST_F(SessionImplTest, OpeningGoesOnWhenAStreamBreaksOrTheRankIsSetFree) {
  options_.reconnect_timeout = absl::Seconds(5);
  fake_->attachment.set_instance_id("first run");
  for (const absl::Status& status :
       {absl::UnavailableError("gone"), absl::AbortedError("rank 0 is not held by this process")}) {
    session_.reset();
    auto transport = std::make_unique<FakeTransport>();
    fake_ = transport.get();
    transport_ = std::move(transport);
    fake_->attachment.set_uid("u");
    fake_->open_error = status;
    fake_->on_stream = [&] {
      if (fake_->streams() == 1) fake_->open_error = absl::OkStatus();
    };
    ASSERT_TRUE(Open().ok()) << status;
    EXPECT_EQ(fake_->attaches, 2);
    EXPECT_EQ(fake_->creates, 1);
    // The process joined this job before, and had the rank.
    EXPECT_EQ(fake_->last_attach.uid(), "u");
    EXPECT_TRUE(fake_->last_attach.rejoin());
  }
}

TEST_F(SessionImplTest, AStepCommittedBetweenAttachingAndOpeningIsSeen) {
  options_.reconnect_timeout = absl::Seconds(5);
  v1::Opened opened;
  opened.set_committed_step(5);
  fake_->opened = {opened};
  fake_->on_stream = [&] { fake_->attachment.set_committed_step(5); };
  ASSERT_TRUE(Open().ok());
  EXPECT_EQ(session_->committed_step(), 5u);
  EXPECT_EQ(fake_->attaches, 2);
}

TEST_F(SessionImplTest, AfterALoadTheSessionIsOver) {
  ASSERT_TRUE(Open().ok());
  fake_->load_result = absl::NotFoundError("no checkpoint there");
  EXPECT_TRUE(Refused(session_->LoadCheckpoint("/c"), absl::StatusCode::kNotFound));
  fake_->load_result = absl::OkStatus();
  EXPECT_TRUE(session_->LoadCheckpoint("/c").ok());
  EXPECT_TRUE(
      Refused(session_->BeginStep({}), absl::StatusCode::kAborted, reason::kOlderGeneration));
}

TEST_F(SessionImplTest, AfterAnUndoTheSessionIsOver) {
  fake_->attachment.set_committed_step(7);
  ASSERT_TRUE(Open().ok());
  fake_->undo_result = absl::FailedPreconditionError("there is nothing to undo");
  EXPECT_TRUE(Refused(session_->UndoStep(), absl::StatusCode::kFailedPrecondition));
  fake_->undo_result = absl::OkStatus();
  EXPECT_EQ(session_->UndoStep().value(), 7u) << "a refusal ends nothing";
  EXPECT_TRUE(
      Refused(session_->BeginStep({}), absl::StatusCode::kAborted, reason::kOlderGeneration));
}

TEST_F(SessionImplTest, AnUndoWhoseAnswerIsLostIsAskedForAgainAsTheSame) {
  options_.reconnect_timeout = absl::Seconds(5);
  fake_->attachment.set_committed_step(7);
  fake_->attachment.mutable_generation()->set_epoch(1);
  fake_->attachment.mutable_generation()->set_count(3);
  ASSERT_TRUE(Open().ok());
  fake_->undos_lost = 2;
  EXPECT_EQ(session_->UndoStep().value(), 7u);
  ASSERT_EQ(fake_->undo_requests.size(), 3u);
  for (const v1::UndoStepRequest& request : fake_->undo_requests) {
    EXPECT_EQ(request.step(), 7u);
    EXPECT_EQ(request.generation().epoch(), 1u);
    EXPECT_EQ(request.generation().count(), 3u);
  }
}

TEST_F(SessionImplTest, AnUndoIsNotAskedForWithoutAnEnd) {
  options_.reconnect_timeout = absl::Seconds(5);
  ASSERT_TRUE(Open().ok());
  fake_->undos_lost = 1000;
  EXPECT_TRUE(Refused(session_->UndoStep(), absl::StatusCode::kUnavailable));
}

TEST_F(SessionImplTest, AnUndoIsOfCommittedStepsAlone) {
  ASSERT_TRUE(Open().ok());
  ASSERT_TRUE(session_->BeginStep({}).ok());
  EXPECT_TRUE(Refused(session_->UndoStep(), absl::StatusCode::kFailedPrecondition));
}

}  // namespace
}  // namespace ballast::client
