#include "server/train/upload_stream.h"

#include <grpcpp/server_context.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/status.h"
#include "proto/convert.h"
#include "proto/status.h"
#include "server/call_errors.h"
#include "server/find_job.h"

namespace ballast::server {

UploadStream::UploadStream(const Engine& engine, CallPools& pools,
                           grpc::CallbackServerContext& context,
                           const absl::StatusOr<Caller>& caller, grpc::ByteBuffer& response)
    : engine_(engine),
      pools_(pools),
      caller_(caller),
      response_(response),
      watched_(
          pools.watch.Watch([this, &context] { GiveUp(context); }, WatchedCall::kOpenSeconds)) {
  if (!caller.ok()) {
    End(caller.status());
  } else {
    watched_->PeerMustAct();
    StartRead(&read_buffer_);
  }
}

void UploadStream::GiveUp(grpc::CallbackServerContext& context) {
  // Whoever sets it first, this or a message, says what becomes of the stream, which can be
  // finished only once.
  has_begun_.exchange(true) ? context.TryCancel() : End(NoOpenError());
}

void UploadStream::End(const absl::Status& status) {
  has_begun_ = true;
  watched_->IsOver();  // Whoever does not take the answer is cancelled.
  Finish(proto::ToGrpc(status));
}

void UploadStream::OnDone() {
  // First: a look may be in GiveUp, and this waits for its end.
  watched_->Ended();
  // Of a call that was cut off.
  if (job_ != nullptr && writer_.has_value()) job_->DropStateWrite(*writer_);
  pools_.LetGo(std::move(job_));
  delete this;
}

void UploadStream::OnReadDone(bool ok) {
  if (job_ == nullptr && has_begun_.exchange(true)) return;  // The watch has ended it.
  watched_->PeerActed();
  if (!ok) {  // The worker has closed its side.
    if (job_ == nullptr) return End(NotFirstError());
    if (writer_.has_value()) return EndStateWrite();
    // Chunks that did not come are no error: other calls, and other ranks, bring them.
    return EndWith(!job_->Position().awaiting_weights);
  }
  const absl::Status handled = [this] {
    const absl::StatusOr<proto::Frame<v1::UploadWeightsRequest>> frame =
        proto::ParseUploadWeightsRequest(read_buffer_);
    // The frame has what it needs, and ends before the next message is read: one is in memory at a
    // time.
    read_buffer_.Clear();
    return frame.ok() ? Handle(*frame) : frame.status();
  }();
  if (!handled.ok()) return End(handled);
  StartRead(&read_buffer_);
}

absl::Status UploadStream::Handle(const proto::Frame<v1::UploadWeightsRequest>& frame) {
  if (frame.message.kind_case() == v1::UploadWeightsRequest::KIND_NOT_SET) {
    return NoKindError();
  }
  if (frame.message.has_open() != (job_ == nullptr)) {
    return NotFirstError();
  }
  if (frame.message.has_open()) return Open(frame.message.open());
  return Write(frame.message.weights().header(), frame.payload);
}

absl::Status UploadStream::Open(const v1::OpenTrain& request) {
  // Only now: a stream that says nothing takes no place from others.
  BALLAST_ASSIGN_OR_RETURN(place_, pools_.streams.Enter());
  BALLAST_ASSIGN_OR_RETURN(const std::shared_ptr<Job> job,
                           FindJob(engine_, *caller_, request.name(), request.uid()));
  if (request.rank() < 0 || request.rank() >= job->layout().world_size()) {
    return absl::InvalidArgumentError(absl::StrCat("rank ", request.rank(), " of ", request.name(),
                                                   ", which has world size ",
                                                   job->layout().world_size()));
  }
  holder_ = {.rank = request.rank(),
             .process_id = request.process_id(),
             .generation = proto::FromProto(request.generation())};
  step_ = request.orthogonal_step();
  is_orthogonal_ = step_ > 0;
  is_in_place_ = is_orthogonal_ && request.weights_in_shared_memory();
  if (is_orthogonal_ && (request.has_state_write() || request.has_first_state())) {
    return absl::InvalidArgumentError(
        "orthogonal_step comes with state_write or first_state; send each in a call of its own");
  }
  if (request.has_state_write()) {
    BALLAST_RETURN_IF_ERROR(BeginStateWrite(request.state_write(), holder_, *job));
  } else if (!is_orthogonal_) {
    BALLAST_RETURN_IF_ERROR(BeginFirstWeights(request, holder_, *job));
  }
  job_ = job;
  // A job does not know its uploads, so closing it does not end them.
  watched_->IsOverIf(IsGone(engine_, *caller_, *job));
  return absl::OkStatus();
}

absl::Status UploadStream::BeginFirstWeights(const v1::OpenTrain& request, const RankHolder& holder,
                                             Job& job) {
  FirstState state;
  if (request.has_first_state()) {
    state.step = request.first_state().step();
    const auto& counts = request.first_state().update_counts();
    state.update_counts.assign(counts.begin(), counts.end());
    // To the job, step 0 says that no moments come (FirstState).
    if (state.step == 0) {
      return absl::InvalidArgumentError(
          "first_state has step 0; leave it out where there are no moments");
    }
  }
  step_ = state.step;
  BALLAST_ASSIGN_OR_RETURN(uploader_, job.BeginFirstWeights(holder, std::move(state)));
  return absl::OkStatus();
}

absl::Status UploadStream::BeginStateWrite(const v1::StateWrite& request, const RankHolder& holder,
                                           Job& job) {
  if (request.number() == 0) {
    return absl::InvalidArgumentError("state_write has number 0; the first one is 1");
  }
  BALLAST_ASSIGN_OR_RETURN(StateWrite write, proto::FromProto(request));
  step_ = write.step;
  BALLAST_ASSIGN_OR_RETURN(writer_, job.BeginStateWrite(holder, std::move(write)));
  return absl::OkStatus();
}

void UploadStream::EndStateWrite() {
  const std::shared_ptr<PendingCall> pending = pending_;  // The Done may end the call.
  pending->Await(job_->EndStateWrite(*writer_, [this](absl::StatusOr<bool> written) {
    if (!written.ok()) return End(written.status());
    EndWith(/*ready=*/true);
  }));
}

void UploadStream::EndWith(bool ready) {
  v1::UploadWeightsResponse response;
  response.set_chunks(static_cast<int64_t>(chunks_.size()));
  response.set_job_ready(ready);
  response_ = proto::SerializeControl(response);
  End(absl::OkStatus());
}

absl::Status UploadStream::Write(const v1::WeightHeader& header, const proto::Payload& payload) {
  if (header.step() != step_) {
    return absl::InvalidArgumentError(
        absl::StrCat("what is uploaded has step ", step_, ", not ", header.step()));
  }
  const absl::Span<const Chunk> chunks = job_->layout().chunks();
  // In 64 bits, in which no number from the wire overflows.
  const int64_t chunk = int64_t{header.chunk()} + job_->layout().first_of_rank(holder_.rank);
  if (chunk >= static_cast<int64_t>(chunks.size()) || chunks[chunk].rank != holder_.rank) {
    return absl::InvalidArgumentError(absl::StrCat("chunk ", header.chunk(), " is not one of rank ",
                                                   holder_.rank, "'s, of ", chunks.size(),
                                                   " in all"));
  }
  if (is_in_place_ != payload.pieces().empty() && is_orthogonal_) {
    return absl::InvalidArgumentError(
        absl::StrCat("chunk ", header.chunk(), is_in_place_ ? " comes with" : " comes without",
                     " a payload, and the call says that O is", is_in_place_ ? "" : " not",
                     " in shared memory"));
  }
  BALLAST_RETURN_IF_ERROR(
      is_orthogonal_ ? job_->GiveOrthogonal(holder_, step_, chunk, payload.pieces())
      : writer_.has_value()
          ? job_->WriteStateChunk(*writer_, chunk, payload.pieces())
          : job_->WriteInitialWeights(chunk, payload.pieces(), uploader_).status());
  chunks_.insert(header.chunk());
  return absl::OkStatus();
}

}  // namespace ballast::server
