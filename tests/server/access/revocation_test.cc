// What goes on when a token is taken away.
#include <gmock/gmock.h>

#include <algorithm>
#include <map>
#include <memory>
#include <string>

#include "proto/convert.h"
#include "proto/frame.h"
#include "tests/server/access/access_service.h"

namespace ballast::server {
namespace {

constexpr char kAnswers[] = "mine-large";
// In one parameter: more than a stream takes whose client reads nothing.
constexpr int64_t kElements = int64_t{1} << 20;

grpc::ByteBuffer ToBytes(const google::protobuf::Message& message) {
  const grpc::Slice slice(message.SerializeAsString());
  return grpc::ByteBuffer(&slice, 1);
}

class RevocationTest : public AccessTest {
 protected:
  // It has one rank, and weights. Returns its uid.
  std::string CreateLargeJob() const {
    constexpr int64_t kChunkElements = int64_t{1} << 18;
    v1::Job job;
    job.set_name(absl::StrCat("jobs/", kAnswers));
    job.set_world_size(1);
    job.set_chunk_elements(kChunkElements);
    job.add_groups()->set_name("all");
    *job.mutable_groups(0)->mutable_hyper_parameters() =
        proto::ToProto(HyperParameters{.lr = 0.01});
    v1::Parameter& parameter = *job.add_parameters();
    parameter.set_name("w");
    parameter.add_shape(kElements);
    parameter.set_trainable(true);
    job.add_partitions()->set_end(kElements);
    Create(job);

    v1::AttachWorkerRequest attach;
    attach.set_name(job.name());
    attach.set_process_id("p");
    v1::AttachWorkerResponse attached;
    grpc::ClientContext attach_context;
    EXPECT_TRUE(v1::JobService::NewStub(OverUnix("trainer"))
                    ->AttachWorker(&attach_context, attach, &attached)
                    .ok());
    grpc::ClientContext context;
    v1::UploadWeightsResponse response;
    const auto stub = v1::TrainService::NewStub(OverUnix("trainer"));
    const auto upload = stub->UploadWeights(&context, &response);
    v1::UploadWeightsRequest request;
    request.mutable_open()->set_name(job.name());
    request.mutable_open()->set_uid(attached.uid());
    request.mutable_open()->set_process_id("p");
    *request.mutable_open()->mutable_generation() = attached.generation();
    upload->Write(request);
    for (int64_t chunk = 0; chunk < kElements / kChunkElements; ++chunk) {
      request.mutable_weights()->mutable_header()->set_chunk(static_cast<uint32_t>(chunk));
      request.mutable_weights()->set_payload(std::string(kChunkElements * sizeof(float), '\0'));
      upload->Write(request);
    }
    upload->WritesDone();
    const grpc::Status uploaded = upload->Finish();
    EXPECT_TRUE(uploaded.ok()) << uploaded.error_message();
    return attached.uid();
  }

  // Returns when so many traces, readers of state and streams of weights are under way.
  void AwaitCalls(size_t traces, size_t readers, size_t streams) const {
    const absl::Time limit = absl::Now() + kPatience;
    const auto are_there = [&] {
      const std::vector<CallUse> calls = server_->calls();
      return std::all_of(calls.begin(), calls.end(), [&](const CallUse& use) {
        if (use.kind == "traces") return use.in_progress == traces;
        if (use.kind == "readers") return use.in_progress == readers;
        if (use.kind == "streams") return use.in_progress == streams;
        return true;
      });
    };
    while (!are_there()) {
      ASSERT_LT(absl::Now(), limit) << "there are not so many";
      absl::SleepFor(absl::Milliseconds(10));
    }
  }
};

TEST_F(RevocationTest, AnUploadEndsWhenItsTokenIsRevokedAndOthersGoOn) {
  client::CallsUnderWay calls;
  v1::GetJobRequest get;
  get.set_name("jobs/mine-1");
  v1::Job job;
  grpc::ClientContext get_context;
  const auto jobs = v1::JobService::NewStub(OverTls("trainer"));
  ASSERT_TRUE(jobs->GetJob(&get_context, get, &job).ok());
  v1::AttachWorkerRequest attach;
  attach.set_name("jobs/mine-1");
  attach.set_process_id("p");
  v1::AttachWorkerResponse attached;
  grpc::ClientContext attach_context;
  ASSERT_TRUE(jobs->AttachWorker(&attach_context, attach, &attached).ok());

  v1::UploadWeightsRequest open;
  open.mutable_open()->set_name("jobs/mine-1");
  open.mutable_open()->set_uid(job.uid());
  open.mutable_open()->set_process_id("p");
  *open.mutable_open()->mutable_generation() = attached.generation();
  client::BlockingCall revoked(OverTls("trainer"), "/ballast.v1.TrainService/UploadWeights",
                               kPatience, calls);
  ASSERT_TRUE(revoked.Write(proto::SerializeControl(open)));
  client::BlockingCall kept(OverTls("", "alice"), "/ballast.v1.TrainService/UploadWeights",
                            kPatience, calls);
  ASSERT_TRUE(kept.Write(proto::SerializeControl(open)));
  AwaitCalls(/*traces=*/0, /*readers=*/0, /*streams=*/2);

  WriteTokens({"viewer", "operator"});
  EXPECT_EQ(EndOf(revoked).code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(GetJobOver(OverTls("trainer")).error_code(), grpc::StatusCode::UNAUTHENTICATED);
  ASSERT_TRUE(kept.WritesDone());
  EXPECT_EQ(EndOf(kept), absl::OkStatus());
}

// A stream of a large job is under way for as long as its client does not read.
TEST_F(RevocationTest, AnswersEndWhenTheirTokenIsRevokedAndOthersGoOn) {
  const std::string uid = CreateLargeJob();
  v1::TraceJobRequest trace;
  trace.set_name(absl::StrCat("jobs/", kAnswers));
  trace.set_steps(1);
  v1::ReadStateRequest state;
  state.set_name(absl::StrCat("jobs/", kAnswers, "/parameters/w"));
  state.set_plane(v1::MASTER);
  v1::ReadWeightsRequest weights;
  weights.set_name(absl::StrCat("jobs/", kAnswers));
  weights.set_uid(uid);
  const std::map<std::string, grpc::ByteBuffer> requests = {
      {"/ballast.v1.JobService/TraceJob", ToBytes(trace)},
      {"/ballast.v1.StateService/ReadState", ToBytes(state)},
      {"/ballast.v1.TrainService/ReadWeights", ToBytes(weights)}};
  client::CallsUnderWay calls;
  const auto begin = [&](const std::shared_ptr<grpc::Channel>& channel, const std::string& method) {
    auto call = std::make_unique<client::BlockingCall>(channel, method, kPatience, calls);
    EXPECT_TRUE(call->Write(requests.at(method)) && call->WritesDone());
    return call;
  };
  const auto revoked_channel = OverTlsInASmallWindow("trainer");
  const auto kept_channel = OverTlsInASmallWindow("", "alice");
  std::map<std::string, std::unique_ptr<client::BlockingCall>> revoked;
  std::map<std::string, std::unique_ptr<client::BlockingCall>> kept;
  for (const auto& [method, request] : requests) {
    revoked[method] = begin(revoked_channel, method);
    // A job has one trace at a time.
    if (!absl::EndsWith(method, "TraceJob")) kept[method] = begin(kept_channel, method);
  }
  AwaitCalls(/*traces=*/1, /*readers=*/2, /*streams=*/2);
  WriteTokens({"viewer", "operator"});
  AwaitCalls(/*traces=*/0, /*readers=*/1, /*streams=*/1);
  for (const auto& [method, call] : revoked) {
    const absl::Status end = EndOf(*call);
    EXPECT_EQ(end.code(), absl::StatusCode::kCancelled) << method << ": " << end;
  }
  for (const auto& [method, call] : kept) EXPECT_EQ(EndOf(*call), absl::OkStatus()) << method;
}

}  // namespace
}  // namespace ballast::server
