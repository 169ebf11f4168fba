#include "server/train/upload_stream.h"

#include <grpcpp/server_context.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/reason.h"
#include "cpu_optimizer_service/common/status.h"
#include "proto/convert.h"
#include "server/call_guard.h"
#include "server/find_job.h"

namespace ballast::server {

UploadStream::UploadStream(const Engine& engine, CallPools& pools,
                           grpc::CallbackServerContext& context,
                           const absl::StatusOr<Caller>& caller, grpc::ByteBuffer& response)
    : engine_(engine),
      pools_(pools),
      caller_(caller),
      response_(response),
      watched_(pools.watch.Watch([&context] { context.TryCancel(); }, WatchedCall::kForEver)) {
  absl::StatusOr<CallPool::Place> place =
      caller.ok() ? pools.streams.Enter() : absl::StatusOr<CallPool::Place>(caller.status());
  if (!place.ok()) {
    Finish(EndOf(place.status()));
    return;
  }
  place_ = *std::move(place);
  StartRead(&read_buffer_);
}

void UploadStream::OnDone() {
  watched_->Ended();
  pools_.LetGo(std::move(job_));
  delete this;
}

void UploadStream::OnReadDone(bool ok) {
  if (!ok) {  // The worker has closed its side.
    if (job_ == nullptr) {
      return Finish(EndOf(absl::InvalidArgumentError("no open message arrived")));
    }
    return Finish(EndOf(GuardedRun([this] {
      v1::UploadWeightsResponse response;
      response.set_chunks(static_cast<int64_t>(chunks_.size()));
      response.set_job_ready(job_->Status().phase != JobPhase::kAwaitingWeights);
      response_ = proto::SerializeControl(response);
    })));
  }
  const absl::Status handled = Guarded([this] {
    const absl::StatusOr<proto::Frame<v1::UploadWeightsRequest>> frame =
        proto::ParseUploadWeightsRequest(read_buffer_);
    read_buffer_.Clear();
    return frame.ok() ? Handle(*frame) : frame.status();
  });
  if (!handled.ok()) return Finish(EndOf(handled));
  StartRead(&read_buffer_);
}

absl::Status UploadStream::Handle(const proto::Frame<v1::UploadWeightsRequest>& frame) {
  if (frame.message.kind_case() == v1::UploadWeightsRequest::KIND_NOT_SET) {
    return absl::InvalidArgumentError(
        "a message without kind, or of a kind that this service does not know");
  }
  if (frame.message.has_open() != (job_ == nullptr)) {
    return absl::InvalidArgumentError("open must be the first message of a stream, and only that");
  }
  if (frame.message.has_open()) return Open(frame.message.open());
  return Write(frame.message.weights().header(), frame.payload);
}

absl::Status UploadStream::Open(const v1::OpenTrain& request) {
  BALLAST_ASSIGN_OR_RETURN(const std::shared_ptr<Job> job,
                           FindJob(engine_, *caller_, request.name(), request.uid()));
  if (request.rank() < 0 || request.rank() >= job->layout().world_size()) {
    return absl::InvalidArgumentError(absl::StrCat("rank ", request.rank(), " of ", request.name(),
                                                   ", which has world size ",
                                                   job->layout().world_size()));
  }
  const JobStatus status = job->Status();
  const Generation generation = proto::FromProto(request.generation());
  // A free rank has the empty process id, which no process may have.
  if (request.process_id().empty() || generation != status.generation ||
      request.process_id() != status.ranks[request.rank()].process_id) {
    return WithReason(
        absl::AbortedError(absl::StrCat(
            "rank ", request.rank(), " of ", request.name(), " is not held by process '",
            request.process_id(), "' in generation ", ToString(generation), " (generation is ",
            ToString(status.generation), "); attach again")),
        generation != status.generation ? reason::kOlderGeneration : reason::kRankNotHeld);
  }
  rank_ = request.rank();
  uploader_ = {.generation = generation, .process_id = request.process_id()};
  job_ = job;
  watched_->IsOverIf(IsGone(engine_, *caller_, *job));
  return absl::OkStatus();
}

absl::Status UploadStream::Write(const v1::WeightHeader& header, const proto::Payload& payload) {
  if (header.step() != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("first weights have step 0, not ", header.step()));
  }
  const absl::Span<const Chunk> chunks = job_->layout().chunks();
  const int64_t chunk = int64_t{header.chunk()} + job_->layout().first_on_wire(rank_);
  if (chunk >= static_cast<int64_t>(chunks.size()) || chunks[chunk].rank != rank_) {
    return absl::InvalidArgumentError(absl::StrCat("chunk ", header.chunk(), " is not one of rank ",
                                                   rank_, "'s, of ", chunks.size(), " in all"));
  }
  BALLAST_RETURN_IF_ERROR(job_->WriteInitialWeights(chunk, payload.pieces(), uploader_).status());
  chunks_.insert(header.chunk());
  return absl::OkStatus();
}

}  // namespace ballast::server
