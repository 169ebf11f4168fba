// One stream of EngineTransport: a queue, and one thread that takes messages up to the engine and
// down to the client.
#ifndef BALLAST_TESTS_HISTORIES_ENGINE_ENGINE_STREAM_H_
#define BALLAST_TESTS_HISTORIES_ENGINE_ENGINE_STREAM_H_

#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <thread>

#include "client/transport/transport.h"
#include "cpu_optimizer_service/common/system/mutex.h"
#include "cpu_optimizer_service/engine.h"
#include "server/train/rank_outbox.h"
#include "tests/histories/members/host.h"
#include "tests/histories/session/wires.h"

namespace ballast::histories {

class EngineStream final : public client::TrainCall, private server::RankWire {
 public:
  EngineStream(Host& host, Wires& wires, int rank, client::TrainListener& listener);
  ~EngineStream() override;

  void Send(const v1::TrainRequest& message) override;
  void SendGradient(const v1::GradientHeader& header, absl::Span<const std::byte> payload,
                    std::function<void()> let_go) override;
  void SendSharedGradient(const v1::GradientHeader& header) override;

 private:
  struct Message {
    v1::TrainRequest message;
    absl::Span<const std::byte> payload;
    std::function<void()> let_go;  // May be null.
  };

  // RankWire: of the outbox.
  void Read() override;
  void Write(const grpc::ByteBuffer& bytes) override;
  void Finish(const absl::Status& status) override;

  // Of the thread.
  void Run();
  bool HasDied() const { return visit_ != nullptr && visit_->is_dead(); }
  void TakeUp(Message message);
  void TakeDown(const grpc::ByteBuffer& bytes);
  void BreakOff(bool seen);
  void TellClosed(const absl::Status& status);
  absl::Status Handle(const Message& message);
  absl::Status Open(const v1::OpenTrain& request);
  absl::Status BeginStep(const v1::BeginStep& request);
  absl::Status Contribute(const Message& message);
  absl::Status EndMicroStep(const v1::EndMicroStep& request);
  absl::Status Seal(const v1::Seal& request);
  absl::Status Vote(const v1::CastVote& request);
  absl::Status Discard(const v1::Discard& request);

  Host& host_;
  Wires& wires_;
  const int rank_;
  client::TrainListener& listener_;
  const std::shared_ptr<server::RankOutbox> outbox_;

  // Of the thread.
  std::unique_ptr<Host::Visit> visit_;  // Since Open.
  std::unique_ptr<RankStream> rank_stream_;
  int first_of_rank_ = 0;
  bool broken_ = false;  // Nothing goes up or comes down any more.
  bool unseen_ = false;  // By the service, that is.
  bool told_closed_ = false;

  Mutex mutex_;
  CondVar changed_;
  std::deque<Message> up_ ABSL_GUARDED_BY(mutex_);
  const grpc::ByteBuffer* down_ ABSL_GUARDED_BY(mutex_) = nullptr;
  bool reading_ ABSL_GUARDED_BY(mutex_) = true;
  std::optional<absl::Status> finished_ ABSL_GUARDED_BY(mutex_);
  bool ending_ ABSL_GUARDED_BY(mutex_) = false;
  bool died_ ABSL_GUARDED_BY(mutex_) = false;  // The process.
  std::thread thread_;
};

}  // namespace ballast::histories

#endif  // BALLAST_TESTS_HISTORIES_ENGINE_ENGINE_STREAM_H_
