// A small HTTP server for looking: it answers GET and HEAD, and changes nothing.
//
//   auto server = HttpServer::Start("127.0.0.1:7071", [](const HttpRequest& request) {
//     return request.path == "/live" ? HttpAnswer{.body = "ok\n"} : NotFound();
//   });
//
// Some threads answer one request each, and a peer that sends none has one of them for two seconds,
// so that what peers here cost has a bound and the training never notices.
#ifndef BALLAST_SERVER_STATUS_HTTP_SERVER_H_
#define BALLAST_SERVER_STATUS_HTTP_SERVER_H_

#include <functional>
#include <map>
#include <memory>
#include <string>

#include "absl/status/statusor.h"

namespace ballast::server {

struct HttpRequest {
  std::string path;                          // Decoded, without the query.
  std::map<std::string, std::string> query;  // Decoded; of a name that comes twice, the first.
  std::string authorization;                 // The header of this name; empty: there is none.
  std::string peer;                          // Its address.

  // Empty if the query has none of this name.
  std::string Get(const std::string& name) const;
};

struct HttpAnswer {
  int code = 200;
  std::string content_type = "text/plain; charset=utf-8";
  std::string body;
};

class HttpServer {
 public:
  // Called from several threads at once. What it throws is answered with 500.
  using Handler = std::function<HttpAnswer(const HttpRequest&)>;

  // `address`: "HOST:PORT" or "PORT" of 127.0.0.1; HOST is localhost or an IPv4 address. Port 0: the
  // system chooses. INVALID_ARGUMENT: another form, or one that other hosts reach and
  // `allow_remote` is not set. UNAVAILABLE: it cannot be listened on, such as a taken port.
  static absl::StatusOr<std::unique_ptr<HttpServer>> Start(const std::string& address,
                                                           bool allow_remote, Handler handler);
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
