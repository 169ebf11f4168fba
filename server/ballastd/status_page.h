// What --metrics-listen asks for, of a process that also starts where its address is taken for now.
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

  // OK also without --metrics-listen. Errors, in one line, are those of HttpServer::Start.
  absl::Status Start();
  // It goes on without, because jobs are worth more: KeepTrying tries it again.
  void StartLater(const absl::Status& why);

  // What it shows from now on. Both outlive it.
  void Show(Engine& engine, const Server& server, const ServiceHistory& history);

  // Where it could not start, tries it again, now and then. Cheap; to be called every few seconds.
  void KeepTrying(absl::Time now);

 private:
  const HttpOptions options_;
  NamedMemory* const memory_;
  std::unique_ptr<StatusServer> server_;  // Null: there is none.
  std::function<void()> show_;
  absl::Time next_try_ = absl::InfiniteFuture();
  absl::Duration pause_;
};

}  // namespace ballast::server

#endif  // BALLAST_SERVER_BALLASTD_STATUS_PAGE_H_
