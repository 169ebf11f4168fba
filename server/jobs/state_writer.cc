#include "server/jobs/state_writer.h"

#include <grpcpp/server_context.h>

#include <cstring>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/status.h"
#include "proto/convert.h"
#include "proto/frame.h"
#include "proto/status.h"
#include "server/call_errors.h"

namespace ballast::server {
namespace {

constexpr size_t kMostBytes = size_t{1} << 20;  // Of a message; a client sends 256 KiB of values.

}  // namespace

StateWriter::StateWriter(const Engine& engine, CallPools& pools,
                         grpc::CallbackServerContext& context, const absl::StatusOr<Caller>& caller,
                         grpc::ByteBuffer& response)
    : engine_(engine),
      pools_(pools),
      caller_(caller),
      response_(response),
      watched_(
          pools.watch.Watch([&context] { context.TryCancel(); }, WatchedCall::kAnswerSeconds)) {
  if (!caller.ok()) {
    End(caller.status());
    return;
  }
  watched_->PeerMustAct();
  StartRead(&read_buffer_);
}

void StateWriter::End(const absl::Status& status) {
  if (caller_.ok()) caller_->Audit(status);
  watched_->IsOver();
  Finish(proto::ToGrpc(status));
}

void StateWriter::OnDone() {
  watched_->Ended();
  writing_ = nullptr;
  pools_.LetGo(std::move(parameter_.job));
  delete this;
}

void StateWriter::OnReadDone(bool ok) {
  watched_->PeerActed();
  if (!ok) return Commit();
  const auto request = proto::ParseRequest<v1::WriteStateRequest>(read_buffer_, kMostBytes);
  read_buffer_.Clear();
  const absl::Status handled = request.ok() ? Handle(*request) : request.status();
  if (!handled.ok()) return End(handled);
  watched_->PeerMustAct();
  StartRead(&read_buffer_);
}

absl::Status StateWriter::Handle(const v1::WriteStateRequest& request) {
  if (request.kind_case() == v1::WriteStateRequest::KIND_NOT_SET) return NoKindError();
  if (request.has_open() != (parameter_.job == nullptr)) return NotFirstError();
  return request.has_open() ? Open(request.open()) : Write(request.data().values());
}

absl::Status StateWriter::Write(const std::string& data) {
  if (data.size() % sizeof(float) != 0) {
    return absl::InvalidArgumentError("data ends in the middle of a value");
  }
  std::vector<float> values(data.size() / sizeof(float));
  std::memcpy(values.data(), data.data(), data.size());
  const int64_t end = offset_ + static_cast<int64_t>(values.size());
  if (end > parameter_.elements()) {
    return absl::InvalidArgumentError(absl::StrCat("parameter ", parameter_.spec().name, " has ",
                                                   parameter_.elements(),
                                                   " elements, and more values have come"));
  }
  BALLAST_RETURN_IF_ERROR(
      writing_->WriteRange(parameter_.index, writing_->write().planes.front(), offset_, values));
  offset_ = end;
  return absl::OkStatus();
}

absl::Status StateWriter::Open(const v1::OpenWriteState& request) {
  caller_->Asks(request);
  BALLAST_ASSIGN_OR_RETURN(place_, pools_.streams.Enter());
  BALLAST_ASSIGN_OR_RETURN(FoundParameter found, FindParameter(engine_, *caller_, request.name()));
  BALLAST_ASSIGN_OR_RETURN(const Plane plane, proto::FromProto(request.plane()));
  BALLAST_ASSIGN_OR_RETURN(
      writing_, found.job->PrepareStateWrite({.planes = {plane}, .parameters = {found.index}}));
  parameter_ = std::move(found);
  watched_->IsOverIf(IsGone(engine_, *caller_, *parameter_.job));
  return absl::OkStatus();
}

void StateWriter::Commit() {
  if (parameter_.job == nullptr) {
    return End(NotFirstError());
  }
  if (offset_ != parameter_.elements()) {
    return End(absl::InvalidArgumentError(
        absl::StrCat("parameter ", parameter_.spec().name, " has ", parameter_.elements(),
                     " elements, and ", offset_, " values have come")));
  }
  const std::shared_ptr<PendingCall> pending = pending_;  // The Done may end the call.
  pending->Await(parameter_.job->CommitStateWrite(writing_, [this](absl::StatusOr<uint64_t> step) {
    if (!step.ok()) return End(step.status());
    v1::WriteStateResponse response;
    response.set_step(*step);
    response_ = proto::SerializeControl(response);
    End(absl::OkStatus());
  }));
}

}  // namespace ballast::server
