#include "client/calls/member_reads.h"

#include <gmock/gmock.h>
#include <grpcpp/create_channel.h>
#include <grpcpp/server_builder.h>
#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "ballast/v1/state.grpc.pb.h"
#include "proto/convert.h"
#include "tests/client/session/fake_transport.h"

namespace ballast::client {
namespace {

using testing::HasSubstr;

// Has some elements of a parameter of ten. Element i is i.
class FakeMember : public v1::StateService::Service {
 public:
  FakeMember() {
    grpc::ServerBuilder builder;
    builder.RegisterService(this);
    server_ = builder.BuildAndStart();
  }

  // The state that its answers are of, the last one for good.
  std::vector<StateVersion> states = {{.step = 7}};
  int64_t begin = 0;
  int64_t end = 0;

  std::shared_ptr<grpc::Channel> channel() { return server_->InProcessChannel({}); }
  int calls() const { return calls_; }

  grpc::Status ReadState(grpc::ServerContext*, const v1::ReadStateRequest* request,
                         grpc::ServerWriter<v1::ReadStateResponse>* answer) override {
    EXPECT_TRUE(request->here());
    EXPECT_EQ(request->uid(), "uid");
    v1::ReadStateResponse part;
    Fill(part);
    const std::vector<float> all = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9};
    part.set_offset(begin);
    part.set_data(all.data() + begin, (end - begin) * sizeof(float));
    answer->Write(part);
    return grpc::Status::OK;
  }
  grpc::Status SummarizeState(grpc::ServerContext*, const v1::SummarizeStateRequest*,
                              v1::StateSummary* answer) override {
    Fill(*answer);
    PlaneSummary summary;
    for (int64_t i = begin; i < end; ++i) summary.Add({static_cast<float>(i)});
    *answer->add_planes() = proto::ToProto(summary, Plane::kMaster, /*with_sums=*/true);
    return grpc::Status::OK;
  }

 private:
  template <typename Message>
  void Fill(Message& message) {
    const StateVersion& state = states[std::min<size_t>(calls_++, states.size() - 1)];
    message.set_step(state.step);
    message.mutable_generation()->set_epoch(state.epoch);
    message.mutable_generation()->set_count(state.count);
    message.set_state_writes(state.writes);
    message.set_loads(state.loads);
    message.add_shape(10);
  }

  std::atomic<int> calls_ = 0;
  std::unique_ptr<grpc::Server> server_;
};

class MemberReadsTest : public testing::Test {
 protected:
  MemberReadsTest() {
    first_.end = 4;
    second_.begin = 4;
    second_.end = 10;
  }

  MemberReads Reads() {
    return MemberReads({{"a:7070", first_.channel()}, {"b:7070", second_.channel()}}, "uid", {},
                       absl::Minutes(1), clock_);
  }
  absl::Status Read() {
    values_.clear();
    return Reads().Read({}, [&](const v1::ReadStateResponse& part) {
      const auto* values = reinterpret_cast<const float*>(part.data().data());
      values_.insert(values_.end(), values, values + part.data().size() / sizeof(float));
      return absl::OkStatus();
    });
  }
  void ExpectApart(const std::string& first, const std::string& second) {
    for (const absl::Status& status : {Read(), Reads().Summarize({}).status()}) {
      EXPECT_TRUE(absl::IsUnavailable(status));
      EXPECT_THAT(std::string(status.message()), HasSubstr("member a:7070 is at step " + first));
      EXPECT_THAT(std::string(status.message()), HasSubstr("member b:7070 at step " + second));
    }
    EXPECT_GT(second_.calls(), 2);
  }

  FakeClock clock_;
  FakeMember first_;
  FakeMember second_;
  std::vector<float> values_;
};

TEST_F(MemberReadsTest, ArePutTogether) {
  EXPECT_EQ(Read(), absl::OkStatus());
  EXPECT_EQ(values_, (std::vector<float>{0, 1, 2, 3, 4, 5, 6, 7, 8, 9}));
  const auto summary = Reads().Summarize({});
  ASSERT_EQ(summary.status(), absl::OkStatus());
  EXPECT_EQ(summary->planes(0).mean(), 4.5);
  EXPECT_EQ(summary->planes(0).max(), 9);
  EXPECT_FALSE(summary->planes(0).has_sums());
  EXPECT_TRUE(clock_.sleeps.empty());
}

TEST_F(MemberReadsTest, AreAskedAgainUntilAllAreAtOneStep) {
  first_.states = {{.step = 7}, {.step = 9}, {.step = 10}};
  second_.states = {{.step = 8}, {.step = 8}, {.step = 10}};
  EXPECT_EQ(Read(), absl::OkStatus());
  EXPECT_EQ(first_.calls(), 3);
  EXPECT_EQ(Reads().Summarize({})->step(), 10u);
}

TEST_F(MemberReadsTest, NameTheStepsIfTheyStayApart) {
  second_.states = {{.step = 8}};
  ExpectApart("7", "8");
}

TEST_F(MemberReadsTest, AreOfOneGeneration) {
  second_.states = {{.step = 7, .count = 1}};
  ExpectApart("7 of generation 0.0", "7 of generation 0.1");
}

TEST_F(MemberReadsTest, AreBehindTheSameWrites) {
  second_.states = {{.step = 7, .writes = 1}};
  ExpectApart("7 of generation 0.0 behind 0 writes", "7 of generation 0.0 behind 1 writes");
}

TEST_F(MemberReadsTest, AreBehindTheSameLoads) {
  second_.states = {{.step = 7, .loads = 1}};
  ExpectApart("7 of generation 0.0 behind 0 writes of state and 0 loads",
              "7 of generation 0.0 behind 0 writes of state and 1 loads");
}

TEST_F(MemberReadsTest, AreOfAllElements) {
  second_.begin = 5;
  EXPECT_TRUE(absl::IsDataLoss(Read()));
  EXPECT_TRUE(absl::IsDataLoss(Reads().Summarize({}).status()));
  // None may count twice.
  second_.begin = 3;
  EXPECT_TRUE(absl::IsDataLoss(Read()));
  EXPECT_TRUE(absl::IsDataLoss(Reads().Summarize({}).status()));
}

}  // namespace
}  // namespace ballast::client
