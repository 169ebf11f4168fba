// DiagnosticsService: data about this process for a bug report.
#ifndef BALLAST_SERVER_STATUS_DIAGNOSTICS_SERVICE_H_
#define BALLAST_SERVER_STATUS_DIAGNOSTICS_SERVICE_H_

#include <atomic>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "ballast/v1/diagnostics.grpc.pb.h"
#include "cpu_optimizer_service/engine.h"
#include "server/server.h"
#include "server/status/service_history.h"

namespace ballast::server {

class Caller;

struct ProcessDescription {
  std::map<std::string, std::string> settings;  // Flags, by name.
  ServiceHistory history;
  std::function<std::vector<std::string>()> last_log_lines;  // Oldest first. Thread-safe.
};

// Thread-safe. Registered with a server that does not outlive it.
class DiagnosticsService final
    : public v1::DiagnosticsService::WithRawCallbackMethod_DescribeService<
          v1::DiagnosticsService::Service> {
 public:
  // The engine outlives it.
  DiagnosticsService(const Engine& engine, ProcessDescription process)
      : engine_(engine), process_(std::move(process)) {}
  // The server whose metrics and callers count from now on. It outlives all calls. Calls before
  // that are refused.
  void Describes(const Server& server) { server_ = &server; }

  grpc::ServerUnaryReactor* DescribeService(grpc::CallbackServerContext* context,
                                            const grpc::ByteBuffer* request,
                                            grpc::ByteBuffer* response) override;

 private:
  // It shows the whole service, so it takes an operator of all possible jobs.
  absl::StatusOr<v1::ServiceDescription> Describe(const Caller& caller) const;

  const Engine& engine_;
  const ProcessDescription process_;
  std::atomic<const Server*> server_ = nullptr;
};

}  // namespace ballast::server

#endif  // BALLAST_SERVER_STATUS_DIAGNOSTICS_SERVICE_H_
