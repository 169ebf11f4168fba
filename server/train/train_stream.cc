#include "server/train/train_stream.h"

#include <grpcpp/server_context.h>

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/status.h"
#include "proto/convert.h"
#include "proto/status.h"
#include "server/call_errors.h"
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
                         grpc::CallbackServerContext& context, const absl::StatusOr<Caller>& caller)
    : engine_(engine),
      pools_(pools),
      caller_(caller),
      // As long as it is the rank's stream it may be slow.
      watched_(pools.watch.Watch([this, &context] { GiveUp(context); }, WatchedCall::kOpenSeconds)),
      outbox_(std::make_shared<RankOutbox>(static_cast<RankWire&>(*this), watched_)) {
  if (!caller.ok()) {
    // It ends as if its first message had failed; nothing is read.
    has_begun_ = true;
    outbox_->MessageBegins();
    outbox_->MessageFailed(caller.status());
    return;
  }
  watched_->PeerMustAct();
  Read();
}

void TrainStream::GiveUp(grpc::CallbackServerContext& context) {
  if (has_begun_) return context.TryCancel();
  const std::shared_ptr<RankOutbox> outbox = outbox_;  // The stream may be gone before this ends.
  outbox->OnDetached(NoOpenError());
}

void TrainStream::OnReadDone(bool ok) {
  has_begun_ = true;
  watched_->PeerActed();
  outbox_->MessageBegins();
  // The worker has closed its side; or the call is broken, and then OnCancel is called, too.
  if (!ok) return outbox_->NoMoreMessages();
  const absl::StatusOr<std::optional<uint64_t>> handled = HandleRead();
  if (!handled.ok()) return outbox_->MessageFailed(handled.status());
  if (handled->has_value()) outbox_->MessageDone(**handled);
}

// Frees the payload before the next one is read.
absl::StatusOr<std::optional<uint64_t>> TrainStream::HandleRead() {
  absl::StatusOr<proto::Frame<v1::TrainRequest>> frame = proto::ParseTrainRequest(read_buffer_);
  read_buffer_.Clear();  // The frame keeps what it needs.
  BALLAST_RETURN_IF_ERROR(frame.status());
  const v1::TrainRequest& message = frame->message;
  if (message.has_open() && job_ == nullptr) {
    // Only now: a stream that says nothing takes no place from others.
    BALLAST_ASSIGN_OR_RETURN(place_, pools_.streams.Enter());
    BALLAST_RETURN_IF_ERROR(Open(message.open()));
    return std::nullopt;
  }
  if (message.has_discard() && rank_stream_ != nullptr) {
    Discard(message.discard());
    return std::nullopt;
  }
  if (MayMeetProvisional(message)) {
    StopProvisionalAndHandle(*std::move(frame));
    return std::nullopt;
  }
  BALLAST_RETURN_IF_ERROR(Handle(*frame));
  return MessagesIn(message);
}

void TrainStream::OnCancel() {
  outbox_->Cancelled();
  // Until what waits in the engine is given up, its message is being handled, and the stream cannot
  // end.
  pending_->Cancel();
}

void TrainStream::OnDone() {
  // First: a look may be in GiveUp, and this waits for its end.
  watched_->Ended();
  if (rank_stream_ != nullptr) {
    const absl::Status end = outbox_->end();
    rank_stream_->EndsBecause(end.ok() ? "its process has closed the stream"
                                       : std::string(end.message()));
  }
  rank_stream_.reset();  // Detaches the outbox.
  outbox_->Close();
  pools_.LetGo(std::move(job_));
  delete this;
}

void TrainStream::Finish(const absl::Status& status) {
  ServerBidiReactor::Finish(proto::ToGrpc(status));
}

void TrainStream::Answered(const absl::Status& status, uint64_t messages) {
  // On a thread of the engine's: once the outbox has counted the message, gRPC may end the stream
  // and delete it meanwhile. The outbox is still used then.
  const std::shared_ptr<RankOutbox> outbox = outbox_;
  status.ok() ? outbox->MessageDone(messages) : outbox->MessageFailed(status);
}

absl::Status TrainStream::Handle(const proto::Frame<v1::TrainRequest>& frame) {
  const v1::TrainRequest& message = frame.message;
  if (message.kind_case() == v1::TrainRequest::KIND_NOT_SET) {
    return NoKindError();
  }
  if (message.has_open() || rank_stream_ == nullptr) {
    return NotFirstError();
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
    case v1::TrainRequest::kVote:
      return Vote(message.vote());
    case v1::TrainRequest::kDiscard:  // Not here.
    case v1::TrainRequest::kOpen:     // Refused above, like the next one.
    case v1::TrainRequest::KIND_NOT_SET:
      break;
  }
  return absl::OkStatus();
}

absl::Status TrainStream::Open(const v1::OpenTrain& request) {
  BALLAST_ASSIGN_OR_RETURN(job_, FindJob(engine_, *caller_, request.name(), request.uid()));
  // A job that is closed detaches its streams. Of a role that is taken away it knows nothing.
  watched_->IsOverIf(caller_->IsRevoked(job_->spec().name));
  BALLAST_ASSIGN_OR_RETURN(const UpdateMode update_mode, proto::FromProto(request.update_mode()));
  // The Done may end the stream, and gRPC delete it, before OpenStream has returned.
  const std::shared_ptr<Job> job = job_;
  const std::shared_ptr<PendingCall> pending = pending_;
  const OpenStreamRequest open = {.uid = request.uid(),
                                  .rank = request.rank(),
                                  .process_id = request.process_id(),
                                  .generation = proto::FromProto(request.generation()),
                                  .update_mode = update_mode,
                                  .weights_in_place = request.weights_in_shared_memory(),
                                  .orthogonalizes = request.orthogonalizes()};
  pending->Await(job->OpenStream(
      open, outbox_,
      [this, rank = request.rank()](absl::StatusOr<std::unique_ptr<RankStream>> stream) {
        Answered(Opened(rank, std::move(stream)));
      }));
  return absl::OkStatus();
}

// The outbox counts the open message as being handled until the end of this, so that the stream
// cannot end, nor be deleted, before.
absl::Status TrainStream::Opened(int rank, absl::StatusOr<std::unique_ptr<RankStream>> stream) {
  BALLAST_ASSIGN_OR_RETURN(rank_stream_, std::move(stream));
  rank_chunks_ = job_->layout().chunks_of_rank(rank).size();
  first_of_rank_ = job_->layout().first_of_rank(rank);
  const RankPosition& position = rank_stream_->position();
  // An earlier stream may have brought them with may_guess.
  if (!position.delivered.empty()) may_guess_at_ = {position.open_step, position.attempt};
  outbox_->Opened(job_, rank, position);
  return absl::OkStatus();  // The next message is read.
}

absl::Status TrainStream::BeginStep(const v1::BeginStep& request) {
  BALLAST_ASSIGN_OR_RETURN(const StepSettings settings, FromMessage(request));
  return rank_stream_->BeginStep({request.step(), request.attempt()}, settings);
}

absl::Status TrainStream::Contribute(const v1::GradientHeader& header,
                                     const proto::Payload& payload) {
  Contribution contribution = FromMessage(header, payload.pieces());
  // With a mesh, chunks are numbered within their rank on the wire.
  contribution.chunk += first_of_rank_;
  return Contribute(contribution);
}

absl::Status TrainStream::Contribute(const v1::SharedGradients& request) {
  const auto chunks = static_cast<size_t>(request.chunks_size());
  // Acknowledgements count the chunks, so a message without any could not be acknowledged. More
  // than the rank has would be repeats.
  if (chunks == 0 || chunks > rank_chunks_) {
    return absl::InvalidArgumentError(
        absl::StrCat("shared gradients of ", chunks, " chunks, of a rank that has ", rank_chunks_));
  }
  Contribution contribution = {.step = request.step(),
                               .attempt = request.attempt(),
                               .micro_step_begin = request.micro_step_begin(),
                               .micro_step_end = request.micro_step_end(),
                               .final = request.final(),
                               .may_guess = request.may_guess(),
                               .in_place = true};
  for (const uint32_t chunk : request.chunks()) {
    contribution.chunk = int64_t{chunk} + first_of_rank_;
    BALLAST_RETURN_IF_ERROR(Contribute(contribution));
  }
  return absl::OkStatus();
}

absl::Status TrainStream::Contribute(const Contribution& contribution) {
  const StepAttempt at = {contribution.step, contribution.attempt};
  // One of an attempt that has been discarded may come late.
  if (contribution.may_guess && (!may_guess_at_.has_value() || *may_guess_at_ < at)) {
    may_guess_at_ = at;
  }
  return rank_stream_->Contribute(contribution).status();
}

bool TrainStream::MayMeetProvisional(const v1::TrainRequest& message) const {
  if (!may_guess_at_.has_value()) return false;
  const auto may = [this](const auto& header) {
    // What begins with 0 is the first gradient of its chunk in the attempt, before which the chunk
    // is not updated, or a repeat, which changes nothing.
    return header.micro_step_begin() > 0 &&
           StepAttempt{header.step(), header.attempt()} == *may_guess_at_;
  };
  return message.has_gradient() ? may(message.gradient().header())
                                : message.has_shared_gradients() && may(message.shared_gradients());
}

// As in Opened, the message counts as being handled until the end of the Done, which has it.
void TrainStream::StopProvisionalAndHandle(proto::Frame<v1::TrainRequest> frame) {
  const auto stop = [this](const auto& header, absl::Span<const uint32_t> on_wire,
                           Done<bool> done) {
    std::vector<int64_t> chunks;
    for (const uint32_t chunk : on_wire) chunks.push_back(int64_t{chunk} + first_of_rank_);
    return rank_stream_->StopProvisional({header.step(), header.attempt()},
                                         header.micro_step_begin(), chunks, std::move(done));
  };
  // The call may wait, so it keeps the whole message, payload included. Nothing more is read
  // meanwhile, so this is one message.
  auto kept = std::make_shared<const proto::Frame<v1::TrainRequest>>(std::move(frame));
  const v1::TrainRequest& message = kept->message;
  Done<bool> handle = [this, kept = std::move(kept)](absl::StatusOr<bool> stopped) mutable {
    const uint64_t messages = MessagesIn(kept->message);
    const absl::Status handled = stopped.ok() ? Handle(*kept) : stopped.status();
    kept = nullptr;  // Frees the payload before the next one is read.
    Answered(handled, messages);
  };
  const std::shared_ptr<PendingCall> pending = pending_;
  if (message.has_shared_gradients()) {
    const v1::SharedGradients& gradients = message.shared_gradients();
    return pending->Await(stop(gradients, gradients.chunks(), std::move(handle)));
  }
  const v1::GradientHeader& header = message.gradient().header();
  const uint32_t chunk = header.chunk();
  pending->Await(stop(header, {&chunk, 1}, std::move(handle)));
}

absl::Status TrainStream::EndMicroStep(const v1::EndMicroStep& request) {
  return rank_stream_->EndMicroStep({request.step(), request.attempt()}, request.micro_step(),
                                    FromMessage(request));
}

template <typename Message>
absl::Status TrainStream::Report(const Message& message) {
  if (!message.has_report()) return absl::OkStatus();
  return rank_stream_->Report({message.step(), message.attempt()},
                              proto::FromProto(message.report()));
}

absl::Status TrainStream::Seal(const v1::Seal& request) {
  outbox_->Sealing(request.step());  // Before a refusal can arrive.
  BALLAST_ASSIGN_OR_RETURN(const std::optional<StepVote> vote, VoteOf(request));
  BALLAST_RETURN_IF_ERROR(Report(request));
  BALLAST_ASSIGN_OR_RETURN(
      const std::optional<SealRefusal> refusal,
      rank_stream_->Seal({request.step(), request.attempt()}, request.micro_steps(), vote,
                         RefusalsHeard(request.vote())));
  if (refusal) outbox_->OnSealRefused(request.step(), *refusal);
  return absl::OkStatus();
}

absl::Status TrainStream::Vote(const v1::CastVote& request) {
  BALLAST_ASSIGN_OR_RETURN(const StepVote vote, FromMessage(request.vote()));
  BALLAST_RETURN_IF_ERROR(Report(request));
  return rank_stream_->Vote({request.step(), request.attempt()}, vote,
                            RefusalsHeard(request.vote()));
}

// As in Opened, the message counts as being handled until the end of the Done.
void TrainStream::Discard(const v1::Discard& request) {
  const StepAttempt at = {request.step(), request.attempt()};
  const std::shared_ptr<PendingCall> pending = pending_;
  pending->Await(rank_stream_->Discard(at, [this, at](absl::StatusOr<bool> discarded) {
    // Otherwise the decision is the answer.
    if (discarded.ok() && *discarded) outbox_->Discarded({at.step, at.attempt + 1});
    Answered(discarded.status());
  }));
}

}  // namespace ballast::server
