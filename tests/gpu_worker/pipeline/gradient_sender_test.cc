#include "gpu_worker/pipeline/gradient_sender.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/gpu_emulator/fake_device.h"
#include "tests/support/messages.h"

namespace ballast::worker {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

class GradientSenderTest : public testing::Test, private GradientSink {
 protected:
  void Open(uint64_t seed) {
    device_ = std::make_unique<FakeDevice>(FakeDeviceOptions{
        .seed = seed, .fail = [this](absl::string_view operation, absl::string_view) {
          records_ += operation == "record";
          return lost_ ? absl::UnavailableError("GPU 0 is lost") : absl::OkStatus();
        }});
    stream_ = device_->CreateStream("copy_out").value();
    sender_ = std::make_unique<GradientSender>(*device_, errors_, nullptr);
    sender_->Start(*this);
  }
  absl::Status Push(client::GradientPush push) override {
    told_.push_back(absl::StrCat("push ", push.chunk, " of ", static_cast<int>(push.payload[0])));
    push.released();
    return push.chunk == refused_ ? absl::InternalError("refused") : absl::OkStatus();
  }
  absl::Status EndMicroStep(uint32_t micro_step, const UsedParameters&) override {
    told_.push_back(absl::StrCat("end ", micro_step));
    return absl::OkStatus();
  }
  // The payload gets its value by work of the stream.
  absl::Status Push(int chunk, uint32_t micro_step) {
    std::byte& value = payload_[chunk];
    BALLAST_RETURN_IF_ERROR(
        GiveToFakeStream(*stream_, "copy", [&value, chunk] { value = std::byte(10 + chunk); }));
    waiting_.push_back({.chunk = chunk,
                        .micro_step_begin = micro_step,
                        .micro_step_end = micro_step + 1,
                        .payload = absl::MakeConstSpan(&value, 1),
                        .released = [this] { ++released_; }});
    return collects_ ? absl::OkStatus() : PushWaiting();
  }
  absl::Status PushWaiting() { return sender_->Push(*stream_, 7, std::exchange(waiting_, {})); }

  bool collects_ = false;  // Pushes wait for PushWaiting.
  std::vector<client::GradientPush> waiting_;
  std::atomic<int> records_ = 0;  // Written by the threads that wait for events, too.
  std::atomic<bool> lost_ = false;
  std::byte payload_[8] = {};
  PipelineErrors errors_{[] {}};
  int refused_ = -1;
  std::atomic<int> released_ = 0;
  std::vector<std::string> told_;  // The sender's thread's, until it is idle.
  std::unique_ptr<FakeDevice> device_;
  std::unique_ptr<DeviceStream> stream_;
  std::unique_ptr<GradientSender> sender_;
};

TEST_F(GradientSenderTest, HandsOverWhatIsThereInOrderAndThenTheEndOfTheMicroStep) {
  for (uint64_t seed = 0; seed < 8; ++seed) {
    Open(seed);
    told_.clear();
    for (const int chunk : {3, 0, 2}) ASSERT_TRUE(Push(chunk, 0).ok());
    sender_->EndMicroStep(7, 0, {});
    ASSERT_TRUE(Push(1, 1).ok());
    sender_->WaitIdle();
    EXPECT_THAT(told_, ElementsAre("push 3 of 13", "push 0 of 10", "push 2 of 12", "end 0",
                                   "push 1 of 11"));
    sender_.reset();
    stream_.reset();
  }
  EXPECT_EQ(released_, 8 * 4);
}

TEST_F(GradientSenderTest, HasOneEventForAllThatIsGivenAtOnce) {
  Open(0);
  collects_ = true;
  for (const int chunk : {3, 0, 2}) ASSERT_TRUE(Push(chunk, 0).ok());
  ASSERT_TRUE(PushWaiting().ok());
  EXPECT_EQ(records_, 1);
  sender_->WaitIdle();
  EXPECT_THAT(told_, ElementsAre("push 3 of 13", "push 0 of 10", "push 2 of 12"));
  EXPECT_EQ(released_, 3);
  ASSERT_TRUE(PushWaiting().ok());  // Of nothing.
  EXPECT_EQ(records_, 1);
}

class RefusedPushes : public GradientSenderTest, public testing::WithParamInterface<bool> {};
INSTANTIATE_TEST_SUITE_P(AtOnce, RefusedPushes, testing::Bool());

TEST_P(RefusedPushes, HandsOverNothingMoreAndReleasesAll) {
  Open(0);
  refused_ = 2;
  collects_ = GetParam();
  for (const int chunk : {1, 2, 3}) ASSERT_TRUE(Push(chunk, 4).ok());
  if (collects_) ASSERT_TRUE(PushWaiting().ok());
  collects_ = false;
  sender_->EndMicroStep(7, 4, {});
  sender_->WaitIdle();
  EXPECT_THAT(told_, ElementsAre("push 1 of 11", "push 2 of 12"));
  EXPECT_EQ(released_, 3);
  EXPECT_TRUE(errors_.failure().ok());
  EXPECT_TRUE(Refused(errors_.FinishStep(), absl::StatusCode::kInternal));
  // The next step's are handed over again.
  refused_ = -1;
  ASSERT_TRUE(Push(2, 0).ok());
  sender_->WaitIdle();
  EXPECT_EQ(told_.back(), "push 2 of 12");
}

TEST_F(GradientSenderTest, WhatALostDeviceDidNotCopyIsReleasedAndNotHandedOver) {
  Open(0);
  ASSERT_TRUE(Push(1, 0).ok());
  sender_->WaitIdle();
  told_.clear();
  ASSERT_TRUE(Push(2, 0).ok());
  lost_ = true;
  EXPECT_FALSE(stream_->Synchronize().ok());
  sender_->WaitIdle();
  EXPECT_EQ(released_, 2);
  // It may have been there just in time.
  if (told_.empty()) EXPECT_THAT(errors_.failure().message(), HasSubstr("GPU 0 is lost"));
}

}  // namespace
}  // namespace ballast::worker
