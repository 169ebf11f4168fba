// The Train stream without an engine behind it: takes what comes and sends what was asked for.
#ifndef BALLAST_TESTS_BENCH_WIRE_WIRE_SERVICE_H_
#define BALLAST_TESTS_BENCH_WIRE_WIRE_SERVICE_H_

#include "ballast/v1/ballast.grpc.pb.h"
#include "tests/bench/wire/wire.h"

namespace ballast::bench {

// begin_step.step asks for so many weight messages; a seal after `micro_steps` gradients is
// acknowledged behind them. INVALID_ARGUMENT if the counts differ. Thread-safe.
class WireService final
    : public v1::TrainService::WithRawCallbackMethod_Train<v1::TrainService::Service> {
 public:
  explicit WireService(const SendMemory& memory) : memory_(memory) {}
  grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* Train(
      grpc::CallbackServerContext*) override;

 private:
  const SendMemory& memory_;
};

}  // namespace ballast::bench

#endif  // BALLAST_TESTS_BENCH_WIRE_WIRE_SERVICE_H_
