// --metrics-listen, also for a process that starts while its address is taken.
#ifndef BALLAST_SERVER_BALLASTD_STATUS_PAGE_H_
#define BALLAST_SERVER_BALLASTD_STATUS_PAGE_H_

#include <functional>
#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "cpu_optimizer_service/engine.h"
#include "cpu_optimizer_service/host/named_memory.h"
#include "server/server.h"
#include "server/status/http_server.h"
#include "server/status/service_history.h"
#include "server/status/status_server.h"

namespace ballast::server {

// Not thread-safe.
class StatusPage {
 public:
  // `memory` may be null, and outlives it.
  StatusPage(HttpOptions options, NamedMemory* memory)
      : options_(std::move(options)), memory_(memory) {}

  // OK also without --metrics-listen. Errors, in one line, as in HttpServer::Start.
  absl::Status Start();
  // Continues without the page, because jobs are more important: KeepTrying retries.
  void StartLater(const absl::Status& why);

  // What it shows from now on. Both outlive it.
  void Show(Engine& engine, const Server& server, const ServiceHistory& history);

  // If it could not start, retries now and then. Cheap; call it every few seconds.
  void KeepTrying(absl::Time now);

 private:
  const HttpOptions options_;
  NamedMemory* const memory_;
  std::unique_ptr<StatusServer> server_;  // May be null.
  std::function<void()> show_;
  absl::Time next_try_ = absl::InfiniteFuture();
  absl::Duration pause_;
};

}  // namespace ballast::server

#endif  // BALLAST_SERVER_BALLASTD_STATUS_PAGE_H_
