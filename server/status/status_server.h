// A service over HTTP: metrics for Prometheus, the status page and its JSON, and whether the
// process lives and is ready.
//
//   auto status = StatusServer::Start({.listen = "127.0.0.1:7071"}).value();
//   ... jobs of a crashed process are taken over, and the server starts ...
//   status->Show(engine, *server, {});
//
//   /metrics  Prometheus' text format           /live   200 while the process answers
//   /         the page                          /ready  200 while it takes steps, otherwise 503
//   /api/...  see README.md
//
// If the service has tokens, metrics and /api require a viewer's token, and show the viewer's jobs.
// If it trusts clients' certificates, they accept one of those. The page itself, /live and /ready
// reveal nothing about jobs and answer every peer.
#ifndef BALLAST_SERVER_STATUS_STATUS_SERVER_H_
#define BALLAST_SERVER_STATUS_STATUS_SERVER_H_

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "cpu_optimizer_service/engine.h"
#include "server/server.h"
#include "server/status/http_server.h"
#include "server/status/service_history.h"

namespace ballast::server {

class StatusServer {
 public:
  // Until Show it lives and is not ready. Errors as in HttpServer::Start.
  static absl::StatusOr<std::unique_ptr<StatusServer>> Start(const HttpOptions& options,
                                                             NamedMemory* memory = nullptr);
  ~StatusServer();

  // Once. Engine and server outlive it.
  void Show(Engine& engine, const Server& server, const ServiceHistory& history);

  const std::string& url() const;  // "https://127.0.0.1:7071", with the port that the system chose.

 private:
  struct Shown;
  struct Impl;
  explicit StatusServer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace ballast::server

#endif  // BALLAST_SERVER_STATUS_STATUS_SERVER_H_
