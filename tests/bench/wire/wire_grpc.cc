#include <grpcpp/channel.h>

#include <chrono>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "client/connect.h"
#include "client/session/payload_pieces.h"
#include "client/transport/train_call.h"
#include "cpu_optimizer_service/common/status.h"
#include "cpu_optimizer_service/common/system/mutex.h"
#include "tests/bench/wire/wire.h"

namespace ballast::bench {
namespace {

// Counts what comes. Thread-safe.
class Counter final : public client::TrainListener {
 public:
  void OnMessage(const v1::TrainResponse& message, client::PayloadPieces payload) override {
    MutexLock lock(mutex_);
    if (message.has_weights() && client::TotalBytes(payload) <= staging_.size()) {
      client::CopyPieces(payload, staging_.data());
      bytes_ += static_cast<int64_t>(client::TotalBytes(payload));
    }
    done_ = done_ || message.has_acknowledged();
    changed_.NotifyAll();
  }
  void OnClosed(const absl::Status& status) override {
    MutexLock lock(mutex_);
    closed_ = true;
    status_ = status;
    changed_.NotifyAll();
  }
  // Returns when the peer is done and so many bytes have come; begins to count anew.
  absl::Status AwaitTransfer(int64_t bytes) {
    const auto deadline =
        std::chrono::steady_clock::now() + std::chrono::seconds(kWireLimitSeconds);
    MutexLock lock(mutex_);
    while (!closed_ && !(done_ && bytes_ >= bytes)) {
      if (!changed_.WaitUntil(mutex_, deadline)) break;
    }
    if (!done_ || bytes_ != bytes) {
      return absl::UnavailableError(
          absl::StrCat(bytes_, " of ", bytes, " bytes came: ", status_.ToString()));
    }
    done_ = false;
    bytes_ = 0;
    return absl::OkStatus();
  }

 private:
  Mutex mutex_;
  CondVar changed_;
  bool done_ ABSL_GUARDED_BY(mutex_) = false;
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
  int64_t bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  // Where a message's bytes end up, warm and in one piece, as with a raw socket.
  std::vector<std::byte> staging_ ABSL_GUARDED_BY(mutex_) = std::vector<std::byte>(kMessageBytes);
  absl::Status status_ ABSL_GUARDED_BY(mutex_);
};

// The first message says how many come down, the last one that no more go up.
class GrpcWire final : public Wire {
 public:
  GrpcWire(std::shared_ptr<grpc::Channel> channel, const SendMemory& memory)
      : memory_(memory), stream_(client::OpenGrpcTrainCall(std::move(channel), counter_)) {}

  absl::Status Transfer(int64_t up, int64_t down) override {
    v1::TrainRequest first;
    first.mutable_begin_step()->set_step(static_cast<uint64_t>(down));
    stream_->Send(first);
    for (int64_t i = 0; i < up; ++i) {
      v1::GradientHeader header;
      header.set_step(1);
      header.set_chunk(static_cast<uint32_t>(i));
      header.set_micro_step_end(1);
      stream_->SendGradient(header, memory_.message(i), [] {});
    }
    v1::TrainRequest last;
    last.mutable_seal()->set_micro_steps(static_cast<uint32_t>(up));
    stream_->Send(last);
    return counter_.AwaitTransfer(down * kMessageBytes);
  }

 private:
  const SendMemory& memory_;
  Counter counter_;
  const std::unique_ptr<client::TrainCall> stream_;  // Last: it calls the counter.
};

}  // namespace

absl::StatusOr<std::unique_ptr<Wire>> OpenGrpcWire(const std::string& address,
                                                   const SendMemory& memory) {
  BALLAST_ASSIGN_OR_RETURN(auto channel, client::Connect(address));
  return std::make_unique<GrpcWire>(std::move(channel), memory);
}

}  // namespace ballast::bench
