#include "cpu_optimizer_service/job/stream_calls.h"

#include <gtest/gtest.h>

#include <memory>
#include <utility>
#include <vector>

namespace ballast {
namespace {

// Calls, by what they were answered with.
class StreamCallsTest : public testing::Test {
 protected:
  std::shared_ptr<StreamCall> Begin(int rank) {
    auto call = std::make_shared<StreamCall>();
    Begin(*call);
    calls_.Add(rank, call);
    return call;
  }
  void Begin(StreamCall& call) {
    call.Begin([this](absl::StatusOr<bool> answer) { answers_.push_back(answer.status().code()); });
  }
  std::vector<absl::StatusCode> Answers() { return std::exchange(answers_, {}); }

  StreamCalls calls_{2};
  std::vector<absl::StatusCode> answers_;
};

using Codes = std::vector<absl::StatusCode>;

TEST_F(StreamCallsTest, AreAnsweredOnceEach) {
  const auto call = Begin(0);
  EXPECT_EQ(Answers(), Codes());
  call->Answer(true);
  EXPECT_EQ(Answers(), Codes{absl::StatusCode::kOk});
  call->Answer(absl::AbortedError("late"));
  calls_.Answer(0, absl::InternalError("broken"));
  EXPECT_EQ(Answers(), Codes());
  Begin(*call);  // The stream's next one.
  call->Answer(absl::AbortedError("gone"));
  EXPECT_EQ(Answers(), Codes{absl::StatusCode::kAborted});
}

TEST_F(StreamCallsTest, AreAnsweredByRankWhenTheJobBreaks) {
  const auto first = Begin(0);
  const auto second = Begin(1);
  calls_.Answer(0, absl::InternalError("broken"));
  EXPECT_EQ(Answers(), Codes{absl::StatusCode::kInternal});
  first->Answer(true);
  EXPECT_EQ(Answers(), Codes());
  second->Answer(true);
  EXPECT_EQ(Answers(), Codes{absl::StatusCode::kOk});
  calls_.Answer(1, absl::InternalError("broken"));
  EXPECT_EQ(Answers(), Codes());
}

TEST_F(StreamCallsTest, MayBeginAnotherWhenTheyAreAnswered) {
  const auto call = std::make_shared<StreamCall>();
  call->Begin([&](absl::StatusOr<bool>) { Begin(*call); });
  call->Answer(true);
  call->Answer(true);
  EXPECT_EQ(Answers(), Codes{absl::StatusCode::kOk});
}

}  // namespace
}  // namespace ballast
