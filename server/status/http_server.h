// A small HTTP server for looking: it answers GET and HEAD, and changes nothing.
//
//   auto server = HttpServer::Start({.listen = "127.0.0.1:7071"}, [](const HttpRequest& request) {
//     return request.path == "/live" ? HttpAnswer{.body = "ok\n"} : NotFound();
//   });
//
// A peer that says nothing, stops in the middle, or does not read has no thread, so that what peers
// here cost has a bound and the training never notices: some threads answer what has arrived whole.
#ifndef BALLAST_SERVER_STATUS_HTTP_SERVER_H_
#define BALLAST_SERVER_STATUS_HTTP_SERVER_H_

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "cpu_optimizer_service/host/named_memory.h"
#include "server/access/access_options.h"
#include "server/address.h"
#include "server/status/http_exchange.h"
#include "server/status/http_request.h"

namespace ballast::server {

struct HttpOptions {
  // "HOST:PORT", "[IPV6]:PORT" or "PORT" of 127.0.0.1. Port 0: the system chooses.
  std::string listen;
  bool allow_remote = false;  // Other hosts may reach it, whatever they may see there.
  // With a certificate the port speaks TLS, and nothing else. Its files are read again when they
  // change.
  AccessOptions access;
};

class HttpServer {
 public:
  // Called from several threads at once. What it throws is answered with 500.
  using Handler = HttpExchange::Answerer;

  // Where it is to listen. INVALID_ARGUMENT: another form of address; one that other hosts reach,
  // where neither `allow_remote` is set nor TLS tells who they are; tokens that would go there
  // without TLS.
  static absl::StatusOr<Address> ParseListen(const HttpOptions& options);

  // INVALID_ARGUMENT: as ParseListen, or wrong files. UNAVAILABLE: it cannot be listened on, such as
  // a taken port. With `memory`, nullable, its keeper has the sockets, too (Listener::Add).
  static absl::StatusOr<std::unique_ptr<HttpServer>> Start(const HttpOptions& options,
                                                           Handler handler,
                                                           NamedMemory* memory = nullptr);
  ~HttpServer();  // Waits for answers that are being made.

  // "127.0.0.1:7071", with the port that the system chose.
  const std::string& address() const;

 private:
  struct Impl;
  explicit HttpServer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace ballast::server

#endif  // BALLAST_SERVER_STATUS_HTTP_SERVER_H_
