#include "client/transport/grpc_transport.h"

#include <grpcpp/client_context.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ballast/v1/jobs.grpc.pb.h"
#include "ballast/v1/state.grpc.pb.h"
#include "ballast/v1/train.pb.h"
#include "client/transport/blocking_call.h"
#include "client/transport/calls_under_way.h"
#include "client/transport/connection.h"
#include "client/transport/train_call.h"
#include "cpu_optimizer_service/common/status.h"
#include "proto/deadline.h"
#include "proto/frame.h"
#include "proto/status.h"

namespace ballast::client {
namespace {

// For calls that allocate or move the state of a whole job.
constexpr absl::Duration kLongLimit = absl::Hours(1);

// Sends the chunks one by one until all are sent or the service has ended the call.
void SendWeights(BlockingCall& call, uint64_t step, absl::Span<const int> chunks,
                 const std::function<std::vector<std::byte>(int chunk)>& fill) {
  for (int chunk : chunks) {
    v1::WeightHeader header;
    header.set_step(step);
    header.set_chunk(static_cast<uint32_t>(chunk));
    // One chunk at a time, so that an upload takes no second copy of the state.
    const auto bytes = std::make_shared<std::vector<std::byte>>(fill(chunk));
    // gRPC keeps them alive until it has sent them.
    if (!call.Write(proto::SerializeUploadWeights(header, *bytes, [bytes] {}))) return;
  }
  call.WritesDone();
}

class GrpcTransport final : public Transport {
 public:
  GrpcTransport(std::shared_ptr<grpc::Channel> channel, absl::Duration short_limit)
      : connection_(std::move(channel)), short_limit_(short_limit) {}

  absl::StatusOr<v1::Job> CreateJob(const v1::CreateJobRequest& request,
                                    absl::Duration limit) override {
    return Call(&v1::JobService::Stub::CreateJob, request, std::min(limit, kLongLimit));
  }
  absl::StatusOr<v1::Job> GetJob(const v1::GetJobRequest& request) override {
    return Call(&v1::JobService::Stub::GetJob, request, short_limit_);
  }
  absl::StatusOr<v1::AttachWorkerResponse> AttachWorker(const v1::AttachWorkerRequest& request,
                                                        absl::Duration limit) override {
    return Call(&v1::JobService::Stub::AttachWorker, request, std::min(limit, short_limit_));
  }
  absl::StatusOr<v1::UndoStepResponse> UndoStep(const v1::UndoStepRequest& request) override {
    return Call(&v1::JobService::Stub::UndoStep, request, kLongLimit);
  }
  absl::StatusOr<v1::SaveJobResponse> SaveJob(const v1::SaveJobRequest& request) override {
    return Call(&v1::StateService::Stub::SaveJob, request, kLongLimit);
  }
  absl::StatusOr<v1::LoadJobResponse> LoadJob(const v1::LoadJobRequest& request) override {
    return Call(&v1::StateService::Stub::LoadJob, request, kLongLimit);
  }

  absl::StatusOr<v1::UploadWeightsResponse> UploadWeights(
      const v1::OpenTrain& open, absl::Duration limit, absl::Span<const int> chunks,
      const std::function<std::vector<std::byte>(int chunk)>& fill) override {
    BALLAST_ASSIGN_OR_RETURN(const auto channel, connection_.Connected(short_limit_));
    BlockingCall call(channel, "/ballast.v1.TrainService/UploadWeights",
                      std::min(limit, kLongLimit), calls_);
    v1::UploadWeightsRequest first;
    *first.mutable_open() = open;
    // If a write fails, the service has ended the call, and Finish returns its reason.
    if (call.Write(proto::SerializeControl(first))) {
      SendWeights(call,
                  open.has_state_write()   ? open.state_write().step()
                  : open.has_first_state() ? open.first_state().step()
                                           : open.orthogonal_step(),
                  chunks, fill);
    }
    grpc::ByteBuffer answer;
    // Looked at after Finish: a status says more than that there is no answer.
    const bool answered = call.Read(&answer);
    BALLAST_RETURN_IF_ERROR(call.Finish());
    v1::UploadWeightsResponse response;
    std::vector<grpc::Slice> slices;
    std::string bytes;
    if (answered && answer.Dump(&slices).ok()) {
      for (const grpc::Slice& slice : slices) {
        bytes.append(reinterpret_cast<const char*>(slice.begin()), slice.size());
      }
    }
    if (!answered || !response.ParseFromString(bytes)) {
      return absl::InternalError("the service ended UploadWeights without a valid answer");
    }
    return response;
  }

  absl::StatusOr<v1::ReadWeightsResponse> ReadWeights(
      const v1::ReadWeightsRequest& request, absl::Duration limit,
      const std::function<absl::Status(const v1::WeightHeader& header, PayloadPieces payload)>&
          place) override {
    BALLAST_ASSIGN_OR_RETURN(const auto channel,
                             connection_.Connected(std::min(limit, short_limit_)));
    BlockingCall call(channel, "/ballast.v1.TrainService/ReadWeights", std::min(limit, kLongLimit),
                      calls_);
    if (call.Write(proto::SerializeControl(request))) call.WritesDone();
    v1::ReadWeightsResponse first;
    grpc::ByteBuffer bytes;
    while (call.Read(&bytes)) {
      BALLAST_ASSIGN_OR_RETURN(const auto frame, proto::ParseReadWeightsResponse(bytes));
      if (frame.message.kind_case() == v1::ReadWeightsResponse::kStep) first = frame.message;
      // Also a kind of a newer service.
      if (frame.message.kind_case() != v1::ReadWeightsResponse::kWeights) continue;
      // After an error the call's destructor cancels the rest.
      BALLAST_RETURN_IF_ERROR(place(frame.message.weights().header(), frame.payload.pieces()));
    }
    BALLAST_RETURN_IF_ERROR(call.Finish());
    return first;
  }

  std::unique_ptr<TrainCall> OpenTrainCall(TrainListener& listener) override {
    // Attaching, just before, has connected it.
    return OpenGrpcTrainCall(connection_.channel(), listener);
  }

  // gRPC returns SHUTDOWN for every in-process channel, and crashes when a call begins on one whose
  // server is gone.
  bool CanReconnect() override {
    return connection_.channel()->GetState(false) != GRPC_CHANNEL_SHUTDOWN;
  }

  void CancelCalls() override {
    connection_.Cancel();
    calls_.Cancel();
  }

 private:
  template <typename Stub, typename Request, typename Response>
  absl::StatusOr<Response> Call(grpc::Status (Stub::*method)(grpc::ClientContext*, const Request&,
                                                             Response*),
                                const Request& request, absl::Duration limit) {
    BALLAST_ASSIGN_OR_RETURN(const auto channel,
                             connection_.Connected(std::min(limit, short_limit_)));
    grpc::ClientContext context;
    const CallsUnderWay::Entry entry(calls_, context);
    context.set_deadline(proto::Deadline(limit));
    Response response;
    const grpc::Status status = (Stub(channel).*method)(&context, request, &response);
    if (!status.ok()) return proto::FromGrpc(status);
    return response;
  }

  Connection connection_;
  const absl::Duration short_limit_;
  CallsUnderWay calls_;
};

}  // namespace

std::unique_ptr<Transport> MakeGrpcTransport(std::shared_ptr<grpc::Channel> channel,
                                             absl::Duration short_limit) {
  return std::make_unique<GrpcTransport>(std::move(channel), short_limit);
}

}  // namespace ballast::client
