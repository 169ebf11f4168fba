// What can be seen of a service over HTTP: metrics for Prometheus, the status page and the JSON
// behind it, and whether the process lives and is ready.
//
//   auto status = StatusServer::Start({.listen = "127.0.0.1:7071"}).value();
//   ... jobs that a death left are taken over, and the server is started ...
//   status->Show(engine, *server, {});
//
//   /metrics  Prometheus' text format           /live   200 while the process answers
//   /         the page                          /ready  200 while it takes steps, otherwise 503
//   /api/...  see README.md
//
// Where the service has tokens, metrics and /api take one, of a viewer, and show the jobs that it is
// a viewer of; where it trusts clients' certificates, they take one of those. The page itself, /live
// and /ready say nothing of jobs and answer every peer.
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
  // Until Show it lives and is not ready. Errors are those of HttpServer::Start.
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
