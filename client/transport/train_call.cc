#include "client/transport/train_call.h"

#include <grpc/support/time.h>
#include <grpcpp/alarm.h>
#include <grpcpp/client_context.h>
#include <grpcpp/completion_queue.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/support/byte_buffer.h>

#include <deque>
#include <optional>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_set.h"
#include "cpu_optimizer_service/common/system/mutex.h"
#include "proto/frame.h"
#include "proto/status.h"

namespace ballast::client {
namespace {

class GrpcTrainCall final : public TrainCall {
 public:
  GrpcTrainCall(std::shared_ptr<grpc::Channel> channel, TrainListener& listener)
      : listener_(listener), stub_(std::move(channel)) {
    call_ = stub_.PrepareCall(&context_, "/ballast.v1.TrainService/Train", &queue_);
    call_->StartCall(&tags_.start);
    thread_ = std::thread([this] { Run(); });
  }

  ~GrpcTrainCall() override {
    // It ends all operations; the call then finishes, and Run returns.
    context_.TryCancel();
    thread_.join();
  }

  void Send(const v1::TrainRequest& message) override {
    Queue({.bytes = proto::SerializeControl(message)});
  }

  void SendGradient(const v1::GradientHeader& header, absl::Span<const std::byte> payload,
                    std::function<void()> let_go) override {
    Queue({.bytes = proto::SerializeGradient(header, payload, std::move(let_go))});
  }

  void SendSharedGradient(const v1::GradientHeader& header) override {
    Queue({.shared = SharedGradientRequest(header), .chunks = {header.chunk()}});
  }

 private:
  // A message that waits to be sent: a finished one, or one that may still get more chunks.
  struct Unsent {
    grpc::ByteBuffer bytes;                  // Not set if `shared` is.
    std::optional<v1::TrainRequest> shared;  // Gradients in shared memory.
    absl::flat_hash_set<uint32_t> chunks;    // The chunks in `shared`.
  };
  enum class Event : int { kStarted, kRead, kWritten, kWoken, kFinished };

  static bool SameExceptChunks(const v1::SharedGradients& a, const v1::SharedGradients& b) {
    return a.step() == b.step() && a.attempt() == b.attempt() &&
           a.micro_step_begin() == b.micro_step_begin() &&
           a.micro_step_end() == b.micro_step_end() && a.final() == b.final() &&
           a.may_guess() == b.may_guess();
  }

  // Whether `message` became part of the last waiting message. A message names each chunk at most
  // once, so it has at most as many chunks as the rank, which is what a service accepts.
  bool Merge(const Unsent& message) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (!message.shared.has_value() || unsent_.empty()) return false;
    Unsent& last = unsent_.back();
    if (!last.shared.has_value()) return false;
    v1::SharedGradients& waiting = *last.shared->mutable_shared_gradients();
    const v1::SharedGradients& more = message.shared->shared_gradients();
    if (!SameExceptChunks(waiting, more)) return false;
    if (!last.chunks.insert(more.chunks(0)).second) return false;
    waiting.add_chunks(more.chunks(0));
    return true;
  }

  void Queue(Unsent message) {
    MutexLock lock(mutex_);
    if (ended_ || Merge(message)) return;
    unsent_.push_back(std::move(message));
    if (busy_) return;
    // A write here would run gRPC's work, and the release of other payloads, under the caller's
    // lock. The alarm lets the stream's thread write.
    busy_ = true;
    wake_.Set(&queue_, gpr_inf_past(GPR_CLOCK_REALTIME), &tags_.woken);
  }

  void Run() {
    void* tag = nullptr;
    bool ok = false;
    while (queue_.Next(&tag, &ok)) Handle(*static_cast<Event*>(tag), ok);
  }

  void Handle(Event event, bool ok) {
    switch (event) {
      case Event::kStarted:
        if (ok) {
          reading_ = true;
          call_->Read(&incoming_, &tags_.read);
        }
        WriteNext(ok);
        break;
      case Event::kRead:
        if (ok) {
          // Before the next read, which takes the same buffer. So a slow listener slows the
          // service, and does not fill this process's memory.
          Deliver();
          call_->Read(&incoming_, &tags_.read);
        } else {
          reading_ = false;
        }
        break;
      case Event::kWritten:
      case Event::kWoken:
        WriteNext(ok);
        break;
      case Event::kFinished:
        listener_.OnClosed(malformed_.ok() ? proto::FromGrpc(status_) : malformed_);
        // It was the last operation, so nothing is added to the queue any more.
        queue_.Shutdown();
        return;
    }
    // Only a failed read is the end of the stream: after a failed write, messages that the service
    // has sent can still arrive.
    if (!reading_ && !finishing_ && StopSending()) {
      finishing_ = true;
      call_->Finish(&status_, &tags_.finished);
    }
  }

  void Deliver() {
    if (!malformed_.ok()) return;  // The call is cancelled; the listener gets no later message.
    absl::StatusOr<proto::Frame<v1::TrainResponse>> frame = proto::ParseTrainResponse(incoming_);
    incoming_.Clear();
    if (frame.ok()) {
      listener_.OnMessage(frame->message, frame->payload.pieces());
    } else {
      malformed_ = frame.status();
      context_.TryCancel();
    }
  }

  // Called when no write and no wake-up is under way. Starts the next write, if there is one.
  void WriteNext(bool ok) {
    std::deque<Unsent> dropped;  // Destroyed after the lock is released: that releases payloads.
    Unsent next;
    {
      MutexLock lock(mutex_);
      // The call takes no more messages, also where it can still be read.
      if (!ok) {
        ended_ = true;
        dropped.swap(unsent_);
      }
      busy_ = !unsent_.empty();
      if (!busy_) return;
      next = std::move(unsent_.front());
      unsent_.pop_front();
    }
    // Only now, because chunks could be added to it while it waited. Without the lock, because gRPC
    // may release payloads in Write.
    if (next.shared.has_value()) next.bytes = proto::SerializeControl(*next.shared);
    call_->Write(next.bytes, &tags_.written);
  }

  // True if no write and no wake-up is under way; none begins from then on.
  bool StopSending() {
    std::deque<Unsent> dropped;  // As above.
    MutexLock lock(mutex_);
    ended_ = true;
    dropped.swap(unsent_);
    return !busy_;
  }

  TrainListener& listener_;
  grpc::ClientContext context_;
  grpc::CompletionQueue queue_;
  grpc::GenericStub stub_;
  std::unique_ptr<grpc::GenericClientAsyncReaderWriter> call_;
  grpc::Alarm wake_;

  // gRPC's tags: their addresses name the operations that have finished.
  struct Tags {
    Event start = Event::kStarted;
    Event read = Event::kRead;
    Event written = Event::kWritten;
    Event woken = Event::kWoken;
    Event finished = Event::kFinished;
  } tags_;

  // Used by the stream's thread only.
  grpc::ByteBuffer incoming_;
  grpc::Status status_;
  absl::Status malformed_;
  bool reading_ = false;
  bool finishing_ = false;

  Mutex mutex_;
  std::deque<Unsent> unsent_ ABSL_GUARDED_BY(mutex_);
  bool busy_ ABSL_GUARDED_BY(mutex_) = true;  // Starting, waking up, or writing.
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;

  std::thread thread_;
};

}  // namespace

v1::TrainRequest SharedGradientRequest(const v1::GradientHeader& header) {
  v1::TrainRequest message;
  v1::SharedGradients& gradients = *message.mutable_shared_gradients();
  gradients.set_step(header.step());
  gradients.set_attempt(header.attempt());
  gradients.set_micro_step_begin(header.micro_step_begin());
  gradients.set_micro_step_end(header.micro_step_end());
  gradients.set_final(header.final());
  gradients.set_may_guess(header.may_guess());
  gradients.add_chunks(header.chunk());
  return message;
}

std::unique_ptr<TrainCall> OpenGrpcTrainCall(std::shared_ptr<grpc::Channel> channel,
                                             TrainListener& listener) {
  return std::make_unique<GrpcTrainCall>(std::move(channel), listener);
}

}  // namespace ballast::client
