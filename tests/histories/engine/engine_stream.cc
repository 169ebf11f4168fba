#include "tests/histories/engine/engine_stream.h"

#include <utility>

#include "cpu_optimizer_service/common/status.h"
#include "proto/convert.h"
#include "proto/frame.h"
#include "server/train/step_message.h"

namespace ballast::histories {

EngineStream::EngineStream(Host& host, Wires& wires, int rank, client::TrainListener& listener)
    : host_(host),
      wires_(wires),
      rank_(rank),
      listener_(listener),
      outbox_(std::make_shared<server::RankOutbox>(static_cast<server::RankWire&>(*this))),
      thread_([this] { Run(); }) {}

EngineStream::~EngineStream() {
  {
    MutexLock lock(mutex_);
    ending_ = true;
    changed_.NotifyAll();
  }
  thread_.join();
  for (Message& message : up_) {
    if (message.let_go) message.let_go();
  }
}

void EngineStream::Send(const v1::TrainRequest& message) {
  MutexLock lock(mutex_);
  up_.push_back({.message = message});
  changed_.NotifyAll();
}

void EngineStream::SendGradient(const v1::GradientHeader& header,
                                absl::Span<const std::byte> payload, std::function<void()> let_go) {
  Message message = {.payload = payload, .let_go = std::move(let_go)};
  *message.message.mutable_gradient()->mutable_header() = header;
  MutexLock lock(mutex_);
  up_.push_back(std::move(message));
  changed_.NotifyAll();
}

// Never, since attaching through this transport offers no memory; it would be refused.
void EngineStream::SendSharedGradient(const v1::GradientHeader& header) {
  v1::TrainRequest message;
  message.mutable_shared_gradients()->set_step(header.step());
  Send(message);
}

// ---------------------------------------------------------------- the outbox's side

void EngineStream::Read() {
  MutexLock lock(mutex_);
  reading_ = true;
  changed_.NotifyAll();
}

void EngineStream::Write(const grpc::ByteBuffer& bytes) {
  MutexLock lock(mutex_);
  down_ = &bytes;
  changed_.NotifyAll();
}

void EngineStream::Finish(const absl::Status& status) {
  MutexLock lock(mutex_);
  finished_ = status;
  changed_.NotifyAll();
}

// ---------------------------------------------------------------- the thread

void EngineStream::Run() {
  bool cancelled = false;
  for (;;) {
    const grpc::ByteBuffer* down = nullptr;
    std::optional<Message> up;
    {
      MutexLock lock(mutex_);
      while (down_ == nullptr && !finished_ && !((ending_ || died_) && !cancelled) &&
             !(reading_ && !up_.empty())) {
        changed_.Wait(mutex_);
      }
      down = std::exchange(down_, nullptr);
      if (down == nullptr && finished_) break;
      if (down == nullptr && !((ending_ || died_) && !cancelled)) {
        up = std::move(up_.front());
        up_.pop_front();
        reading_ = false;
      }
      broken_ = broken_ || ending_;
    }
    if (down != nullptr) {
      TakeDown(*down);
    } else if (up.has_value()) {
      TakeUp(*std::move(up));
    } else {
      cancelled = true;
      if (HasDied() && !broken_) BreakOff(/*seen=*/true);
      outbox_->Cancelled();
    }
  }
  // Before the process may end.
  if (unseen_) wires_.KeepUnseen(std::move(rank_stream_));
  rank_stream_.reset();
  outbox_->Close();
  visit_.reset();
  absl::Status status;
  {
    MutexLock lock(mutex_);
    status = *finished_;
    if (ending_) return;
  }
  TellClosed(status);
}

void EngineStream::TellClosed(const absl::Status& status) {
  if (!std::exchange(told_closed_, true)) listener_.OnClosed(status);
}

void EngineStream::TakeDown(const grpc::ByteBuffer& bytes) {
  if (!broken_ && HasDied()) BreakOff(/*seen=*/true);
  if (!broken_ && !wires_.ComesDown(rank_)) BreakOff(/*seen=*/true);
  if (!broken_) {
    const auto frame = proto::ParseTrainResponse(bytes);
    if (frame.ok()) {
      listener_.OnMessage(frame->message, frame->payload.pieces());
    } else {
      TellClosed(frame.status());
    }
  }
  outbox_->WriteDone(!broken_);
}

void EngineStream::BreakOff(bool seen) {
  broken_ = true;
  if (seen) {
    rank_stream_.reset();
    outbox_->Cancelled();
  }
  unseen_ = !seen && rank_stream_ != nullptr;
  TellClosed(absl::UnavailableError("the connection broke"));
}

void EngineStream::TakeUp(Message message) {
  outbox_->MessageBegins();
  const Wires::Fate fate =
      broken_ ? Wires::Fate::kBreakBefore : wires_.GoesUp(rank_, message.message);
  absl::Status handled;
  if (!broken_ && fate == Wires::Fate::kBreakBefore) BreakOff(/*seen=*/true);
  if (!broken_ && fate == Wires::Fate::kBreakUnseen) BreakOff(/*seen=*/false);
  if (!broken_) {
    handled = Handle(message);
    if (handled.ok() && fate == Wires::Fate::kTwice) handled = Handle(message);
    if (HasDied()) BreakOff(/*seen=*/true);
    if (handled.ok() && !broken_) wires_.WasHandled(rank_, message.message);
    if (fate == Wires::Fate::kBreakAfter && !broken_) BreakOff(/*seen=*/true);
  }
  if (message.let_go) message.let_go();
  if (handled.ok()) {
    outbox_->MessageDone();
  } else {
    outbox_->MessageFailed(handled);
  }
}

// ---------------------------------------------------------------- as the service does

absl::Status EngineStream::Handle(const Message& message) {
  if (message.message.has_open()) return Open(message.message.open());
  if (rank_stream_ == nullptr) return absl::InvalidArgumentError("not opened");
  switch (message.message.kind_case()) {
    case v1::TrainRequest::kBeginStep:
      return BeginStep(message.message.begin_step());
    case v1::TrainRequest::kGradient:
      return Contribute(message);
    case v1::TrainRequest::kEndMicroStep:
      return EndMicroStep(message.message.end_micro_step());
    case v1::TrainRequest::kSeal:
      return Seal(message.message.seal());
    case v1::TrainRequest::kVote:
      return Vote(message.message.vote());
    case v1::TrainRequest::kDiscard:
      return Discard(message.message.discard());
    default:
      return absl::InvalidArgumentError("a message of another kind");
  }
}

absl::Status EngineStream::Open(const v1::OpenTrain& request) {
  BALLAST_ASSIGN_OR_RETURN(const proto::ResourceName name, proto::ParseJobName(request.name()));
  visit_ = host_.Enter([this] {
    MutexLock lock(mutex_);
    died_ = true;
    changed_.NotifyAll();
  });
  BALLAST_ASSIGN_OR_RETURN(const std::shared_ptr<Job> job, visit_->engine().FindJob(name.job));
  BALLAST_ASSIGN_OR_RETURN(const UpdateMode update_mode, proto::FromProto(request.update_mode()));
  BALLAST_ASSIGN_OR_RETURN(
      rank_stream_,
      visit_->Await<std::unique_ptr<RankStream>>([&](Done<std::unique_ptr<RankStream>> done) {
        (void)job->OpenStream({.uid = request.uid(),
                               .rank = request.rank(),
                               .process_id = request.process_id(),
                               .generation = proto::FromProto(request.generation()),
                               .update_mode = update_mode,
                               .orthogonalizes = request.orthogonalizes()},
                              outbox_, std::move(done));
      }));
  first_of_rank_ = job->layout().first_of_rank(request.rank());
  wires_.WasOpened(rank_, rank_stream_->position());
  outbox_->Opened(job, request.rank(), rank_stream_->position());
  return absl::OkStatus();
}

absl::Status EngineStream::BeginStep(const v1::BeginStep& request) {
  BALLAST_ASSIGN_OR_RETURN(const StepSettings settings, server::FromMessage(request));
  return rank_stream_->BeginStep({request.step(), request.attempt()}, settings);
}

absl::Status EngineStream::Contribute(const Message& message) {
  Contribution contribution =
      server::FromMessage(message.message.gradient().header(), {&message.payload, 1});
  contribution.chunk += first_of_rank_;
  if (contribution.micro_step_begin > 0) {  // One before it may have come with may_guess.
    BALLAST_RETURN_IF_ERROR(rank_stream_
                                ->StopProvisional({contribution.step, contribution.attempt},
                                                  contribution.micro_step_begin,
                                                  {contribution.chunk})
                                .status());
  }
  return rank_stream_->Contribute(contribution).status();
}

absl::Status EngineStream::EndMicroStep(const v1::EndMicroStep& request) {
  return rank_stream_->EndMicroStep({request.step(), request.attempt()}, request.micro_step(),
                                    server::FromMessage(request));
}

absl::Status EngineStream::Seal(const v1::Seal& request) {
  BALLAST_ASSIGN_OR_RETURN(const std::optional<StepVote> vote, server::VoteOf(request));
  BALLAST_ASSIGN_OR_RETURN(
      const std::optional<SealRefusal> refusal,
      rank_stream_->Seal({request.step(), request.attempt()}, request.micro_steps(), vote,
                         server::RefusalsHeard(request.vote())));
  if (refusal) outbox_->OnSealRefused(request.step(), *refusal);
  return absl::OkStatus();
}

absl::Status EngineStream::Vote(const v1::CastVote& request) {
  BALLAST_ASSIGN_OR_RETURN(const StepVote vote, server::FromMessage(request.vote()));
  return rank_stream_->Vote({request.step(), request.attempt()}, vote,
                            server::RefusalsHeard(request.vote()));
}

absl::Status EngineStream::Discard(const v1::Discard& request) {
  const StepAttempt at = {request.step(), request.attempt()};
  BALLAST_ASSIGN_OR_RETURN(const bool done, visit_->Await<bool>([&](Done<bool> called) {
    (void)rank_stream_->Discard(at, std::move(called));
  }));
  if (done) outbox_->Discarded({at.step, at.attempt + 1});
  return absl::OkStatus();
}

}  // namespace ballast::histories
