// A request of HTTP's and its answer, on a connection of their own.
//
// It goes on whenever the connection can, and never waits for the peer, so that a slow one has no
// thread. Each of its parts ends at a set time, however slow the peer is.
#ifndef BALLAST_SERVER_STATUS_HTTP_EXCHANGE_H_
#define BALLAST_SERVER_STATUS_HTTP_EXCHANGE_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

#include "absl/status/status.h"
#include "cpu_optimizer_service/common/system/file_descriptor.h"
#include "server/status/http_connection.h"
#include "server/status/http_request.h"

namespace ballast::server {

struct HttpAnswer {
  int code = 200;
  std::string content_type = "text/plain; charset=utf-8";
  std::string body;
};

// Not thread-safe.
class HttpExchange {
 public:
  using Clock = std::chrono::steady_clock;
  // Makes the answer to a request. It may take its time, and the thread that calls Proceed.
  using Answerer = std::function<HttpAnswer(const HttpRequest&)>;

  // The socket does not block.
  HttpExchange(FileDescriptor socket, HttpTls tls);

  // Goes as far as it can now. Returns what it waits for then; kNothing: it is over.
  HttpConnection::Needs Proceed(const Answerer& answer);

  // When it is to be given up, if it has not gone on until then.
  Clock::time_point deadline() const { return deadline_; }
  int socket() const { return connection_.socket(); }
  std::string peer() const { return connection_.peer(); }

 private:
  using Needs = HttpConnection::Needs;
  enum class Part : uint8_t { kOpening, kAsking, kAnswering, kEnding };

  // Each goes on with its part, which may end with the beginning of another one.
  Needs Open();
  Needs Ask(const Answerer& answer);
  Needs Answer();
  void BeginAnswer(const HttpAnswer& answer, bool with_body = true);
  void Begin(Part part);

  HttpConnection connection_;
  Part part_ = Part::kOpening;
  Clock::time_point deadline_;
  std::string head_;
  std::string text_;  // Of the answer.
  size_t written_ = 0;
};

}  // namespace ballast::server

#endif  // BALLAST_SERVER_STATUS_HTTP_EXCHANGE_H_
