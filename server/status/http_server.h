// A small read-only HTTP server for GET and HEAD.
//
//   auto server = HttpServer::Start({.listen = "127.0.0.1:7071"}, [](const httplib::Request& request) {
//     return request.path == "/live" ? HttpAnswer{.body = "ok\n"} : NotFound();
//   });
//
// cpp-httplib reads requests and writes answers. README.md has the bounds on what peers cost.
#ifndef BALLAST_SERVER_STATUS_HTTP_SERVER_H_
#define BALLAST_SERVER_STATUS_HTTP_SERVER_H_

#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "cpu_optimizer_service/host/named_memory.h"
#include "server/access/access_options.h"
#include "server/address.h"

namespace httplib {
struct Request;
}  // namespace httplib

namespace ballast::server {

struct HttpAnswer {
  int code = 200;
  std::string content_type = "text/plain; charset=utf-8";
  std::string body;
};

struct HttpOptions {
  // "HOST:PORT", "[IPV6]:PORT", or "PORT" on 127.0.0.1. Port 0: the system chooses.
  std::string listen;
  bool allow_remote = false;  // Allow addresses that other hosts can reach without authentication.
  // With a certificate the port speaks only TLS. Its files are read again when they change.
  AccessOptions access;
};

class HttpServer {
 public:
  // Called from several threads at once. An exception is answered with 500. `remote_addr` is gRPC's
  // name for the peer, `ssl` its session, null without TLS.
  using Handler = std::function<HttpAnswer(const httplib::Request&)>;

  // The address to listen on. INVALID_ARGUMENT: malformed; reachable by other hosts without
  // `allow_remote` and without TLS that authenticates them; or tokens would go there without TLS.
  static absl::StatusOr<Address> ParseListen(const HttpOptions& options);

  // INVALID_ARGUMENT: as in ParseListen, or wrong files. UNAVAILABLE: the address cannot be used,
  // for example a taken port. With `memory`, nullable, its keeper has the sockets, too
  // (ListeningSockets::Add).
  static absl::StatusOr<std::unique_ptr<HttpServer>> Start(const HttpOptions& options,
                                                           Handler handler,
                                                           NamedMemory* memory = nullptr);
  ~HttpServer();  // Waits for answers in progress.

  // "127.0.0.1:7071", with the port that the system chose.
  const std::string& address() const;

 private:
  struct Impl;
  explicit HttpServer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace ballast::server

#endif  // BALLAST_SERVER_STATUS_HTTP_SERVER_H_
