#include "client/session/send_log.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/client/session/message_name.h"
#include "tests/support/messages.h"

namespace ballast::client {
namespace {

using testing::ElementsAre;

// Keeps the sent messages, and borrows every payload until LetGo.
class RecordingStream final : public TrainCall {
 public:
  void Send(const v1::TrainRequest& message) override { names.push_back(NameOf(message)); }
  void SendGradient(const v1::GradientHeader& header, absl::Span<const std::byte> payload,
                    std::function<void()> let_go) override {
    names.push_back(NameOf(header));
    payloads.push_back(payload.data());
    borrowed.push_back(std::move(let_go));
  }
  void SendSharedGradient(const v1::GradientHeader& header) override {
    names.push_back("shared " + NameOf(header));
  }
  void LetGo() {
    for (std::function<void()>& let_go : std::exchange(borrowed, {})) let_go();
  }

  std::vector<std::string> names;
  std::vector<const std::byte*> payloads;
  std::vector<std::function<void()>> borrowed;
};

class SendLogTest : public testing::Test {
 protected:
  void TearDown() override { stream_.LetGo(); }

  static v1::TrainRequest Begin(uint64_t step) {
    v1::TrainRequest message;
    message.mutable_begin_step()->set_step(step);
    return message;
  }
  static v1::TrainRequest End(uint64_t step, uint32_t micro_step) {
    v1::TrainRequest message;
    message.mutable_end_micro_step()->set_step(step);
    message.mutable_end_micro_step()->set_micro_step(micro_step);
    return message;
  }
  static v1::TrainRequest Seal(uint64_t step, uint32_t micro_steps) {
    v1::TrainRequest message;
    message.mutable_seal()->set_step(step);
    message.mutable_seal()->set_micro_steps(micro_steps);
    return message;
  }
  // Sends a contribution of `bytes` bytes and counts calls of `released`.
  absl::Status Push(SendLog& log, size_t bytes, std::atomic<int>* released = nullptr,
                    uint32_t chunk = 0, uint32_t micro_step = 0, uint64_t step = 5) {
    v1::GradientHeader header;
    header.set_step(step);
    header.set_chunk(chunk);
    header.set_micro_step_begin(micro_step);
    header.set_micro_step_end(micro_step + 1);
    return log.SendGradient(header, absl::MakeConstSpan(memory_).subspan(0, bytes), [released] {
      if (released != nullptr) ++*released;
    });
  }
  // Sends chunks 0 to 2 of step 5 and counts calls of `released` by chunk.
  void PushThreeShared(SendLog& log, std::vector<int>& released) {
    for (uint32_t chunk = 0; chunk < 3; ++chunk) {
      v1::GradientHeader header;
      header.set_step(5);
      header.set_chunk(chunk);
      header.set_micro_step_end(1);
      const auto place = absl::MakeConstSpan(memory_).subspan(10 * chunk, 10);
      ASSERT_TRUE(
          log.SendSharedGradient(header, place, [&released, chunk] { ++released[chunk]; }).ok());
    }
  }
  static v1::Opened Delivered(uint64_t open_step, uint32_t micro_steps_ended,
                              std::vector<std::pair<uint32_t, uint32_t>> chunks) {
    v1::Opened opened;
    opened.set_open_step(open_step);
    opened.set_micro_steps_ended(micro_steps_ended);
    for (const auto& [chunk, next] : chunks) {
      v1::ChunkCount& count = *opened.add_delivered();
      count.set_chunk(chunk);
      count.set_next_micro_step(next);
    }
    return opened;
  }

  std::vector<std::byte> memory_ = std::vector<std::byte>(1000);
  RecordingStream stream_;
};

TEST_F(SendLogTest, ReleasesOnceAfterAcknowledgementAndLettingGo) {
  SendLog log(1000);
  log.Resume(stream_, {});
  std::atomic<int> first = 0;
  std::atomic<int> second = 0;
  ASSERT_TRUE(Push(log, 10, &first).ok());
  ASSERT_TRUE(Push(log, 20, &second).ok());
  EXPECT_EQ(log.unacknowledged_bytes(), 30);

  // Acknowledged, but the transport still reads the bytes. The open message was the first.
  ASSERT_TRUE(log.Acknowledge(2).ok());
  EXPECT_EQ(log.unacknowledged_bytes(), 20);
  EXPECT_EQ(first, 0);
  stream_.LetGo();
  EXPECT_EQ(first, 1);
  // The transport no longer uses it, but the service has not acknowledged.
  EXPECT_EQ(second, 0);
  ASSERT_TRUE(log.Acknowledge(3).ok());
  EXPECT_EQ(second, 1);
  ASSERT_TRUE(log.Acknowledge(3).ok());
  EXPECT_EQ(first, 1);
  EXPECT_EQ(second, 1);
}

TEST_F(SendLogTest, SharedGradientsTakeNoRoomAndAreReleasedByAcknowledgementAlone) {
  SendLog log(100);
  log.Resume(stream_, {});
  ASSERT_TRUE(Push(log, 100).ok());
  std::vector<int> released(3);
  ASSERT_NO_FATAL_FAILURE(PushThreeShared(log, released));
  EXPECT_EQ(log.unacknowledged_bytes(), 100);
  EXPECT_EQ(stream_.names.back(), "shared gradient 5 chunk 2 [0, 1)");
  // Each counts as a message.
  ASSERT_TRUE(log.Acknowledge(4).ok());
  EXPECT_THAT(released, ElementsAre(1, 1, 0));
  EXPECT_FALSE(log.Acknowledge(6).ok());
  log.Close(absl::CancelledError("closed"));
  EXPECT_THAT(released, ElementsAre(1, 1, 1));
  EXPECT_EQ(log.SendSharedGradient({}, memory_, [&released] { ++released[0]; }).code(),
            absl::StatusCode::kCancelled);
  EXPECT_THAT(released, ElementsAre(2, 1, 1));
  stream_.LetGo();  // Otherwise the log would wait for it.
}

TEST_F(SendLogTest, SharedGradientsAreSentAgainIfTheServiceDoesNotHoldThem) {
  SendLog log(100);
  std::vector<int> released(3);
  ASSERT_NO_FATAL_FAILURE(PushThreeShared(log, released));
  log.Resume(stream_, Delivered(5, 0, {{1, 1}}));
  EXPECT_THAT(stream_.names,
              ElementsAre("shared gradient 5 chunk 0 [0, 1)", "shared gradient 5 chunk 2 [0, 1)"));
  EXPECT_THAT(released, ElementsAre(0, 1, 0));
  ASSERT_TRUE(log.Acknowledge(3).ok());
  EXPECT_THAT(released, ElementsAre(1, 1, 1));
}

TEST_F(SendLogTest, SharedGradientsAreSentWithTheirBytesOnceTheServiceSharesNothing) {
  SendLog log(100);
  std::vector<int> released(3);
  ASSERT_NO_FATAL_FAILURE(PushThreeShared(log, released));
  log.SharesNothing();
  EXPECT_EQ(log.unacknowledged_bytes(), 30);
  log.Resume(stream_, Delivered(5, 0, {{1, 1}}));
  EXPECT_THAT(stream_.names, ElementsAre("gradient 5 chunk 0 [0, 1)", "gradient 5 chunk 2 [0, 1)"));
  EXPECT_THAT(stream_.payloads, ElementsAre(memory_.data(), memory_.data() + 20));
  EXPECT_EQ(log.unacknowledged_bytes(), 20);
  v1::GradientHeader header;
  header.set_step(5);
  header.set_chunk(3);
  const auto place = absl::MakeConstSpan(memory_).subspan(30, 10);
  ASSERT_TRUE(log.SendSharedGradient(header, place, [&released] { ++released[1]; }).ok());
  EXPECT_EQ(stream_.payloads.back(), place.data());
  stream_.LetGo();
  ASSERT_TRUE(log.Acknowledge(4).ok());
  EXPECT_THAT(released, ElementsAre(1, 2, 1));
  EXPECT_EQ(log.unacknowledged_bytes(), 0);
}

TEST_F(SendLogTest, BlocksUntilAcknowledgedWhenFull) {
  SendLog log(100);
  log.Resume(stream_, {});
  ASSERT_TRUE(Push(log, 60).ok());
  std::atomic<bool> sent = false;
  std::atomic<bool> acknowledged = false;
  std::thread sender([&] {
    EXPECT_TRUE(Push(log, 60).ok());
    EXPECT_TRUE(acknowledged);
    sent = true;
  });
  // A window that does not block has time to show it here; one that blocks cannot fail here.
  const auto limit = std::chrono::steady_clock::now() + std::chrono::milliseconds(50);
  while (!sent && std::chrono::steady_clock::now() < limit) std::this_thread::yield();
  EXPECT_FALSE(sent);
  acknowledged = true;
  ASSERT_TRUE(log.Acknowledge(2).ok());
  sender.join();
  EXPECT_EQ(log.unacknowledged_bytes(), 60);
  stream_.LetGo();
}

TEST_F(SendLogTest, GivesUpAfterItsTimeoutAndLogsNothing) {
  SendLog log(100, absl::Milliseconds(20));
  log.Resume(stream_, {});
  std::atomic<int> released = 0;
  ASSERT_TRUE(Push(log, 60).ok());
  const absl::Status status = Push(log, 60, &released);
  EXPECT_TRUE(Refused(status, absl::StatusCode::kDeadlineExceeded));
  EXPECT_EQ(released, 1);
  EXPECT_EQ(stream_.borrowed.size(), 1u);
  // It was not counted: the next message is the third.
  ASSERT_TRUE(log.Acknowledge(2).ok());
  EXPECT_TRUE(Push(log, 60).ok());
  EXPECT_EQ(log.Acknowledge(4).code(), absl::StatusCode::kInternal);
  stream_.LetGo();
}

TEST_F(SendLogTest, PassesAPayloadLargerThanItselfWhenEmpty) {
  SendLog log(100);
  log.Resume(stream_, {});
  EXPECT_TRUE(Push(log, 1000).ok());
  stream_.LetGo();
}

TEST_F(SendLogTest, CountsControlMessagesInTheNumbers) {
  SendLog log(100);
  log.Resume(stream_, {});
  std::atomic<int> released = 0;
  ASSERT_TRUE(log.Send(Begin(5)).ok());
  ASSERT_TRUE(Push(log, 10, &released).ok());
  stream_.LetGo();
  EXPECT_THAT(stream_.names, ElementsAre("begin 5", "gradient 5 chunk 0 [0, 1)"));
  ASSERT_TRUE(log.Acknowledge(2).ok());
  EXPECT_EQ(released, 0);
  ASSERT_TRUE(log.Acknowledge(3).ok());
  EXPECT_EQ(released, 1);
}

TEST_F(SendLogTest, RefusesAcknowledgementOfMoreThanWasSent) {
  SendLog log(100);
  log.Resume(stream_, {});
  ASSERT_TRUE(log.Acknowledge(1).ok());
  ASSERT_TRUE(log.Send(Begin(5)).ok());
  EXPECT_EQ(log.Acknowledge(3).code(), absl::StatusCode::kInternal);
}

TEST_F(SendLogTest, ReleasesAndRefusesWhenClosed) {
  SendLog log(100);
  log.Resume(stream_, {});
  std::atomic<int> released = 0;
  ASSERT_TRUE(Push(log, 100, &released).ok());
  std::thread sender([&] { EXPECT_FALSE(Push(log, 100, &released).ok()); });
  log.Close(absl::UnavailableError("broken"));
  log.Close(absl::UnavailableError("later"));
  sender.join();
  EXPECT_EQ(stream_.borrowed.size(), 1u);
  EXPECT_EQ(released, 1);  // The refused one; the transport still uses the other.
  stream_.LetGo();
  EXPECT_EQ(released, 2);
  EXPECT_TRUE(Refused(log.Send(Begin(5)), absl::StatusCode::kUnavailable));
}

TEST_F(SendLogTest, DestructionWaitsForTheTransport) {
  std::atomic<bool> let_go = false;
  std::atomic<bool> destroyed = false;
  auto log = std::make_unique<SendLog>(100);
  log->Resume(stream_, {});
  ASSERT_TRUE(log->SendGradient({}, absl::MakeConstSpan(memory_).subspan(0, 10),
                                [&] { EXPECT_TRUE(let_go); })
                  .ok());
  std::thread owner([&] {
    log.reset();
    EXPECT_TRUE(let_go);
    destroyed = true;
  });
  EXPECT_FALSE(destroyed);
  let_go = true;
  stream_.LetGo();
  owner.join();
  EXPECT_TRUE(destroyed);
}

TEST_F(SendLogTest, ReleaseMaySendAgain) {
  SendLog log(100);
  log.Resume(stream_, {});
  bool again = false;
  ASSERT_TRUE(log.SendGradient({}, absl::MakeConstSpan(memory_).subspan(0, 100),
                               [&] { again = log.Send(Begin(6)).ok(); })
                  .ok());
  stream_.LetGo();
  ASSERT_TRUE(log.Acknowledge(2).ok());
  EXPECT_TRUE(again);
}

// ---------------------------------------------------------------- a second stream

TEST_F(SendLogTest, SendsWhatWasNotAcknowledgedAgainInOrderAndInPlace) {
  SendLog log(1000);
  log.Resume(stream_, {});
  std::atomic<int> released[3] = {};
  ASSERT_TRUE(log.Send(Begin(5)).ok());
  ASSERT_TRUE(Push(log, 10, &released[0], 0).ok());
  ASSERT_TRUE(Push(log, 20, &released[1], 1).ok());
  ASSERT_TRUE(log.Acknowledge(3).ok());
  stream_.LetGo();
  EXPECT_EQ(released[0], 1);
  log.Detach();
  // Without a stream a message is only logged.
  ASSERT_TRUE(Push(log, 30, &released[2], 2).ok());
  ASSERT_TRUE(log.Send(End(5, 0)).ok());
  EXPECT_EQ(stream_.names.size(), 3u);

  RecordingStream second;
  const SendLog::Resumed resumed = log.Resume(second, {});
  EXPECT_EQ(resumed.sent, 3);
  EXPECT_EQ(resumed.arrived, 0);
  EXPECT_THAT(second.names, ElementsAre("gradient 5 chunk 1 [0, 1)", "gradient 5 chunk 2 [0, 1)",
                                        "end 5 micro-step 0"));
  EXPECT_THAT(second.payloads, ElementsAre(memory_.data(), memory_.data()));
  EXPECT_EQ(log.unacknowledged_bytes(), 50);
  // Numbers start again: the open message, and the two gradients.
  ASSERT_TRUE(log.Acknowledge(3).ok());
  EXPECT_EQ(log.unacknowledged_bytes(), 0);
  EXPECT_EQ(released[1], 0);  // The transport still uses it.
  second.LetGo();
  EXPECT_EQ(released[0], 1);
  EXPECT_EQ(released[1], 1);
  EXPECT_EQ(released[2], 1);
  EXPECT_EQ(log.Acknowledge(5).code(), absl::StatusCode::kInternal);
}

TEST_F(SendLogTest, GivesBackWhatTheServiceHoldsInsteadOfSendingIt) {
  SendLog log(1000);
  log.Resume(stream_, {});
  std::atomic<int> held = 0;
  std::atomic<int> wanted = 0;
  ASSERT_TRUE(log.Send(Begin(5)).ok());
  ASSERT_TRUE(Push(log, 10, &held, 0, 0).ok());
  ASSERT_TRUE(Push(log, 10, &held, 1, 0).ok());
  ASSERT_TRUE(log.Send(End(5, 0)).ok());
  ASSERT_TRUE(Push(log, 10, &held, 0, 1).ok());
  ASSERT_TRUE(Push(log, 10, &wanted, 1, 1).ok());
  ASSERT_TRUE(log.Send(End(5, 1)).ok());
  ASSERT_TRUE(log.Send(Seal(5, 2)).ok());
  stream_.LetGo();
  log.Detach();
  EXPECT_EQ(held, 0);
  RecordingStream second;
  const SendLog::Resumed resumed = log.Resume(second, Delivered(5, 1, {{0, 2}, {1, 1}}));
  EXPECT_EQ(resumed.arrived, 5);
  EXPECT_EQ(resumed.sent, 3);
  EXPECT_THAT(second.names,
              ElementsAre("gradient 5 chunk 1 [1, 2)", "end 5 micro-step 1", "seal 5 of 2"));
  EXPECT_EQ(held, 3);
  EXPECT_EQ(wanted, 0);
  EXPECT_EQ(log.unacknowledged_bytes(), 10);
  ASSERT_TRUE(log.Acknowledge(2).ok());
  second.LetGo();
  EXPECT_EQ(wanted, 1);
}

TEST_F(SendLogTest, WhatIsHeldOfAnotherStepDoesNotCount) {
  SendLog log(1000);
  log.Resume(stream_, {});
  ASSERT_TRUE(log.Send(Begin(5)).ok());
  ASSERT_TRUE(Push(log, 10).ok());
  ASSERT_TRUE(log.Send(End(5, 0)).ok());
  log.Detach();
  RecordingStream second;
  EXPECT_EQ(log.Resume(second, Delivered(4, 1, {{0, 1}})).sent, 3);
  log.Close(absl::CancelledError("the test is over"));
  second.LetGo();
  stream_.LetGo();
}

TEST_F(SendLogTest, ASealOfAStepThatIsOverIsNotSentAgain) {
  SendLog log(1 << 20);
  v1::Opened opened;
  opened.set_committed_step(4);
  log.Resume(stream_, opened);
  ASSERT_TRUE(log.Send(Seal(5, 1)).ok());
  ASSERT_TRUE(log.Send(Begin(6)).ok());
  log.Detach();
  RecordingStream second;
  opened.set_committed_step(5);
  EXPECT_EQ(log.Resume(second, opened).sent, 1);
  EXPECT_THAT(second.names, ElementsAre("begin 6"));
}

TEST_F(SendLogTest, ASealIsSentAgainUntilItIsAnswered) {
  SendLog log(1000);
  log.Resume(stream_, {});
  ASSERT_TRUE(log.Send(Begin(5)).ok());
  ASSERT_TRUE(log.Send(Seal(5, 1)).ok());
  ASSERT_TRUE(log.Acknowledge(3).ok());  // Its answer may still be lost.
  RecordingStream second;
  log.Detach();
  log.Resume(second, Delivered(5, 1, {}));
  EXPECT_THAT(second.names, ElementsAre("seal 5 of 1"));
  log.SealRefused(5);  // Not acknowledged, but answered.
  log.Detach();
  RecordingStream third;
  EXPECT_EQ(log.Resume(third, Delivered(5, 1, {})).sent, 0);
  ASSERT_TRUE(log.Send(Seal(5, 2)).ok());
  log.Detach();
  RecordingStream fourth;
  log.Resume(fourth, Delivered(5, 2, {}));
  EXPECT_THAT(fourth.names, ElementsAre("seal 5 of 2"));
  ASSERT_TRUE(log.Acknowledge(2).ok());
  EXPECT_EQ(log.Acknowledge(3).code(), absl::StatusCode::kInternal);
}

TEST_F(SendLogTest, AVoteSaysWhichRefusalsThisStreamHasBrought) {
  const auto vote = [](StepAttempt at) {
    v1::TrainRequest message;
    message.mutable_vote()->set_step(at.step);
    message.mutable_vote()->set_attempt(at.attempt);
    return message;
  };
  SendLog log(100);
  log.Resume(stream_, {});
  ASSERT_TRUE(log.Send(vote(5)).ok());
  log.VoteRefused(5);
  ASSERT_TRUE(log.Send(vote(5)).ok());
  log.VoteRefused(5);
  v1::TrainRequest seal = Seal(5, 2);
  seal.mutable_seal()->mutable_vote();
  ASSERT_TRUE(log.Send(seal).ok());
  ASSERT_TRUE(log.Send(vote({5, 1})).ok());
  log.VoteRefused(5);  // Late.
  log.VoteRefused({5, 1});
  log.VoteRefused(5);
  ASSERT_TRUE(log.Send(vote({5, 1})).ok());
  EXPECT_THAT(stream_.names,
              ElementsAre("vote 5", "vote 5 after 1 refusals", "seal 5 of 2 after 2 refusals",
                          "vote 5 attempt 1", "vote 5 attempt 1 after 1 refusals"));
  log.Detach();
  RecordingStream second;
  log.Resume(second, {});
  EXPECT_THAT(second.names, ElementsAre("seal 5 of 2", "vote 5 attempt 1"));
}

TEST_F(SendLogTest, NothingOfADecidedStepIsSentAgain) {
  SendLog log(100);
  log.Resume(stream_, {});
  std::atomic<int> released = 0;
  ASSERT_TRUE(log.Send(Begin(5)).ok());
  ASSERT_TRUE(Push(log, 100, &released).ok());
  ASSERT_TRUE(log.Send(Seal(5, 1)).ok());
  stream_.LetGo();
  EXPECT_EQ(released, 0);
  log.StepDecided();
  EXPECT_EQ(released, 1);
  // The window is empty, and late acknowledgements have no effect.
  ASSERT_TRUE(log.Send(Begin(6)).ok());
  ASSERT_TRUE(Push(log, 100, &released, 0, 0, 6).ok());
  ASSERT_TRUE(log.Acknowledge(4).ok());
  EXPECT_EQ(log.unacknowledged_bytes(), 100);
  log.Detach();
  RecordingStream second;
  log.Resume(second, {});
  EXPECT_THAT(second.names, ElementsAre("begin 6", "gradient 6 chunk 0 [0, 1)"));
  log.StepDecided();
  second.LetGo();
  stream_.LetGo();
  EXPECT_EQ(released, 2);
}

TEST_F(SendLogTest, ResumingAfterTheEndSendsNothing) {
  SendLog log(100);
  ASSERT_TRUE(log.Send(Begin(5)).ok());
  log.Close(absl::AbortedError("over"));
  log.Resume(stream_, {});
  EXPECT_TRUE(stream_.names.empty());
}

}  // namespace
}  // namespace ballast::client
