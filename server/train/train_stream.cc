#include "server/train/train_stream.h"

#include <grpcpp/server_context.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/status.h"
#include "proto/convert.h"
#include "proto/status.h"
#include "server/find_job.h"
#include "server/train/step_message.h"

namespace ballast::server {
namespace {

// Acknowledgements count a message of several chunks as one for each.
uint64_t MessagesIn(const v1::TrainRequest& message) {
  return message.has_shared_gradients() ? message.shared_gradients().chunks_size() : 1;
}

}  // namespace

TrainStream::TrainStream(const Engine& engine, CallPools& pools,
                         grpc::CallbackServerContext& context)
    : engine_(engine),
      pools_(pools),
      // As long as it is the rank's stream it may be slow.
      watched_(pools.watch.Watch([&context] { context.TryCancel(); }, WatchedCall::kForEver)),
      outbox_(std::make_shared<RankOutbox>(static_cast<RankWire&>(*this), watched_)) {
  absl::StatusOr<CallPool::Place> place = pools.streams.Enter();
  if (!place.ok()) {
    outbox_->MessageBegins();
    outbox_->MessageFailed(place.status());
    return;
  }
  place_ = *std::move(place);
  Read();
}

void TrainStream::OnReadDone(bool ok) {
  outbox_->MessageBegins();
  if (!ok) return outbox_->NoMoreMessages();
  absl::StatusOr<proto::Frame<v1::TrainRequest>> frame = proto::ParseTrainRequest(read_buffer_);
  read_buffer_.Clear();  // The frame keeps what it needs.
  const uint64_t messages = frame.ok() ? MessagesIn(frame->message) : 0;
  if (frame.ok() && frame->message.has_open() && job_ == nullptr) {
    return Open(frame->message.open());
  }
  if (frame.ok() && frame->message.has_discard() && rank_stream_ != nullptr) {
    return Discard(frame->message.discard());
  }
  const absl::Status handled = frame.ok() ? Handle(*frame) : frame.status();
  frame = absl::UnknownError("handled");  // Frees the payload before the next one is read.
  if (handled.ok()) {
    outbox_->MessageDone(messages);
  } else {
    outbox_->MessageFailed(handled);
  }
}

void TrainStream::OnCancel() {
  outbox_->Cancelled();
  pending_->Cancel();
}

void TrainStream::OnDone() {
  watched_->Ended();
  rank_stream_.reset();  // Detaches the outbox.
  outbox_->Close();
  pools_.LetGo(std::move(job_));
  delete this;
}

void TrainStream::Finish(const absl::Status& status) {
  ServerBidiReactor::Finish(proto::ToGrpc(status));
}

absl::Status TrainStream::Handle(const proto::Frame<v1::TrainRequest>& frame) {
  const v1::TrainRequest& message = frame.message;
  if (message.kind_case() == v1::TrainRequest::KIND_NOT_SET) {
    return absl::InvalidArgumentError(
        "a message without kind, or of a kind that this service does not know");
  }
  if (message.has_open() || rank_stream_ == nullptr) {
    return absl::InvalidArgumentError("open must be the first message of a stream, and only that");
  }
  switch (message.kind_case()) {
    case v1::TrainRequest::kBeginStep:
      return BeginStep(message.begin_step());
    case v1::TrainRequest::kGradient:
      return Contribute(message.gradient().header(), frame.payload);
    case v1::TrainRequest::kSharedGradients:
      return Contribute(message.shared_gradients());
    case v1::TrainRequest::kEndMicroStep:
      return EndMicroStep(message.end_micro_step());
    case v1::TrainRequest::kSeal:
      return Seal(message.seal());
    case v1::TrainRequest::kDiscard:  // Not here.
    case v1::TrainRequest::kOpen:     // Refused above, like the next one.
    case v1::TrainRequest::KIND_NOT_SET:
      break;
  }
  return absl::OkStatus();
}

void TrainStream::Open(const v1::OpenTrain& request) {
  const absl::Status started = StartOpening(request);
  if (!started.ok()) outbox_->MessageFailed(started);
}

absl::Status TrainStream::StartOpening(const v1::OpenTrain& request) {
  BALLAST_ASSIGN_OR_RETURN(job_, FindJob(engine_, request.name(), request.uid()));
  BALLAST_ASSIGN_OR_RETURN(const UpdateMode update_mode, proto::FromProto(request.update_mode()));
  const std::shared_ptr<PendingCall> pending = pending_;  // The Done may end this stream.
  const std::shared_ptr<Job> job = job_;
  pending->Await(job->OpenStream(
      {.uid = request.uid(),
       .rank = request.rank(),
       .process_id = request.process_id(),
       .generation = request.generation(),
       .update_mode = update_mode,
       .weights_in_place = request.weights_in_shared_memory()},
      outbox_, [this, rank = request.rank()](absl::StatusOr<std::unique_ptr<RankStream>> stream) {
        Opened(rank, std::move(stream));
      }));
  return absl::OkStatus();
}

// The outbox counts the open message as being handled until the end of this, so that the stream
// cannot end, nor be deleted, before.
void TrainStream::Opened(int rank, absl::StatusOr<std::unique_ptr<RankStream>> stream) {
  if (!stream.ok()) return outbox_->MessageFailed(stream.status());
  rank_stream_ = *std::move(stream);
  rank_chunks_ = job_->layout().chunks_of_rank(rank).size();
  first_on_wire_ = job_->layout().first_on_wire(rank);
  outbox_->Opened(job_, rank, rank_stream_->position());
  outbox_->MessageDone();  // Reads the next message.
}

absl::Status TrainStream::BeginStep(const v1::BeginStep& request) {
  BALLAST_ASSIGN_OR_RETURN(const StepSettings settings, FromMessage(request));
  return rank_stream_->BeginStep({request.step(), request.attempt()}, settings);
}

absl::Status TrainStream::Contribute(const v1::GradientHeader& header,
                                     const proto::Payload& payload) {
  Contribution contribution = FromMessage(header, payload.pieces());
  contribution.chunk += first_on_wire_;
  return rank_stream_->Contribute(contribution).status();
}

absl::Status TrainStream::Contribute(const v1::SharedGradients& request) {
  const auto chunks = static_cast<size_t>(request.chunks_size());
  if (chunks == 0 || chunks > rank_chunks_) {
    return absl::InvalidArgumentError(
        absl::StrCat("shared gradients of ", chunks, " chunks, of a rank that has ", rank_chunks_));
  }
  Contribution contribution = {.step = request.step(),
                               .attempt = request.attempt(),
                               .micro_step_begin = request.micro_step_begin(),
                               .micro_step_end = request.micro_step_end(),
                               .final = request.final(),
                               .in_place = true};
  for (const uint32_t chunk : request.chunks()) {
    contribution.chunk = int64_t{chunk} + first_on_wire_;
    BALLAST_RETURN_IF_ERROR(rank_stream_->Contribute(contribution).status());
  }
  return absl::OkStatus();
}

absl::Status TrainStream::EndMicroStep(const v1::EndMicroStep& request) {
  return rank_stream_->EndMicroStep({request.step(), request.attempt()}, request.micro_step(),
                                    FromMessage(request));
}

absl::Status TrainStream::Seal(const v1::Seal& request) {
  outbox_->Sealing(request.step());  // Before a refusal can arrive.
  BALLAST_ASSIGN_OR_RETURN(
      const std::optional<SealRefusal> refusal,
      rank_stream_->Seal({request.step(), request.attempt()}, request.micro_steps()));
  if (refusal) outbox_->OnSealRefused(request.step(), *refusal);
  return absl::OkStatus();
}

// As in Opened, the message counts as being handled until the end of the Done.
void TrainStream::Discard(const v1::Discard& request) {
  const StepAttempt at = {request.step(), request.attempt()};
  const std::shared_ptr<PendingCall> pending = pending_;  // The Done may end this stream.
  pending->Await(rank_stream_->Discard(at, [this, at](absl::StatusOr<bool> discarded) {
    if (!discarded.ok()) return outbox_->MessageFailed(discarded.status());
    // Otherwise the decision is the answer.
    if (*discarded) outbox_->Discarded({at.step, at.attempt + 1});
    outbox_->MessageDone();
  }));
}

}  // namespace ballast::server
