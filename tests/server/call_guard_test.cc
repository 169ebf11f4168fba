// Memory that runs out in a part of a call: that call ends and says so, and the service goes on.
//
// Each part that is guarded, of the calls that a job's life is made of, is made to fail once.
#include "server/call_guard.h"

#include <gmock/gmock.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <new>
#include <string>

#include "ballast/v1/diagnostics.grpc.pb.h"
#include "proto/status.h"
#include "server/status/diagnostics_service.h"
#include "tests/server/tiny_job.h"

namespace ballast::server {
namespace {

using ::testing::HasSubstr;

// Of all threads together: guarded parts until one fails; below 0: none does.
std::atomic<int64_t> left_until_failure = -1;

void FailWhenItsTurnComes() {
  if (left_until_failure.load() >= 0 && left_until_failure.fetch_sub(1) == 0)
    throw std::bad_alloc();
}

// A job of one rank, from its creation to its end.
class Life {
 public:
  explicit Life(ServiceForTests& service) : service_(service) {}

  absl::Status Create() {
    Context context;
    v1::CreateJobRequest request;
    *request.mutable_job() = TinyJob("life", 1);
    return proto::FromGrpc(service_.jobs().CreateJob(&context, request, &job_));
  }

  absl::Status Attach() {
    Context context;
    v1::AttachWorkerRequest request;
    request.set_name(kName);
    request.set_process_id("p");
    v1::AttachWorkerResponse attached;
    const grpc::Status status = service_.jobs().AttachWorker(&context, request, &attached);
    open_.set_name(kName);
    open_.set_uid(attached.uid());
    open_.set_process_id("p");
    *open_.mutable_generation() = attached.generation();
    return proto::FromGrpc(status);
  }

  absl::Status Upload() {
    Context context;
    v1::UploadWeightsResponse response;
    const auto upload = service_.train().UploadWeights(&context, &response);
    v1::UploadWeightsRequest request;
    *request.mutable_open() = open_;
    bool goes = upload->Write(request);
    for (uint32_t chunk = 0; chunk < kChunks && goes; ++chunk) {
      request.mutable_weights()->mutable_header()->set_chunk(chunk);
      request.mutable_weights()->set_payload(std::string(kElements * sizeof(float), '\0'));
      goes = upload->Write(request);
    }
    upload->WritesDone();
    return proto::FromGrpc(upload->Finish());
  }

  absl::Status Train() {
    Context context;
    const auto stream = service_.train().Train(&context);
    bool goes = true;
    const auto send = [&](const v1::TrainRequest& request) {
      goes = goes && stream->Write(request);
    };
    v1::TrainRequest request;
    *request.mutable_open() = open_;
    send(request);
    request.mutable_begin_step()->set_step(1);
    send(request);
    request.mutable_discard()->set_step(1);
    send(request);
    v1::TrainResponse response;
    while (goes && !response.has_discarded()) goes = stream->Read(&response);
    request.mutable_begin_step()->set_step(1);
    request.mutable_begin_step()->set_attempt(1);
    send(request);
    for (uint32_t chunk = 0; chunk < kChunks; ++chunk) {
      v1::GradientHeader& header = *request.mutable_gradient()->mutable_header();
      header.set_step(1);
      header.set_attempt(1);
      header.set_chunk(chunk);
      header.set_micro_step_end(1);
      request.mutable_gradient()->set_payload(std::string(kElements * 2, '\0'));
      send(request);
    }
    request.mutable_end_micro_step()->set_step(1);
    request.mutable_end_micro_step()->set_attempt(1);
    request.mutable_end_micro_step()->set_all_used(true);
    send(request);
    request.mutable_seal()->set_step(1);
    request.mutable_seal()->set_attempt(1);
    request.mutable_seal()->set_micro_steps(1);
    request.mutable_seal()->mutable_vote();
    send(request);
    while (goes && !response.has_committed()) goes = stream->Read(&response);
    if (goes) stream->WritesDone();
    while (stream->Read(&response)) continue;
    return proto::FromGrpc(stream->Finish());
  }

  absl::Status Weights() {
    Context context;
    v1::ReadWeightsRequest request;
    request.set_name(kName);
    request.set_uid(open_.uid());
    return ReadAll(service_.train().ReadWeights(&context, request), v1::ReadWeightsResponse());
  }

  absl::Status State() {
    v1::ReadStateRequest request;
    request.set_name(std::string(kName) + "/parameters/w");
    request.set_plane(v1::MASTER);
    Context context;
    return ReadAll(service_.state().ReadState(&context, request), v1::ReadStateResponse());
  }

  absl::Status Look() {
    Context get_context;
    v1::GetJobRequest get;
    get.set_name(kName);
    absl::Status status = proto::FromGrpc(service_.jobs().GetJob(&get_context, get, &job_));
    Context list_context;
    v1::ListJobsResponse list;
    status.Update(proto::FromGrpc(service_.jobs().ListJobs(&list_context, {}, &list)));
    Context summary_context;
    v1::SummarizeStateRequest request;
    request.set_name(std::string(kName) + "/parameters/w");
    v1::StateSummary summary;
    status.Update(
        proto::FromGrpc(service_.state().SummarizeState(&summary_context, request, &summary)));
    return status;
  }

  absl::Status Describe() {
    Context context;
    v1::ServiceDescription description;
    return proto::FromGrpc(v1::DiagnosticsService::NewStub(service_.channel())
                               ->DescribeService(&context, {}, &description));
  }

  absl::Status Close() {
    Context context;
    v1::CloseJobRequest request;
    request.set_name(kName);
    v1::CloseJobResponse response;
    return proto::FromGrpc(service_.jobs().CloseJob(&context, request, &response));
  }

 private:
  static constexpr char kName[] = "jobs/life";
  static constexpr uint32_t kChunks = 3;
  static constexpr size_t kElements = 256;

  struct Context : grpc::ClientContext {
    // A call that never ends fails the test.
    Context() { set_deadline(std::chrono::system_clock::now() + std::chrono::minutes(2)); }
  };

  template <typename Stream, typename Message>
  static absl::Status ReadAll(Stream stream, Message message) {
    while (stream->Read(&message)) continue;
    return proto::FromGrpc(stream->Finish());
  }

  ServiceForTests& service_;
  v1::Job job_;
  v1::OpenTrain open_;
};

// In the order of a life.
struct Call {
  const char* name;
  absl::Status (Life::*make)();
  // Fewer parts than this have not ended the call: they are guarded no more. Which parts there are
  // depends on how messages and acknowledgements meet, so this is well below what is seen.
  int least_ended;
};
constexpr Call kCalls[] = {
    {"create", &Life::Create, 2}, {"attach", &Life::Attach, 2},     {"upload", &Life::Upload, 3},
    {"train", &Life::Train, 40},  {"weights", &Life::Weights, 2},   {"state", &Life::State, 3},
    {"look", &Life::Look, 5},     {"describe", &Life::Describe, 2}, {"close", &Life::Close, 2},
};

// Makes the part fail in the call after those before it have gone well.
class PartFails {
 public:
  PartFails(ServiceForTests& service, const Call& call, int64_t part) : life_(service) {
    for (const Call& before : kCalls) {
      if (&before == &call) break;
      const absl::Status lived = (life_.*before.make)();
      EXPECT_TRUE(lived.ok()) << before.name << ": " << lived;
    }
    left_until_failure = part;
    status_ = (life_.*call.make)();
    had_its_turn_ = left_until_failure.exchange(-1) < 0;
  }
  ~PartFails() {
    const absl::Status closed = life_.Close();
    EXPECT_TRUE(closed.ok() || absl::IsNotFound(closed)) << closed;
  }

  const absl::Status& status() const { return status_; }
  bool had_its_turn() const { return had_its_turn_; }

 private:
  Life life_;
  absl::Status status_;
  bool had_its_turn_ = false;
};

TEST(CallGuard, APartWithoutMemoryEndsItsCallAndNotTheService) {
  Engine none({.memory_limit_bytes = kTestMemoryBytes, .threads = 1});
  DiagnosticsService diagnostics(none, {});
  ServiceForTests service({.listen = {"127.0.0.1:0"}, .more_services = {&diagnostics}});
  diagnostics.Describes(service.server());
  CreateTinyJob(service, "honest");
  const std::string hash = service.StateHash("honest");
  before_guarded = FailWhenItsTurnComes;
  for (const Call& call : kCalls) {
    int ended = 0;
    bool all_tried = false;
    for (int64_t part = 0; !all_tried; ++part) {
      SCOPED_TRACE(testing::Message() << call.name << ", part " << part);
      ASSERT_LT(part, 1000) << "the call has no end";
      const PartFails tried(service, call, part);
      all_tried = !tried.had_its_turn();
      // What fails may still belong to the call before, or only close a call's books.
      if (tried.status().ok()) continue;
      EXPECT_FALSE(all_tried) << tried.status();
      EXPECT_EQ(tried.status().code(), absl::StatusCode::kResourceExhausted) << tried.status();
      EXPECT_THAT(std::string(tried.status().message()), HasSubstr("no memory"));
      ++ended;
    }
    ASSERT_GE(ended, call.least_ended) << call.name;
  }
  before_guarded = nullptr;
  EXPECT_EQ(service.StateHash("honest"), hash);
  Life after(service);
  for (const Call& call : kCalls) {
    const absl::Status lived = (after.*call.make)();
    EXPECT_TRUE(lived.ok()) << call.name << ": " << lived;
  }
}

}  // namespace
}  // namespace ballast::server
