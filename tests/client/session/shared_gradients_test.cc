// Which pushes go through shared memory, and when a place there is written again.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <thread>

#include "tests/client/session/shared_session.h"
#include "tests/support/eventually.h"
#include "tests/support/messages.h"

namespace ballast::client {
namespace {

using testing::HasSubstr;

// A push of step 1 may be released when step 2 has taken the place again. If that freed the place, the
// next micro-step's gradient would overwrite one that the service has not read.
class SharedGradientsTest : public SharedSession {
 protected:
  ~SharedGradientsTest() override { session_.reset(); }  // It releases payloads until its end.

  // Pushes memory of the test's own, all one letter.
  absl::Status PushElsewhere(int chunk, char letter) {
    std::memset(gradient_.data(), letter, gradient_.size());
    GradientPush push;
    push.chunk = chunk;
    push.payload = absl::MakeConstSpan(gradient_).subspan(0, chunk == 4 ? 1024 : 512);
    push.released = [this] { ++released_; };
    return session_->Push(std::move(push));
  }
  absl::Status PushInPlace(int chunk, char letter) {
    const absl::Span<std::byte> place = session_->gradient_memory(chunk);
    std::memset(place.data(), letter, place.size());
    return session_->Push({.chunk = chunk, .payload = place, .released = [this] { ++released_; }});
  }
  bool shared(size_t push) const { return fake_->gradients().at(push).shared; }

  std::atomic<int> released_ = 0;
};

TEST_F(SharedGradientsTest, AreAskedForAndSaidToTheService) {
  ASSERT_TRUE(Open().ok());
  EXPECT_TRUE(session_->shares_memory());
  EXPECT_TRUE(fake_->last_attach.shared_memory());
  EXPECT_TRUE(fake_->sent().at(0).open().weights_in_shared_memory());
}

TEST_F(SharedGradientsTest, WrittenInPlaceAreReleasedWhenTheServiceHoldsThem) {
  OpenAndBegin();
  ASSERT_TRUE(PushInPlace(4, 'a').ok());
  EXPECT_TRUE(shared(0));
  EXPECT_EQ(fake_->gradients()[0].header.chunk(), 4u);
  EXPECT_EQ(file_.gradient(4), std::string(1024, 'a'));
  EXPECT_EQ(released_, 0);
  Acknowledge(3);
  EXPECT_EQ(released_, 1);
}

TEST_F(SharedGradientsTest, TakeNoRoomInTheWindow) {
  options_.seal_timeout = absl::Milliseconds(20);
  options_.window_bytes = 1;
  OpenAndBegin();
  for (int chunk = 0; chunk < 5; ++chunk) EXPECT_TRUE(PushInPlace(chunk, 'a').ok());
}

TEST_F(SharedGradientsTest, OfOtherMemoryGoThroughTheStream) {
  OpenAndBegin();
  const absl::Span<std::byte> place = session_->gradient_memory(1);
  std::memset(place.data(), 'a', place.size());
  ASSERT_TRUE(PushElsewhere(1, 'b').ok());
  EXPECT_FALSE(shared(0));
  EXPECT_EQ(file_.gradient(1), std::string(512, 'a'));
}

TEST_F(SharedGradientsTest, OfAnotherSizeAreRefused) {
  OpenAndBegin();
  const absl::Span<std::byte> place = session_->gradient_memory(4);
  EXPECT_TRUE(Refused(session_->Push({.chunk = 4, .payload = place.subspan(0, 512)}),
                      absl::StatusCode::kInvalidArgument));
  EXPECT_THAT(fake_->gradients(), testing::IsEmpty());
}

TEST_F(SharedGradientsTest, WithoutValuesHaveNoPlace) {
  OpenAndBegin();
  ASSERT_TRUE(session_->Push({.chunk = 0, .empty = true}).ok());
  EXPECT_FALSE(shared(0));
  EXPECT_TRUE(fake_->gradients()[0].header.empty());
}

TEST_F(SharedGradientsTest, HaveNoPlaceBeyondTheJob) {
  ASSERT_TRUE(Open().ok());
  EXPECT_EQ(session_->gradient_memory(4).size(), 1024u);
  EXPECT_TRUE(session_->gradient_memory(5).empty());
  EXPECT_TRUE(session_->gradient_memory(-1).empty());
}

TEST_F(SharedGradientsTest, AreSentAgainByChunkOnANewStream) {
  OpenAndBegin();
  for (int chunk = 0; chunk < 5; ++chunk) ASSERT_TRUE(PushInPlace(chunk, 'a').ok());
  Acknowledge(3);
  v1::Opened held;
  held.set_committed_step(4);
  held.set_open_step(5);
  for (uint32_t chunk : {0, 2, 3}) {
    v1::ChunkCount& count = *held.add_delivered();
    count.set_chunk(chunk);
    count.set_next_micro_step(1);
  }
  fake_->opened = {held};
  testing::internal::CaptureStderr();
  fake_->Break(absl::UnavailableError("connection lost"));
  ASSERT_TRUE(fake_->AwaitStream(2, 3));
  EXPECT_EQ(fake_->names(2), (std::vector<std::string>{"open", "shared gradient 5 chunk 1 [0, 1)",
                                                       "shared gradient 5 chunk 4 [0, 1)"}));
  // The memory is still the rank's: no other is requested, and weights arrive there.
  EXPECT_FALSE(fake_->last_attach.shared_memory());
  EXPECT_EQ(server_.hangups(), 0);
  EXPECT_TRUE(fake_->sent().back().open().weights_in_shared_memory());
  // Payloads that had arrived are released after the rest was sent.
  EXPECT_TRUE(Eventually([&] { return released_ >= 3; }));
  Acknowledge(2);
  EXPECT_EQ(released_, 4);
  session_.reset();
  testing::internal::GetCapturedStderr();
}

TEST_F(SharedGradientsTest, AreReleasedOnceWhenTheSessionFails) {
  options_.reconnect_timeout = absl::ZeroDuration();
  OpenAndBegin();
  ASSERT_TRUE(PushInPlace(0, 'a').ok());
  fake_->Break(absl::AbortedError("generation 4 has begun"));
  EXPECT_EQ(released_, 1);
  // The memory stays as long as the session.
  EXPECT_TRUE(Refused(PushInPlace(1, 'b'), absl::StatusCode::kAborted));
  EXPECT_EQ(released_, 2);
  EXPECT_EQ(PushElsewhere(2, 'c').code(), absl::StatusCode::kAborted);
  EXPECT_EQ(released_, 3);
  EXPECT_EQ(server_.hangups(), 0);
}

TEST_F(SharedGradientsTest, AreNotAskedForAgainstTheTrainersWill) {
  options_.shared_memory = SharedMemoryUse::kNever;
  fake_->attachment.clear_shared_memory();
  OpenAndBegin();
  EXPECT_FALSE(fake_->last_attach.shared_memory());
  EXPECT_FALSE(fake_->sent().at(0).open().weights_in_shared_memory());
  EXPECT_FALSE(session_->shares_memory());
  EXPECT_TRUE(session_->gradient_memory(0).empty());
  ASSERT_TRUE(PushElsewhere(0, 'a').ok());
  EXPECT_FALSE(shared(0));
}

TEST_F(SharedGradientsTest, GoThroughTheStreamWhereNoMemoryIsHandedOver) {
  fake_->attachment.mutable_shared_memory()->set_socket("ballast-test-no-listener");
  testing::internal::CaptureStderr();
  OpenAndBegin();
  EXPECT_THAT(testing::internal::GetCapturedStderr(),
              testing::AllOf(HasSubstr("[info]"), HasSubstr("no memory is shared")));
  EXPECT_FALSE(session_->shares_memory());
  EXPECT_FALSE(fake_->sent().at(0).open().weights_in_shared_memory());
  ASSERT_TRUE(PushElsewhere(0, 'a').ok());
  EXPECT_FALSE(shared(0));
}

TEST_F(SharedGradientsTest, GoThroughTheStreamWithAWarningWhereTheOfferIsBad) {
  SharedMemoryServerForTests refusing([](int connection) { Hand(connection, "Rtoo late", {}); });
  *fake_->attachment.mutable_shared_memory() = refusing.offer();
  testing::internal::CaptureStderr();
  OpenAndBegin();
  EXPECT_THAT(testing::internal::GetCapturedStderr(),
              testing::AllOf(HasSubstr("[warning]"), HasSubstr("no memory is shared"),
                             HasSubstr("too late")));
  EXPECT_FALSE(session_->shares_memory());
  ASSERT_TRUE(PushElsewhere(0, 'a').ok());
  EXPECT_FALSE(shared(0));
}

TEST_F(SharedGradientsTest, AreNotForASessionWithoutSteps) {
  options_.takes_steps = false;
  options_.job.update_mode = UpdateMode::kSpeculate;
  fake_->attachment.clear_shared_memory();
  ASSERT_TRUE(Open().ok());
  EXPECT_FALSE(fake_->last_attach.shared_memory());
  EXPECT_NE(fake_->sent().at(0).open().update_mode(), v1::SPECULATE);
  EXPECT_TRUE(session_->weights_memory(0).empty());
  for (const absl::Status& status : {session_->BeginStep({}), session_->ReadWeights()}) {
    EXPECT_TRUE(Refused(status, absl::StatusCode::kFailedPrecondition));
  }
}

TEST_F(SharedGradientsTest, HaveNewMemoryAtEveryAttempt) {
  options_.reconnect_timeout = absl::Seconds(5);
  fake_->open_error = absl::UnavailableError("gone");
  fake_->on_stream = [&] {
    if (fake_->streams() == 1) fake_->open_error = absl::OkStatus();
  };
  OpenAndBegin();
  EXPECT_EQ(fake_->attaches, 2);
  EXPECT_TRUE(fake_->last_attach.shared_memory());
  EXPECT_TRUE(session_->shares_memory());
  EXPECT_TRUE(Eventually([&] { return server_.hangups() > 0; }));
  ASSERT_TRUE(PushInPlace(0, 'a').ok());
  EXPECT_EQ(file_.gradient(0), std::string(512, 'a'));
}

}  // namespace
}  // namespace ballast::client
