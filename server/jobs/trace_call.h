// One TraceJob call.
#ifndef BALLAST_SERVER_JOBS_TRACE_CALL_H_
#define BALLAST_SERVER_JOBS_TRACE_CALL_H_

#include <chrono>
#include <memory>
#include <optional>

#include "absl/status/status.h"
#include "ballast/v1/diagnostics.pb.h"
#include "cpu_optimizer_service/engine.h"
#include "server/call_pool.h"
#include "server/jobs/streamed_answer.h"
#include "server/jobs/trace_message.h"

namespace ballast::server {

class TraceCall final : public StreamedAnswer<v1::TraceJobResponse> {
 public:
  // The engine and the pools outlive it.
  TraceCall(const Engine& engine, CallPools& pools, grpc::CallbackServerContext& context,
            const absl::StatusOr<Caller>& caller, const grpc::ByteBuffer& request);

 private:
  using Clock = std::chrono::steady_clock;

  absl::Status Start(const Engine& engine, CallPools& pools, const Caller& caller,
                     const grpc::ByteBuffer& bytes, std::chrono::system_clock::time_point deadline);
  void Trace(const std::shared_ptr<Job>& job, uint32_t steps, Clock::time_point end);
  bool Fill(v1::TraceJobResponse& message) override { return messages_->Next(message); }

  std::optional<TraceMessages> messages_;  // Once the trace has been taken.
};

}  // namespace ballast::server

#endif  // BALLAST_SERVER_JOBS_TRACE_CALL_H_
