#include "tests/bench/wire/wire_service.h"

#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/server_callback.h>

#include <cstddef>
#include <optional>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/system/mutex.h"
#include "proto/frame.h"
#include "proto/status.h"

namespace ballast::bench {
namespace {

// Owns itself, as gRPC's callback API has it.
class WireReactor final : public grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer> {
 public:
  explicit WireReactor(const SendMemory& memory) : memory_(memory) { StartRead(&incoming_); }

  void OnReadDone(bool ok) override {
    if (!ok) return EndReading(absl::OkStatus());
    auto frame = proto::ParseTrainRequest(incoming_);
    incoming_.Clear();
    const absl::Status taken = frame.ok() ? Take(*frame) : frame.status();
    frame = absl::UnknownError("taken");  // Frees the payload before the next one is read.
    if (!taken.ok()) return EndReading(taken);
    Pump();
    StartRead(&incoming_);
  }
  void OnWriteDone(bool ok) override {
    {
      MutexLock lock(mutex_);
      writing_ = false;
      if (!ok) owed_ = 0;
    }
    Pump();
  }
  void OnDone() override { delete this; }

 private:
  absl::Status Take(const proto::Frame<v1::TrainRequest>& frame) {
    if (frame.payload.size_bytes() <= staging_.size()) frame.payload.CopyTo(staging_.data());
    MutexLock lock(mutex_);
    if (frame.message.has_begin_step()) {
      owed_ += static_cast<int64_t>(frame.message.begin_step().step());
    } else if (frame.message.has_gradient() &&
               frame.payload.size_bytes() == static_cast<size_t>(kMessageBytes)) {
      ++received_;
    } else if (frame.message.has_seal()) {
      if (frame.message.seal().micro_steps() != received_) {
        return absl::InvalidArgumentError(absl::StrCat(received_, " messages came"));
      }
      received_ = 0;
      acknowledge_ = true;
    } else {
      return absl::InvalidArgumentError("not a message of this benchmark");
    }
    return absl::OkStatus();
  }

  void EndReading(const absl::Status& status) {
    {
      MutexLock lock(mutex_);
      end_ = status;
      owed_ = 0;
      acknowledge_ = false;
    }
    Pump();
  }

  // Begins the next write, or the end, unless something is being written.
  void Pump() {
    MutexLock lock(mutex_);
    if (writing_ || finished_) return;
    if (owed_ > 0) {
      v1::WeightHeader header;
      header.set_step(1);
      header.set_chunk(static_cast<uint32_t>(owed_));
      outgoing_ = proto::SerializeTrainWeights(header, memory_.message(owed_), [] {});
      --owed_;
    } else if (acknowledge_) {
      v1::TrainResponse done;
      done.mutable_acknowledged()->set_messages(1);
      outgoing_ = proto::SerializeControl(done);
      acknowledge_ = false;
    } else {
      finished_ = end_.has_value();
      if (finished_) Finish(proto::ToGrpc(*end_));
      return;
    }
    writing_ = true;
    StartWrite(&outgoing_);
  }

  const SendMemory& memory_;
  grpc::ByteBuffer incoming_;  // Of the read that is under way.
  // Where its bytes end up, warm and in one piece, as with a raw socket; for who reads.
  std::vector<std::byte> staging_ = std::vector<std::byte>(kMessageBytes);
  Mutex mutex_;
  grpc::ByteBuffer outgoing_ ABSL_GUARDED_BY(mutex_);
  int64_t owed_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t received_ ABSL_GUARDED_BY(mutex_) = 0;
  bool acknowledge_ ABSL_GUARDED_BY(mutex_) = false;
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool finished_ ABSL_GUARDED_BY(mutex_) = false;
  std::optional<absl::Status> end_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace

grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* WireService::Train(
    grpc::CallbackServerContext*) {
  return new WireReactor(memory_);
}

}  // namespace ballast::bench
