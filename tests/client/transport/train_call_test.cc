// The messages of a rank's stream, as a service receives them.
#include "client/transport/train_call.h"

#include <gmock/gmock.h>
#include <grpcpp/server.h>
#include <grpcpp/server_builder.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "ballast/v1/train.grpc.pb.h"
#include "client/connect.h"
#include "client/transport/steady_deadline.h"
#include "cpu_optimizer_service/common/system/mutex.h"
#include "tests/client/session/message_name.h"

namespace ballast::client {
namespace {

constexpr absl::Duration kLongest = absl::Seconds(30);

// Reads nothing until Read is called, then everything.
class SlowService final : public v1::TrainService::Service {
 public:
  grpc::Status Train(
      grpc::ServerContext* context,
      grpc::ServerReaderWriter<v1::TrainResponse, v1::TrainRequest>* stream) override {
    AwaitTold();
    v1::TrainRequest message;
    while (stream->Read(&message)) {
      MutexLock lock(mutex_);
      names_.push_back(NameOf(message));
      changed_.NotifyAll();
    }
    return grpc::Status::OK;
  }
  void Read() {
    MutexLock lock(mutex_);
    told_ = true;
    changed_.NotifyAll();
  }
  // The messages read so far, when the last one has this name or after a limit.
  std::vector<std::string> AwaitMessage(const std::string& name) {
    MutexLock lock(mutex_);
    const auto deadline = SteadyDeadline(kLongest);
    while (names_.empty() || names_.back() != name) {
      if (!changed_.WaitUntil(mutex_, deadline)) break;
    }
    return names_;
  }

 private:
  void AwaitTold() {
    MutexLock lock(mutex_);
    const auto deadline = SteadyDeadline(kLongest);
    while (!told_ && changed_.WaitUntil(mutex_, deadline)) {
    }
  }

  Mutex mutex_;
  CondVar changed_;
  bool told_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<std::string> names_ ABSL_GUARDED_BY(mutex_);
};

class DeafListener final : public TrainListener {
 public:
  void OnMessage(const v1::TrainResponse&, PayloadPieces) override {}
  void OnClosed(const absl::Status&) override {}
};

v1::GradientHeader Header(uint32_t chunk, uint32_t micro_step, bool final) {
  v1::GradientHeader header;
  header.set_step(5);
  header.set_chunk(chunk);
  header.set_micro_step_begin(micro_step);
  header.set_micro_step_end(micro_step + 1);
  header.set_final(final);
  return header;
}

v1::TrainRequest End(uint32_t micro_step) {
  v1::TrainRequest end;
  end.mutable_end_micro_step()->set_step(5);
  end.mutable_end_micro_step()->set_micro_step(micro_step);
  return end;
}

TEST(GrpcTrainCall, SharedGradientsThatWaitTogetherGoInOneMessageInOrder) {
  SlowService service;
  grpc::ServerBuilder builder;
  builder.RegisterService(&service);
  const std::unique_ptr<grpc::Server> server = builder.BuildAndStart();
  DeafListener listener;
  {
    const auto stream =
        OpenGrpcTrainCall(server->InProcessChannel(ServiceChannelArguments()), listener);
    // So large that it cannot be sent before the service reads; all others wait behind it.
    const std::vector<std::byte> payload(size_t{3} << 20);
    stream->SendGradient(Header(9, 0, false), payload, [] {});
    std::string chunks;
    for (uint32_t chunk = 0; chunk < 400; ++chunk) {
      stream->SendSharedGradient(Header(chunk, 0, false));
      chunks += (chunk == 0 ? "" : " ") + std::to_string(chunk);
    }
    stream->SendSharedGradient(Header(1, 1, false));
    stream->SendSharedGradient(Header(2, 1, false));
    stream->SendSharedGradient(Header(1, 1, false));  // Never twice in one message.
    stream->Send(End(0));
    stream->SendSharedGradient(Header(2, 1, false));
    stream->SendSharedGradient(Header(3, 1, true));
    stream->SendSharedGradient(Header(4, 1, true));
    stream->Send(End(1));
    service.Read();
    EXPECT_EQ(service.AwaitMessage("end 5 micro-step 1"),
              (std::vector<std::string>{
                  "gradient 5 chunk 9 [0, 1)", "shared gradients 5 chunks " + chunks + " [0, 1)",
                  "shared gradients 5 chunks 1 2 [1, 2)", "shared gradients 5 chunks 1 [1, 2)",
                  "end 5 micro-step 0", "shared gradients 5 chunks 2 [1, 2)",
                  "shared gradients 5 chunks 3 4 [1, 2) final", "end 5 micro-step 1"}));
  }
  server->Shutdown();
}

}  // namespace
}  // namespace ballast::client
